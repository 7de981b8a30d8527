"""Rotary embeddings that config.json names for each kind of layers: those of full attention, and
those with a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FULL, LOCAL = "full_attention", "sliding_attention"


def with_layer_types(config: dict[str, Any], period: int, layers: int) -> None:
    """Fills in a config.json's `layer_types`: full attention in the last layer of each period.

    Args:
      layers: the model's, if config.json does not say.
    """
    if config.get("layer_types") is None:
        config["layer_types"] = list(layer_types(config.get("num_hidden_layers", layers), period))


def layer_types(layers: int, period: int) -> tuple[str, ...]:
    """Returns the kind of each layer, if the last one of each period has full attention."""
    return tuple(LOCAL if (i + 1) % period else FULL for i in range(layers))


def split_ropes(config: dict[str, Any], architecture: str, full: float, local: float) -> None:
    """Puts a config.json's rotary embeddings under `rope_parameters` and `local_rope_parameters`.

    Like transformers, reads no original length beside them.

    Args:
      full, local: the bases where the embeddings name none.

    Raises:
      ValueError: an object of the wrong type or name, or one that transformers reads otherwise.
    """
    config.pop("original_max_position_embeddings", None)
    ropes, scaling = config.pop("rope_parameters", None) or {}, config.pop("rope_scaling", None)
    for name in ropes:
        if name not in (FULL, LOCAL):
            raise ValueError(
                f"rope_parameters: found {name!r}; objects {FULL} and {LOCAL}, one for each kind "
                "of layers, would work"
            )
        _check_rope(f"rope_parameters.{name}", ropes[name], architecture)
    _check_rope("rope_scaling", scaling, architecture)
    scaling = scaling or {}
    if "rope_type" not in scaling and scaling.get("type", "default") != "default":
        raise ValueError(
            f"rope_scaling.type: found {scaling['type']!r}, which transformers does not read in "
            f"{architecture}; rename it rope_type if the model was trained so, else remove "
            "rope_scaling"
        )
    config["rope_parameters"] = {"rope_theta": full, **(ropes.get(FULL) or {}), **scaling}
    config["local_rope_parameters"] = {"rope_theta": local, **(ropes.get(LOCAL) or {})}


def _check_rope(name: str, rope: Any, architecture: str) -> None:
    """Raises ValueError unless a rotary embedding is an object or null that transformers reads."""
    if not isinstance(rope, (dict, type(None))):
        raise ValueError(f"{name}: found {rope!r}; needs an object or null")
    if rope and rope.get("truncate", True) is not True:
        raise ValueError(
            f"{name}.truncate: found {rope['truncate']!r}, which transformers does not read in "
            f"{architecture}; only true is supported"
        )


def written(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a written config.json with both rotary embeddings; without a local one, layers with a
    window have the others'."""
    ropes = {FULL: fields["rope_parameters"]}
    ropes[LOCAL] = fields.get("local_rope_parameters", ropes[FULL])
    own = {name: value for name, value in config.items() if name != "local_rope_parameters"}
    return {**own, "rope_parameters": ropes}
