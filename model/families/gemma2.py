"""Gemma 2: scores and logits with a soft-cap, a window in every second layer, norms on both sides
of each branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import Family, alternating
from .gemma3 import ACTIVATION, without_activation

_SIZES = {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


class Gemma2Family(Family):
    """A family whose layers alternate, beginning with a window, unless the config says
    otherwise."""

    def normalise(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.normalise`."""
        config = without_activation(config, self.architecture)
        if config.get("layer_types") is None:
            config["layer_types"] = alternating(config.get("num_hidden_layers", 26))
        return config


def _sizes(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int, scalar: int
) -> dict[str, Any]:
    return {
        **_SIZES,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "layer_types": tuple(alternating(layers)),
        "query_pre_attn_scalar": scalar,
        "rope": {"theta": 10000.0},
    }


GEMMA2 = Gemma2Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    llama_cpp_rules=(),
    without_rope_scaling=("SGLang", "mlx-lm"),
    without_window=("mlx-lm",),
    computes={
        "norms": "both",
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "scaled_embeddings": True,
    },
    defaults={
        **_SIZES,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
    },
    configurable=(
        "attention_bias",
        "sliding_window",
        "layer_types",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    ),
    constants={"hidden_act": ACTIVATION, "hidden_activation": ACTIVATION},
    presets={
        "gemma-2-2b": _sizes(2304, 9216, 26, 8, 4, 256, 256),
        "gemma-2-9b": _sizes(3584, 14336, 42, 16, 8, 256, 256),
        "gemma-2-27b": _sizes(4608, 36864, 46, 32, 16, 128, 144),
    },
)
