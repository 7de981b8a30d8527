"""Gemma 3 (text): layers with and without a window, an RoPE base for each kind, and norms on both
sides of each branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..number_checks import require_int
from .family import Family
from .local_rope import layer_types, split_ropes, with_layer_types, written

ACTIVATION = "gelu_pytorch_tanh"


def without_activation(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Returns the fields of a Gemma config without its activation, which has two names.

    With both, transformers reads `hidden_activation`: the first Gemma's `hidden_act` was wrong.

    Raises:
      ValueError: it is not the one that the family has.
    """
    names = ("hidden_activation", "hidden_act")
    read = next((name for name in names if config.get(name) is not None), None)
    if read and config[read] != ACTIVATION:
        raise ValueError(
            f"{read}: found {config[read]!r:.80}; only {ACTIVATION!r} is supported in "
            f"{architecture}"
        )
    return {name: value for name, value in config.items() if name not in names}


class Gemma3Family(Family):
    """A family whose configs name two rotary embeddings, and the kinds of layers or their repeating
    pattern."""

    def normalise(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.normalise` and `split_ropes`. Takes the spellings of transformers 4
        (`rope_local_base_freq`) and 5."""
        config = without_activation(config, self.architecture)
        interval = config.pop("sliding_window_pattern", None)
        if interval is not None:
            require_int("sliding_window_pattern", interval, at_least=1)
        with_layer_types(config, interval or 6, layers=26)
        full, local = (config.pop(name, None) for name in ("rope_theta", "rope_local_base_freq"))
        split_ropes(
            config,
            self.architecture,
            full=1e6 if full is None else full,
            local=1e4 if local is None else local,
        )
        return config

    def write(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.write` and `written`."""
        config = written(super().write(fields), fields)
        local = config["rope_parameters"]["sliding_attention"]
        return {**config, "rope_local_base_freq": local["rope_theta"]}


def _sizes(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, window: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "sliding_window": window,
        "layer_types": layer_types(layers, 6),
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rope": {"theta": 1e6},
        "local_rope": {"theta": 1e4},
        **more,
    }


GEMMA3 = Gemma3Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    computes={
        "qk_norm": "head",
        "norms": "both",
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "scaled_embeddings": True,
    },
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
    },
    configurable=(
        "attention_bias",
        "sliding_window",
        "layer_types",
        "query_pre_attn_scalar",
        "final_logit_softcapping",
        "local_rope",
    ),
    constants={"hidden_act": ACTIVATION, "hidden_activation": ACTIVATION},
    presets={
        "gemma-3-270m": _sizes(640, 2048, 18, 4, 1, 512),
        "gemma-3-1b": _sizes(1152, 6912, 26, 4, 1, 512),
        "gemma-3-12b": _sizes(
            3840,
            15360,
            48,
            16,
            8,
            1024,
            vocab_size=262208,
            max_position_embeddings=131072,
            rope={"theta": 1e6, "rule": "linear", "factor": 8.0},
        ),
    },
)
