"""GLM-4 (0414; dense): RoPE over neighbouring channels of half of each head, norms on both sides of
each branch, and files with a fused gate_up_proj."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import PARTIAL, Family, with_partial_rotary

_SIZES = {
    "vocab_size": 151552,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "bos_token_id": None,
    "eos_token_id": (151329, 151336, 151338),
    "pad_token_id": 151329,
    PARTIAL: 0.5,
}
_PUBLISHED = {**_SIZES, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5}


class Glm4Family(Family):
    """A family whose configs may give the share of rotated channels within the rotary embedding."""

    def normalise(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.normalise`."""
        config = with_partial_rotary(config)
        if config.get("eos_token_id") is None:  # as transformers does
            config["eos_token_id"] = _SIZES["eos_token_id"]
        return config


GLM4 = Glm4Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    without_rope_scaling=("mlx-lm",),
    computes={"norms": "both", "rope_interleaved": True, "output_bias": False},
    defaults={
        **_SIZES,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
    },
    configurable=("attention_bias", PARTIAL),
    tensors={
        "post_attention_layernorm.weight": "post_self_attn_layernorm.weight",
        "pre_feedforward_layernorm.weight": "post_attention_layernorm.weight",
        "post_feedforward_layernorm.weight": "post_mlp_layernorm.weight",
    },
    fused={"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")},
    presets={
        "glm-4-9b": {
            **_PUBLISHED,
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
        },
        "glm-4-32b": {
            **_PUBLISHED,
            "hidden_size": 6144,
            "intermediate_size": 23040,
            "num_hidden_layers": 61,
            "num_attention_heads": 48,
        },
    },
)
