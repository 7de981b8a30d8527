"""Adapters merged into the weights that they stand beside, one layer at a time."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from model.adapter import PARTS
from model.config import LlamaConfig
from model.modules import declare


def merged(base: Mapping[str, Any], trained: Mapping[str, Any], config: LlamaConfig) -> dict[str, Any]:
    """Returns the parameters of the model without adapters that computes the same.

    Args:
      base: the base's parameters by name: arrays, or arrays on disk that are read when sliced; padded or not.
      trained: adapters, and modules that were trained whole and replace those of the base; of the same kinds.
      config: of the model with its adapters.
    """
    assert config.adapter is not None
    scale = config.adapter.scale
    own = {name: parameter.shape for name, parameter in declare(config).items()}

    def merge(name: str) -> Any:
        if name in trained:
            return trained[name]
        names = [name, *(name.removesuffix("weight") + part for part in PARTS)]
        if names[1] not in trained:
            return base[name]
        return _MergedParameter([base[name], *(trained[part] for part in names[1:])], [own[name] for name in names], scale)

    return {name: merge(name) for name in base}


class _MergedParameter:
    """W + s A B of stacked layers, in float32, a layer at a time."""

    def __init__(self, factors: list[Any], shapes: list[tuple[int, ...]], scale: float) -> None:
        """`factors`: W, A and B, maybe padded, and `shapes` without padding."""
        self.factors, self.shapes, self.scale = factors, shapes, scale
        self.shape = shapes[0]

    def __getitem__(self, layer: int) -> Float[np.ndarray, ...]:
        w, a, b = (np.asarray(factor[layer], np.float32)[tuple(map(slice, shape[1:]))]
                   for factor, shape in zip(self.factors, self.shapes, strict=True))
        return w + np.float32(self.scale) * (a.reshape(-1, a.shape[-1]) @ b.reshape(b.shape[0], -1)).reshape(w.shape)
