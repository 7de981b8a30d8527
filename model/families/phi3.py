"""Phi-3 and Phi-4 (dense): files with fused projections, the RoPE rule longrope; in some versions a
sliding window, or RoPE on part of each head."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from ..rope_config import PER_CHANNEL, RopeConfig
from .family import AS_MISTRAL, PARTIAL, Family, with_partial_rotary

_ORIGINAL = "original_max_position_embeddings"
_SIZES = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "eos_token_id": 32000,
    "pad_token_id": 32000,
}


class Phi3Family(Family):
    """A family whose configs give the original length next to the RoPE rule, and may use older
    names of longrope."""

    def normalise(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.normalise`. As transformers does, reads `su`, and `yarn` with the numbers of
        longrope, as longrope."""
        config = with_partial_rotary(config)
        for key in ("rope_scaling", "rope_parameters"):
            if isinstance(config.get(key), dict):
                rope = dict(config[key])
                rule = rope.get("rope_type", rope.get("type"))
                if rule == "su" or (rule == "yarn" and set(PER_CHANNEL) & rope.keys()):
                    rope["rope_type"] = "longrope"
                config[key] = rope
        return config

    def write(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.write`."""
        rope = fields["rope_scaling"] or {}
        return {
            **super().write(fields),
            _ORIGINAL: rope.get(_ORIGINAL, fields["max_position_embeddings"]),
        }

    def published(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.published`. Transformers 4 refuses a `rope_scaling` with other than these
        three fields, and scales by the quotient of the two lengths; transformers 5 prefers it to
        `rope_parameters`, and scales by the same unless it has a factor."""
        rope = written.get("rope_scaling") or {}
        if not set(PER_CHANNEL) <= rope.keys():
            return dict(written)
        three = {"type": "longrope", **{name: rope[name] for name in PER_CHANNEL}}
        changed = {**written, "rope_scaling": three}
        length = written["max_position_embeddings"]
        said, meant = (
            RopeConfig.from_hf({**self.normalise(config), "rope_parameters": None}, length)
            for config in (changed, written)
        )
        if said == meant:
            return changed
        warnings.warn(
            "config.json: only transformers 5 can load it, since version 4 scales longrope by "
            f"max_position_embeddings / {_ORIGINAL} alone, and this model's RoPE scales otherwise",
            stacklevel=2,
        )
        return dict(written)


PHI3 = Phi3Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    llama_cpp_rules=("default", "longrope"),
    without_window=AS_MISTRAL,
    defaults={**_SIZES, _ORIGINAL: 4096},
    configurable=("sliding_window", PARTIAL),
    ignores=("attention_bias", "use_sliding_window"),
    rules=("default", "longrope"),  # transformers refuses others
    fused={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
    presets={
        "phi-3-mini-4k": {
            **_SIZES,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "sliding_window": 2047,
        },
    },
)
