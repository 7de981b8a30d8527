"""Frozen weights, `FrozenWeight`: without gradient, stored and sent in fewer bits than
float32."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped


class FrozenWeight(abc.ABC):
    """A whole weight (of this tensor rank) without gradient, dequantized by each product."""

    @abc.abstractmethod
    def dequantize(self, dtype: Any) -> Float[Array, ...]:
        """Returns the weight as an array of this dtype."""

    @abc.abstractmethod
    def part(self, i: Any, count: int, axis: int) -> FrozenWeight:
        """Returns part i of `count` equal parts along an axis."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plain(FrozenWeight):
    """A frozen weight in the compute dtype."""

    value: Float[Array, ...]

    def dequantize(self, dtype: Any) -> Float[Array, ...]:
        """See `FrozenWeight.dequantize`."""
        return lax.stop_gradient(self.value).astype(dtype)

    def part(self, i: Any, count: int, axis: int) -> Plain:
        """See `FrozenWeight.part`."""
        return Plain(part_of(self.value, i, count, axis))


def part_of(x: Shaped[Array, ...], i: Any, count: int, axis: int) -> Shaped[Array, ...]:
    """Returns part i of `count` equal parts of an array along an axis."""
    size = x.shape[axis] // count
    return lax.dynamic_slice_in_dim(x, i * size, size, axis)


Weight = jax.Array | FrozenWeight


def array(weight: Weight, dtype: Any = jnp.float32) -> Float[Array, ...]:
    """Returns a weight that may be frozen as an array of this dtype."""
    return weight.dequantize(dtype) if isinstance(weight, FrozenWeight) else weight.astype(dtype)


def split(weights: Mapping[str, Any]) -> tuple[dict[str, jax.Array], dict[str, FrozenWeight]]:
    """Splits weights into trained and frozen ones. Functions with a hand-written gradient return
    none for the latter."""
    trained = {
        name: weight for name, weight in weights.items() if not isinstance(weight, FrozenWeight)
    }
    return trained, {name: weight for name, weight in weights.items() if name not in trained}
