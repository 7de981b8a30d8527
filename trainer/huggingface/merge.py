"""Merges adapters into their base's weights, one layer at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from model.codecs import dequantize_int8, dequantize_nf4
from model.config import TransformerConfig
from model.parameter_declarations import declare
from model.quantized_weights import is_of_experts, quantize_layer, quantized_names


class Dequantized:
    """A stacked parameter's layers after quantization and dequantization, in float32."""

    def __init__(self, name: str, stored: Any, shape: tuple[int, ...], kind: str) -> None:
        """`name`: of the weight; `stored`: read when sliced, perhaps padded beyond `shape`."""
        self.name, self.stored, self.shape, self.kind = name, stored, shape, kind

    def __getitem__(self, layer: int) -> Float[np.ndarray, ...]:
        shape = self.shape[1:]
        matrices = quantize_layer(self.name, self.stored, layer, shape, self.kind)
        dequantize: Any = dequantize_nf4 if self.kind == "nf4" else dequantize_int8
        return np.stack([dequantize(matrix).T for matrix in matrices]).reshape(shape)


def dequantized(base: Mapping[str, Any], config: TransformerConfig) -> dict[str, Any]:
    """Returns the base's parameters, dequantized if the model with adapters has codes.

    Args:
      base: as in `merged`.
      config: of the model with its adapters.
    """
    assert config.adapter is not None
    plain = dataclasses.replace(
        config, adapter=dataclasses.replace(config.adapter, quantize="none")
    )
    codes = set(quantized_names(declare(config)))
    return {
        name: Dequantized(name, x, declare(plain)[name].shape, config.adapter.quantize)
        if name in codes
        else x
        for name, x in base.items()
    }


def merged(
    base: Mapping[str, Any], trained: Mapping[str, Any], config: TransformerConfig
) -> dict[str, Any]:
    """Returns the parameters of the equivalent model without adapters.

    Args:
      base: the base's parameters by name: arrays, or arrays on disk that are read when sliced;
        padded or not.
      trained: adapters, and fully trained modules, which replace the base's; in the same forms.
      config: of the model with its adapters.
    """
    adapter = config.adapter
    assert adapter is not None
    plain = dataclasses.replace(config, adapter=dataclasses.replace(adapter, quantize="none"))
    shapes = {name: parameter.shape for name, parameter in declare(plain).items()}

    def merge(name: str) -> Any:
        weight = trained.get(name, base[name])
        names = [name, *(name.removesuffix("weight") + part for part in adapter.parts)]
        if names[1] not in trained:
            return weight
        return _MergedParameter(
            [weight, *(trained[part] for part in names[1:])],
            [shapes[name] for name in names],
            adapter.scale,
            is_of_experts(name),
        )

    return {name: merge(name) for name in base}


class _MergedParameter:
    """W + s A B of stacked layers in float32, with DoRA's column norms if there are any."""

    def __init__(
        self, factors: list[Any], shapes: list[tuple[int, ...]], scale: float, experts: bool
    ) -> None:
        """`factors`: W, A, B and DoRA's norms, possibly padded, of each expert, if `experts`;
        `shapes` without padding."""
        self.factors, self.shapes, self.scale, self.experts = factors, shapes, scale, experts
        self.shape = shapes[0]

    def __getitem__(self, layer: int) -> Float[np.ndarray, ...]:
        w, a, b, *magnitudes = (
            np.asarray(factor[layer], np.float32)[tuple(map(slice, shape[1:]))]
            for factor, shape in zip(self.factors, self.shapes, strict=True)
        )
        if not self.experts:
            a, b = a.reshape(-1, a.shape[-1]), b.reshape(b.shape[0], -1)
        w = w + np.float32(self.scale) * (a @ b).reshape(w.shape)
        if not magnitudes:
            return w
        norms = np.sqrt(
            np.sum(np.square(w), tuple(range(w.ndim - magnitudes[0].ndim)), keepdims=True)
        )
        return w * np.divide(magnitudes[0], norms, out=np.zeros_like(norms), where=norms > 0)
