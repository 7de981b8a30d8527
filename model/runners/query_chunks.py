"""A layer in chunks of queries, one after another, each from its projection to the layer's output:
attention and feed-forward fused (Blockwise Parallel Transformer, Algorithm 1; Ring Attention,
Algorithm 1).

Keys and values of all of a device's tokens are projected first. Each chunk of tokens then attends
to the keys of all shards and continues through the feed-forward, and its output overwrites its
input: queries, attention's output and the gradients of both never exist for more than a chunk. Only
the layer's input is kept for the backward pass, where each chunk is projected and attends again,
and its dK and dV are summed in float32. These sums take 8 T Hkv D bytes; keeping out and dout would
take 4 T Hq D: this saves memory when Hq / Hkv > 2.

With groups of heads (`head_groups.py`) a chunk attends group by group, and each group's keys and
values are projected again.

The price is traffic: keys and values (in the backward pass also their gradients) make a ring pass
per chunk. The kernels hide it as long as they take longer than the transfers, that is with long
contexts.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from model.attention import AttentionPartial, Keys, Queries, TokenCoords
from model.attention.op import sink_gradient
from model.dropout import TokenInfo
from model.frozen import Weight, split
from model.layer import SINKS, LayerOutput, ShardedLayer, with_sink_gradient
from model.memory.chunked import cast, over_chunks, vjp

from .head_groups import OUT_AND_LSE, HeadGroups
from .layer_runner import ScanRunner


class QueryChunkRunner(ScanRunner):
    """A scan in which the tokens go through each layer in chunks."""

    def run_layer(self, layer, weights, x, info, coords):
        return LayerInChunks(layer, HeadGroups.of(layer))(weights, x, info, coords)


class KeySource(Protocol):
    """The source of keys and values for all chunks: a tree of arrays, carried by loops over
    chunks."""

    def group(self, in_chunks: LayerInChunks, weights: dict[str, Weight], i: Any) -> Keys:
        """Returns the keys of group i of the heads; the weights are the layer's, in the compute
        dtype or frozen."""


class ProjectedOnce(NamedTuple):
    """The keys of all tokens and heads, as one group."""

    keys: Keys

    def group(self, in_chunks: LayerInChunks, weights: dict[str, Weight], i: Any) -> Keys:
        return self.keys


class ProjectedByGroup(NamedTuple):
    """The layer's input; each group's keys are projected from it whenever a chunk attends to
    them."""

    x: Float[Array, "B T E"]
    info: TokenInfo
    coords: TokenCoords

    def group(self, in_chunks: LayerInChunks, weights: dict[str, Weight], i: Any) -> Keys:
        of_group = in_chunks.groups.weights(weights, i)
        _, (k, v) = in_chunks.layer.keys_values_through(of_group, self.x, self.info)
        return Keys(k, v, self.coords)


@dataclasses.dataclass(frozen=True)
class LayerInChunks:
    """Runs a layer in chunks of queries, inside `shard_map`."""

    layer: ShardedLayer
    groups: HeadGroups

    @property
    def chunks(self) -> int:
        """How many chunks; divides a device's tokens."""
        return self.layer.memory.query_chunks

    def __call__(
        self,
        weights: dict[str, Weight],
        x: Float[Array, "B T E"],
        info: TokenInfo,
        coords: TokenCoords,
    ) -> LayerOutput:
        """Returns the layer's output.

        Args:
          weights: the layer's, whole, float32 by type with values of the compute dtype, or frozen.
          x: the layer's input.

        Raises:
          ValueError: the chunks do not divide the tokens.
        """
        if x.shape[1] % self.chunks:
            raise ValueError(
                f"memory.query_chunks: {self.chunks} does not divide the {x.shape[1]} tokens of a "
                "device"
            )
        run = jax.custom_vjp(lambda *arrays: self._forward(*arrays)[0])
        run.defvjp(self._forward, self._backward)
        return run(weights, x, info, coords)

    def _forward(self, weights, x, info, coords):
        layer, weights = self.layer, cast(weights, self.layer.dtype)
        residuals = (weights, x, info, coords)

        def run_chunk(carry, chunk):
            source, sums = carry
            # Without the barrier, the chunks' common work on keys would be hoisted, and kept by
            # differentiation.
            source, (x, info, chunk_coords) = lax.optimization_barrier((source, chunk))
            float32_weights = cast(weights, jnp.float32)
            _, q = layer.queries_through(float32_weights, x, info)
            out, _ = self._attend(weights, source, q, chunk_coords)
            hidden, auxiliary = layer.finish(float32_weights, x, out, info)
            return (source, jax.tree.map(jnp.add, sums, auxiliary)), hidden

        (_, sums), y = over_chunks(
            run_chunk,
            (self._key_source(*residuals), self._zero_sums(*residuals)),
            residuals[1:],
            x.shape[1] // self.chunks,
        )
        return LayerOutput(y, sums), residuals

    def _zero_sums(self, weights, x, info, coords):
        """Zeros like the layer's auxiliary sums."""

        def sums():
            float32_weights = cast(weights, jnp.float32)
            _, q = self.layer.queries_through(float32_weights, x, info)
            # q has the shape of attention's output.
            return self.layer.finish(float32_weights, x, q, info).auxiliary

        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sums))

    def _backward(self, residuals, cotangents):
        weights, x, info, coords = residuals
        dy, d_auxiliary = cotangents
        layer = self.layer

        def add_chunk(sums, chunk):
            dw, dkv, source = sums
            source, (x, info, chunk_coords, dy) = lax.optimization_barrier((source, chunk))
            float32_weights = cast(weights, jnp.float32)
            (_, q), pull = vjp(lambda w, x: layer.queries_through(w, x, info), float32_weights, x)
            out, lse = self._attend(weights, source, q, chunk_coords)
            dw_finish, dx, dout = vjp(
                lambda *arrays: layer.finish(*arrays, info), float32_weights, x, out
            )[1](LayerOutput(dy, d_auxiliary))
            dkv, (dq, d_sinks) = self._gradients(
                dkv, weights, source, Queries(q, chunk_coords), AttentionPartial(out, lse), dout
            )
            dw_project, dx = pull((dx, dq))
            dw_project = with_sink_gradient(dw_project, d_sinks)
            return (
                jax.tree.map(lambda *parts: sum(parts), dw, dw_finish, dw_project),
                dkv,
                source,
            ), dx

        (_, kv), pull = vjp(
            lambda w, x: layer.keys_values_through(w, x, info), cast(weights, jnp.float32), x
        )
        trained, _ = split(weights)
        dw, dkv = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (trained, kv))
        dw |= {name: None for name in weights if name not in trained}
        (dw, dkv, _), dx = over_chunks(
            add_chunk,
            (dw, dkv, self._key_source(*residuals)),
            (x, info, coords, dy),
            x.shape[1] // self.chunks,
        )
        dw_kv, dx = pull(
            (dx, tuple(total.astype(array.dtype) for total, array in zip(dkv, kv, strict=True)))
        )
        return jax.tree.map(jnp.add, dw, dw_kv), dx, None, None

    def _key_source(self, weights, x, info, coords) -> KeySource:
        """The source of all chunks' keys."""
        if self.groups.count > 1:
            return ProjectedByGroup(x, info, coords)
        _, (k, v) = self.layer.keys_values_through(cast(weights, jnp.float32), x, info)
        return ProjectedOnce(Keys(k, v, coords))

    def _attend(self, weights, source, q, q_coords):
        """out and lse of all heads, for a chunk of queries."""

        def attend(_, i):
            return (), self.layer.attention.forward(
                Queries(self.groups.take(q, i, 2), q_coords),
                source.group(self, weights, i),
                self._sinks(weights, i),
            )

        return self.groups.over(attend, (), OUT_AND_LSE)[1]

    def _sinks(self, weights, i):
        """Group i's attention sinks, float32, if the model has any."""
        sinks = ShardedLayer.sinks(weights)
        return None if sinks is None else self.groups.take(sinks, i, 0)

    def _gradients(self, dkv, weights, source, queries, result, dout):
        """dk and dv of a chunk of queries added to `dkv`, float32; its dq, in q's dtype, and its
        part of the sinks' gradient, if there are sinks."""
        groups = self.groups

        def add_group(dkv, i):
            of_group = AttentionPartial(
                groups.take(result.out, i, 2), groups.take(result.lse, i, 1)
            )
            d_group = groups.take(dout, i, 2)
            dq, *dkv_group = self.layer.attention.gradients(
                Queries(groups.take(queries.q, i, 2), queries.coords),
                source.group(self, weights, i),
                of_group,
                d_group,
            )
            dkv = tuple(
                groups.put(total, groups.take(total, i, 2) + part, i, 2)
                for total, part in zip(dkv, dkv_group, strict=True)
            )
            d_sinks = sink_gradient(self._sinks(weights, i), of_group, d_group)
            return dkv, (dq.astype(queries.q.dtype), d_sinks)

        return groups.over(add_group, dkv, (2, 0 if SINKS in weights else None))
