"""Gemma 3 (text): layers with and without a window, an RoPE base for each kind, and norms on both
sides of each branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import Family

ACTIVATION = "gelu_pytorch_tanh"


def without_activation(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Returns the fields of a Gemma config but its activation, under either of its names.

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
        """See `Family.normalise`. Takes the spellings of transformers 4 (`rope_local_base_freq`)
        and 5. Like transformers, reads no original length beside the rotary embeddings.

        Raises:
          ValueError: an object of the wrong type or name, or one that transformers reads otherwise.
        """
        config = without_activation(config, self.architecture)
        pattern = config.pop("sliding_window_pattern", None) or 6
        layers = config.get("num_hidden_layers", 26)
        if config.get("layer_types") is None:
            config["layer_types"] = [
                "sliding_attention" if (i + 1) % pattern else "full_attention"
                for i in range(layers)
            ]
        config.pop("original_max_position_embeddings", None)
        config["rope_parameters"], config["local_rope_parameters"] = _ropes(config)
        return config

    def write(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.write`. Without a local embedding, layers with a window have the others'."""
        config = super().write(fields)
        local = config.pop("local_rope_parameters", fields["rope_parameters"])
        ropes = {"full_attention": fields["rope_parameters"], "sliding_attention": local}
        return {**config, "rope_local_base_freq": local["rope_theta"], "rope_parameters": ropes}


def _ropes(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Removes the fields of the rotary embeddings from a config.json, and returns that of layers
    without a window and that of layers with one.

    Raises:
      ValueError: see `Gemma3Family.normalise`.
    """
    ropes, scaling = config.pop("rope_parameters", None) or {}, config.pop("rope_scaling", None)
    for name in ropes:
        if name not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"rope_parameters: found {name!r}; objects full_attention and sliding_attention, "
                "one for each kind of layers, would work"
            )
        _check_rope(f"rope_parameters.{name}", ropes[name])
    _check_rope("rope_scaling", scaling)
    scaling = scaling or {}
    if "rope_type" not in scaling and scaling.get("type", "default") != "default":
        raise ValueError(
            f"rope_scaling.type: found {scaling['type']!r}, which transformers does not read in "
            "Gemma 3; rename it rope_type if the model was trained so, else remove rope_scaling"
        )
    theta, local_theta = (config.pop(name, None) for name in ("rope_theta", "rope_local_base_freq"))
    full = {"rope_theta": 1e6 if theta is None else theta}
    local = {"rope_theta": 1e4 if local_theta is None else local_theta}
    return (
        {**full, **(ropes.get("full_attention") or {}), **scaling},
        {**local, **(ropes.get("sliding_attention") or {})},
    )


def _check_rope(name: str, rope: Any) -> None:
    """Raises ValueError unless a rotary embedding is an object or null that transformers reads."""
    if not isinstance(rope, (dict, type(None))):
        raise ValueError(f"{name}: found {rope!r}; needs an object or null")
    if rope and rope.get("truncate", True) is not True:
        raise ValueError(
            f"{name}.truncate: found {rope['truncate']!r}, which transformers does not read in "
            "Gemma 3; only true is supported"
        )


def _sizes(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, window: int, **more: Any
) -> dict[str, Any]:
    types = tuple("sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(layers))
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "sliding_window": window,
        "layer_types": types,
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
    takes=(
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
