"""Seed-OSS: Llama's layer with biases of q, k and v, and separate fields for the other biases."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from .family import Family

_DROPOUTS = ("attention_dropout", "residual_dropout")
_SIZES = {
    "vocab_size": 155136,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "output_bias": False,
    "bos_token_id": 0,
    "pad_token_id": 1,
}


class SeedOssFamily(Family):
    """A family whose published configs have dropout."""

    def normalise(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.normalise`. Warns of dropout, which acts in training alone, instead of
        refusing every published model."""
        config = dict(config)
        rates = {name: config.pop(name, 0.1) for name in _DROPOUTS}
        if found := [f"{name} {rate}" for name, rate in rates.items() if rate]:
            warnings.warn(
                f"config.json: {' and '.join(found)}: the model is trained without this dropout; "
                "answers and evaluations do not depend on it",
                stacklevel=2,
            )
        return config


SEED_OSS = SeedOssFamily(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    defaults=_SIZES,
    configurable=("attention_bias", "output_bias", "mlp_bias"),
    constants={"pretraining_tp": 1, "residual_dropout": 0.0},
    config_names={"output_bias": "attention_out_bias"},
    presets={"seed-oss-36b": {**_SIZES, "hidden_size": 5120, "rope": {"theta": 1e7}}},
)
