"""ERNIE 4.5 (dense): Llama's layer with RoPE over neighbouring channels."""

from __future__ import annotations

from .family import Family

_THETA = 5e5
_SIZES = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}


ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    without_rope_scaling=("mlx-lm",),
    computes={"rope_interleaved": True},
    defaults=_SIZES,
    constants={"use_bias": False},
    config_names={"attention_bias": "use_bias"},
    theta=_THETA,
    presets={"ernie-4.5-0.3b": {**_SIZES, "rope": {"theta": _THETA}}},
)
