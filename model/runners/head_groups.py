"""Attention in groups of heads, one after another: queries, keys, values, partial results and their
gradients exist for one group at a time.

A group is projected and attends, and its output is written next to the previous groups'. The
layer's input, that output and its log-sum-exp are kept for the backward pass, where each group is
projected again and attends only backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from model.attention import AttentionPartial, Keys, Queries, TokenCoords
from model.attention.op import name_for_remat, sink_gradient
from model.dropout import TokenInfo
from model.frozen import FrozenWeight, Weight, part_of, split
from model.layer import ShardedLayer, with_sink_gradient
from model.memory.chunked import cast, vjp
from model.parameter_declarations import declare_layer, read_by
from model.stages import ATTENTION, KEYS_VALUES, QUERIES

from .layer_runner import ScanRunner

# The axes of heads: of attention's output [B, T, Hq, D] and of its log-sum-exp [B, Hq, T].
OUT_AND_LSE = (2, 1)


class HeadGroupRunner(ScanRunner):
    """A scan in which each layer attends in groups of heads."""

    def run_layer(self, layer, weights, x, info, coords):
        read = read_by(layer.config, (QUERIES, KEYS_VALUES, ATTENTION), weights)
        attend_in_groups = GroupedAttention(layer, HeadGroups.of(layer))
        x, attended = attend_in_groups(read, x, info, coords)
        return layer.finish(weights, x, attended, info)


@dataclasses.dataclass(frozen=True)
class HeadGroups:
    """How heads are cut into groups.

    Attributes:
      count: number of groups; divides a device's heads and key heads.
      axes: name of a weight -> its axis of heads, or None if all groups share the weight.
    """

    count: int
    axes: dict[str, int | None]

    @classmethod
    def of(cls, layer: ShardedLayer) -> HeadGroups:
        """Returns a layer's groups, with the axes its parameters declare."""

        def heads_axis(axes):
            return next((i for i, axis in enumerate(axes) if axis in ("heads", "kv_heads")), None)

        return cls(
            layer.memory.attention_groups,
            {
                name: heads_axis(parameter.axes)
                for name, parameter in declare_layer(layer.config).items()
            },
        )

    def take(self, x: jax.Array, i: Any, axis: int) -> jax.Array:
        """Returns group i of the heads along `axis`."""
        return part_of(x, i, self.count, axis)

    def put(self, x: jax.Array, part: jax.Array, i: Any, axis: int) -> jax.Array:
        """Returns all heads, with `part` as their group i."""
        return lax.dynamic_update_slice_in_dim(x, part, i * part.shape[axis], axis)

    def weights(self, weights: dict[str, Weight], i: Any) -> dict[str, Weight]:
        """Returns group i's weights, float32 by type or frozen, from those of all heads in the
        compute dtype."""

        def take(weight, axis):
            if axis is None:
                return weight
            return (
                weight.part(i, self.count, axis)
                if isinstance(weight, FrozenWeight)
                else self.take(weight, i, axis)
            )

        return {
            name: take(weight, self.axes[name])
            for name, weight in cast(weights, jnp.float32).items()
        }

    def over(self, step: Callable, carry: Any, axes: Any) -> tuple[Any, Any]:
        """Runs `step(carry, i) -> (carry, results of group i)` for each group in turn.

        Returns the last carry, and each result for all heads: the groups' results joined along its
        axis of heads. `axes` is a tree with these axes, in the order of the results' leaves.
        """
        results, structure = jax.tree.flatten(jax.eval_shape(step, carry, 0)[1])
        head_axes = jax.tree.leaves(axes)

        def all_heads(result, axis):
            shape = [n * self.count if i == axis else n for i, n in enumerate(result.shape)]
            return jnp.zeros(shape, result.dtype)

        def run_group(state, i):
            carry, joined = state
            carry, parts = step(carry, i)
            joined = [
                self.put(x, part, i, axis)
                for x, part, axis in zip(joined, jax.tree.leaves(parts), head_axes, strict=True)
            ]
            return (carry, joined), None

        joined = [all_heads(result, axis) for result, axis in zip(results, head_axes, strict=True)]
        carry, joined = lax.scan(run_group, (carry, joined), jnp.arange(self.count))[0]
        return carry, jax.tree.unflatten(structure, joined)


@dataclasses.dataclass(frozen=True)
class GroupedAttention:
    """Projects and attends in groups of heads, inside `shard_map`.

    x passes through, so that the backward pass adds each group's share to the incoming gradient in
    place.
    """

    layer: ShardedLayer
    groups: HeadGroups

    def __call__(
        self,
        weights: dict[str, Weight],
        x: Float[Array, "B T E"],
        info: TokenInfo,
        coords: TokenCoords,
    ) -> tuple[Float[Array, "B T E"], Float[Array, "B T Hq D"]]:
        """Returns x, and attention's output of all heads.

        Args:
          weights: whole, float32 by type with values of the compute dtype, or frozen.
          x: the layer's input.
        """
        run = jax.custom_vjp(lambda *arrays: self._forward(*arrays)[0])
        run.defvjp(self._forward, self._backward)
        return run(weights, x, info, coords)

    def _forward(self, weights, x, info, coords):
        layer, weights = self.layer, cast(weights, self.layer.dtype)

        def attend(_, i):
            group = self.groups.weights(weights, i)
            _, (q, k, v) = layer.project_through(group, x, info)
            sinks = ShardedLayer.sinks(group)
            return (), layer.attention.forward(Queries(q, coords), Keys(k, v, coords), sinks)

        out, lse = name_for_remat(*self.groups.over(attend, (), OUT_AND_LSE)[1])
        return (x, out), (weights, x, info, coords, out, lse)

    def _backward(self, residuals, cotangents):
        weights, x, info, coords, out, lse = residuals
        dx, dout = cotangents
        layer, groups = self.layer, self.groups
        trained, _ = split(weights)
        head_axes = {name: groups.axes[name] for name in trained if groups.axes[name] is not None}

        def add_group(carry, i):
            dx, d_shared = carry
            group = groups.weights(weights, i)
            (_, (q, k, v)), pull = vjp(lambda w, x: layer.project_through(w, x, info), group, x)
            result = AttentionPartial(groups.take(out, i, 2), groups.take(lse, i, 1))
            d_group = groups.take(dout, i, 2)
            gradients = layer.attention.backward(
                Queries(q, coords), Keys(k, v, coords), result, d_group
            )
            dw, dx = pull((dx, tuple(gradients)))
            dw = with_sink_gradient(dw, sink_gradient(ShardedLayer.sinks(group), result, d_group))
            d_shared = {name: total + dw[name] for name, total in d_shared.items()}
            return (dx, d_shared), {name: dw[name] for name in head_axes}

        d_shared = {
            name: jnp.zeros(weight.shape, jnp.float32)
            for name, weight in trained.items()
            if name not in head_axes
        }
        (dx, d_shared), d_heads = groups.over(add_group, (dx, d_shared), head_axes)
        return {name: {**d_shared, **d_heads}.get(name) for name in weights}, dx, None, None
