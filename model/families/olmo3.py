"""OLMo 3: OLMo 2's layer, with a window in three layers of four; RoPE is scaled in the others."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from ..rope_config import RopeConfig
from .family import Family
from .local_rope import FULL, LOCAL, layer_types, split_ropes, with_layer_types, written
from .olmo2 import OLMO2

_THETA = 5e5


class Olmo3Family(Family):
    """A family whose configs name the kinds of layers and, since transformers 5, two rotary
    embeddings; in version 4 only that of the layers without a window is scaled."""

    def normalise(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.normalise` and `split_ropes`.

        Raises:
          ValueError: a base that transformers 4 and 5 use in different layers.
        """
        config = dict(config)
        with_layer_types(config, 4, layers=32)
        theta, ropes = config.pop("rope_theta", None), config.get("rope_parameters") or {}
        # One embedding for all layers, as the first versions of transformers 5 wrote it: later ones
        # ignore it, which makes no difference here.
        if ropes == {"rope_type": "default", "rope_theta": _THETA}:
            config["rope_parameters"] = ropes = {}
        split_ropes(config, self.architecture, _THETA if theta is None else theta, _THETA)
        if theta not in (None, _THETA) and "rope_theta" not in (ropes.get(LOCAL) or {}):
            raise ValueError(
                f"rope_theta: found {theta!r}, which transformers 4 uses in all layers, and 5 only "
                f"in those without a window; rope_parameters with objects {FULL} and {LOCAL}, each "
                "with its rope_theta, would work"
            )
        return config

    def write(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.write` and `written`."""
        return written(super().write(fields), fields)

    def published(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.published`. Transformers 4 reads one base and one scaling."""
        config = self.normalise(written)
        local = {"rope_parameters": config["local_rope_parameters"]}
        theta = config["rope_parameters"]["rope_theta"]
        if RopeConfig.from_hf(local, config["max_position_embeddings"]) != RopeConfig(theta=theta):
            warnings.warn(
                "config.json: only transformers 5 computes the same, since version 4 has one "
                "rope_theta for all layers, and this model another in layers with a window",
                stacklevel=2,
            )
        return dict(written)


def _sizes(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "sliding_window": 4096,
        "layer_types": layer_types(layers, 4),
        "max_position_embeddings": 65536,
        "vocab_size": 100278,
        "rms_norm_eps": 1e-6,
        "bos_token_id": None,
        "eos_token_id": 100257,
        "pad_token_id": 100277,
        "rope": {
            "theta": _THETA,
            "rule": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "attention_factor": 1.2079441541679836,
        },
        "local_rope": {"theta": _THETA},
    }


OLMO3 = Olmo3Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    computes=OLMO2.computes,
    defaults={**OLMO2.defaults, "sliding_window": 4096},
    configurable=("attention_bias", "sliding_window", "layer_types", "local_rope"),
    presets={
        "olmo3-7b": _sizes(4096, 11008, 32, 32, 32),
        "olmo3-32b": _sizes(5120, 27648, 64, 40, 8),
    },
)
