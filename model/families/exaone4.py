"""EXAONE 4: OLMo 2's norms after the branches, an RMS norm per query and key head, and in some
models a window in most layers, and no RoPE in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import AS_LLAMA, Family
from .local_rope import FULL, LOCAL, layer_types, with_layer_types

_WINDOW = 4096
_ROPE = {
    "theta": 1e6,
    "rule": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 361, "pad_token_id": 0}


class Exaone4Family(Family):
    """A family whose configs name the kinds of layers, or the interval of those without a
    window."""

    def normalise(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.normalise`.

        Raises:
          ValueError: neither the layers' kinds nor an interval; transformers cannot read that.
        """
        config = {"sliding_window": _WINDOW, **config}
        interval = config.pop("sliding_window_pattern", 4)
        if config["sliding_window"] is None:
            if {*(config.get("layer_types") or ())} <= {FULL}:
                config["layer_types"] = None
        elif config.get("layer_types") is None:
            if not isinstance(interval, int) or interval < 1:
                raise ValueError(
                    f"sliding_window_pattern: found {interval!r} without layer_types; layer_types, "
                    "or the interval of the layers without a window, such as 4, would work"
                )
            with_layer_types(config, interval, layers=32)
        return config

    def write(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.write`. Some programs read the kinds of layers from letters ("LLLG")."""
        layers, window = fields["num_hidden_layers"], fields["sliding_window"]
        kinds = list(fields["layer_types"] or [LOCAL if window else FULL] * layers)
        letters = "".join("L" if kind == LOCAL else "G" for kind in kinds)
        period = next(p for p in range(1, layers + 1) if (letters[:p] * layers)[:layers] == letters)
        return {
            **super().write(fields),
            "layer_types": kinds,
            "sliding_window_pattern": letters[:period] if window else None,
        }


EXAONE4 = Exaone4Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    computes={"qk_norm": "head", "norms": "after", "rope_with_window_only": True},
    llama_cpp_rules=AS_LLAMA,
    defaults={
        "vocab_size": 102400,
        "intermediate_size": 16384,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
    },
    configurable=("sliding_window", "layer_types"),
    presets={
        "exaone-4.0-1.2b": {
            **_TOKENS,
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "num_hidden_layers": 30,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope": _ROPE,
        },
        "exaone-4.0-32b": {
            **_TOKENS,
            "vocab_size": 102400,
            "hidden_size": 5120,
            "intermediate_size": 27392,
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": _WINDOW,
            "layer_types": layer_types(64, 4),
            "rope": _ROPE,
        },
    },
)
