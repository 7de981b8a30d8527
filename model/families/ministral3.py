"""Ministral 3 and Devstral 2 (text): Llama's layer, with queries that grow with their position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import AS_MISTRAL, Family

_BETA = "llama_4_scaling_beta"
_ORIGINAL = "original_max_position_embeddings"
# If config.json names none.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    _ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}


class Ministral3Family(Family):
    """A family whose configs give the scaling of queries among the numbers of RoPE."""

    def normalise(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.normalise`.

        Raises:
          ValueError: the scaling of queries is missing, or the two spellings of RoPE differ in it.
        """
        config = dict(config)
        if config.get("rope_parameters") is None and not config.get("rope_scaling"):
            config["rope_parameters"] = _YARN
        config.pop(_BETA, None)  # which transformers does not read outside of RoPE
        for key in ("rope_scaling", "rope_parameters"):
            if config.get(key) is None or (key == "rope_scaling" and not config[key]):
                continue
            config[key] = {**config[key]}
            if (beta := config[key].pop(_BETA, None)) is None:
                raise ValueError(
                    f"{key}.{_BETA}: missing; a number would work, 0.1 in most published models, "
                    "or 0 for queries that do not depend on their position"
                )
            if beta != config.setdefault(_BETA, beta):
                raise ValueError(
                    f"rope_scaling and rope_parameters contradict each other: {_BETA} "
                    f"{config[_BETA]!r} and {beta!r}; remove the wrong one"
                )
        return config

    def write(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.write`. Transformers reads the original length under every RoPE rule."""
        config = super().write(fields)
        beta = config.pop(_BETA)
        numbers = {_ORIGINAL: config["max_position_embeddings"], _BETA: beta}
        for key in ("rope_parameters", "rope_scaling"):
            config[key] = {**numbers, **(config[key] or {})}
        if beta:  # where vLLM reads it
            original = config["rope_parameters"][_ORIGINAL]
            config["llama_4_scaling"] = {"beta": beta, _ORIGINAL: original}
        return config


def _sizes(hidden: int, ffn: int, layers: int, theta: float, **more: Any) -> dict[str, Any]:
    yarn = {k: value for k, value in _YARN.items() if k not in ("rope_type", "rope_theta", _BETA)}
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "vocab_size": 131072,
        "max_position_embeddings": 262144,
        "pad_token_id": 11,
        _BETA: 0.1,
        "rope": {"rule": "yarn", **yarn, "theta": theta},
        **more,
    }


MINISTRAL3 = Ministral3Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    without_window=AS_MISTRAL,
    defaults={
        "vocab_size": 131072,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "pad_token_id": 11,
    },
    configurable=("sliding_window", _BETA),
    ignores=("attention_bias", "use_sliding_window"),
    rules=("default", "yarn"),
    presets={
        "ministral-3-3b": _sizes(3072, 9216, 26, 1e6, tie_word_embeddings=True),
        "ministral-3-8b": _sizes(4096, 14336, 34, 1e6),
        "ministral-3-14b": _sizes(5120, 16384, 40, 1e9),
    },
)
