"""Runs each layer while the next layer's weights arrive.

A layer's weights travel the sequence axis with the keys and values of the layer before
(`Ring.forward_and_gather`), so whatever hides the ring pass hides them too. The backward pass does
the reverse: while a layer's attention runs, the weights of the layer below arrive, and the
gradients of the layer above, summed on their way (a reduce-scatter), return to the ranks that store
them. Plain differentiation would keep every layer's whole weights for the backward pass, so both
scans are written by hand. Only the first layer's gather and scatter are not hidden.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from model.attention import AttentionPartial, Keys, Queries, TokenCoords
from model.attention.op import sink_gradient
from model.attention.schedules import Payload
from model.dropout import TokenInfo
from model.frozen import Weight, split
from model.layer import SINKS, LayerOutput, ShardedLayer
from model.memory.chunked import vjp
from model.memory.period import Results, scan_periods, stacked, unzipped
from model.parameter_declarations import read_by
from model.sharding import gather_frozen, reduce_scatter
from model.stages import KEYS_VALUES, OUTPUT, QUERIES
from model.weight_gathering import Shards, WeightGatherer

from .layer_runner import LayerRunner
from .packed_shards import PackedShards

# Of packed shards with a leading axis of ranks: that axis is split over the sequence.
RANKS = PartitionSpec("sequence")
_SPACES = {"device": jax.memory.Space.Device, "host": jax.memory.Space.Host}


class PrefetchRunner(LayerRunner):
    """Runs the layers in turn; holds two layers' weights at a time."""

    def run(self, shards, x, info, coords):
        specs = {name: self.weights.layer_spec(name) for name in shards}
        trained = frozenset(name for name in shards if not self.weights.is_frozen(name))
        dtypes = {
            name: self.layers[0].dtype if name in trained else shard.dtype
            for name, shard in shards.items()
        }
        packed = PackedShards.of(
            specs,
            {name: shard.shape[1:] for name, shard in shards.items()},
            dict(jax.sharding.get_abstract_mesh().shape),
            dtypes,
            trained,
        )
        layers = _PrefetchedLayers(
            self.layers, self.weights, packed, jax.tree.leaves(shards)[0].shape[0]
        )
        run = jax.custom_vjp(lambda *arrays: layers.forward(*arrays)[0])
        run.defvjp(layers.forward, layers.backward)
        return run(shards, x, info, coords)


class _Residuals(NamedTuple):
    """What is kept from the forward pass over all layers to the backward pass.

    Attributes:
      shards: of all layers.
      kept: each layer's input and, if the remat policy keeps them, attention's out and lse.
      whole: the packed weights of the last layer, where the backward pass begins.
      info, coords: the tokens'.
    """

    shards: Shards
    kept: Results
    whole: list[jax.Array]
    info: TokenInfo
    coords: TokenCoords


@dataclasses.dataclass(frozen=True)
class _PrefetchedLayers:
    """The two directions of all layers. Carries and residuals hold `whole`: all ranks' packed
    weights of the layer that runs next.

    Attributes:
      layers: one of each kind, as in `LayerRunner`.
      weights: gathers the weights that do not travel.
      packed: how travelling weights are packed.
      count: number of layers.
    """

    layers: tuple[ShardedLayer, ...]
    weights: WeightGatherer
    packed: PackedShards
    count: int

    def forward(
        self, shards: Shards, x: Float[Array, "B T E"], info: TokenInfo, coords: TokenCoords
    ) -> tuple[LayerOutput, _Residuals]:
        """Returns the output of all layers, and the residuals."""
        policy = self.layers[0].memory.policy

        def run_layer(layer, carry, i):
            x, whole, info, coords = carry
            weights = self._weights(self.packed.unpack(whole), self._of_layer(shards, i)[1])
            of_layer = info.of_layer(i)
            q, k, v = layer.project(weights, x, of_layer)
            (out, lse), whole = layer.attention.forward_and_gather(
                Queries(q, coords),
                Keys(k, v, coords),
                self._of_layer(shards, i + 1)[0],
                layer.sinks(weights),
            )
            attention = (
                jax.device_put((out, lse), _SPACES[policy.attention]) if policy.attention else ()
            )
            kept = jax.device_put(x, _SPACES[policy.inputs])
            y, auxiliary = layer.finish(weights, x, out, of_layer)
            return (y, whole, info, coords), ((kept, *attention), auxiliary)

        # In stages, if the compiler needs them.
        whole = [gather_frozen(array[None], RANKS) for array in self._of_layer(shards, 0)[0]]
        (y, whole, *_), results = scan_periods(
            [functools.partial(run_layer, layer) for layer in self.layers],
            (x, whole, info, coords),
            jnp.arange(self.count),
        )
        kept, auxiliary = unzipped(results)
        return LayerOutput(y, stacked(auxiliary)), _Residuals(shards, kept, whole, info, coords)

    def backward(
        self, residuals: _Residuals, cotangents: LayerOutput
    ) -> tuple[dict[str, jax.Array | None], Float[Array, "B T E"], None, None]:
        """Returns the gradients of the shards and of x."""
        shards, kept, whole, info, coords = residuals
        dy, d_auxiliary = cotangents

        def run_layer(layer, carry, layer_inputs):
            dx, whole, d_above, info, coords = carry
            (i, d_auxiliary), (x, *attention) = layer_inputs
            x, *attention = jax.device_put((x, *attention), jax.memory.Space.Device)
            travelled, others = map(
                self._split, (self.packed.unpack(whole), self._of_layer(shards, i)[1])
            )
            trained, unpack_gradients, frozen = jax.vjp(
                lambda *trained: split(
                    self._weights({**trained[0], **travelled[1]}, {**trained[1], **others[1]})
                ),
                travelled[0],
                others[0],
                has_aux=True,
            )
            below = self._of_layer(shards, i - 1)[0]
            d_output = LayerOutput(dx, d_auxiliary)
            dx, dw, whole, d_above = self._backward_layer(
                layer,
                {**trained, **frozen},
                (x, *attention),
                d_output,
                below,
                d_above,
                info.of_layer(i),
                coords,
            )
            d_travelling, d_others = unpack_gradients({name: dw[name] for name in trained})
            d_packed = self.packed.pack_gradients(d_travelling)
            return (dx, whole, d_packed, info, coords), (
                self.packed.unpack_gradient(d_above),
                d_others,
            )

        (dx, _, d_first, *_), results = scan_periods(
            [functools.partial(run_layer, layer) for layer in self.layers],
            (dy, whole, self.packed.zero_gradients(), info, coords),
            (jnp.arange(self.count), d_auxiliary),
            kept,
            reverse=True,
        )
        d_above, d_others = stacked(results)
        first = self.packed.unpack_gradient([reduce_scatter(RANKS, array)[0] for array in d_first])
        # Layer i's gradients arrived while layer i - 1 ran.
        d_travelling = {
            name: jnp.concatenate([first[name][None], d_above[name][:-1]]) for name in first
        }
        return {name: {**d_travelling, **d_others}.get(name) for name in shards}, dx, None, None

    def _backward_layer(
        self,
        layer: ShardedLayer,
        weights: dict[str, Weight],
        kept: tuple[jax.Array, ...],
        d_output: LayerOutput,
        below: list[Float[Array, "F R C"]],
        d_above: list[Float[Array, "P F R C"]],
        info: TokenInfo,
        coords: TokenCoords,
    ) -> tuple[
        Float[Array, "B T E"],
        dict[str, jax.Array | None],
        list[Float[Array, "P F R C"]],
        list[Float[Array, "F R C"]],
    ]:
        """Returns a layer's dx and dw; all ranks' packed shards of the layer below; and this rank's
        sum of the packed gradients of the layer above.

        The weights travel with attention's forward if that is rerun, otherwise with its backward.

        Args:
          kept: the layer's input [B, T, E], and attention's out and lse if they were kept.
          below: this rank's packed shards of the layer below.
          d_above: this rank's partial sums of the packed gradients of the layer above.
        """
        x, *saved = kept
        attention = layer.attention
        (_, (q, k, v)), pull = vjp(
            lambda w, x: layer.project_through(w, x, info),
            read_by(layer.config, (QUERIES, KEYS_VALUES), weights),
            x,
        )
        queries, keys, sinks = Queries(q, coords), Keys(k, v, coords), layer.sinks(weights)
        whole = None
        if saved:
            result = AttentionPartial(*saved)
        else:
            result, whole = attention.forward_and_gather(queries, keys, below, sinks)
        dw_output, dx, dout = vjp(
            lambda w, x, attended: layer.finish(w, x, attended, info),
            read_by(layer.config, (OUTPUT,), weights),
            x,
            result.out,
        )[1](d_output)
        payload = Payload(below if whole is None else None, d_above)
        dqkv, whole_after, d_above = attention.backward_and_exchange(
            queries, keys, result, dout, payload
        )
        dw_project, dx = pull((dx, tuple(dqkv)))
        # Weights read before and after attention, such as the single norm of parallel residuals,
        # have both gradients.
        twice = {
            name: dw_project[name] + dw_output[name]
            for name in dw_project
            if name in dw_output and dw_project[name] is not None
        }
        dw = {**dw_project, **dw_output, **twice}
        if sinks is not None:
            dw[SINKS] = sink_gradient(sinks, result, dout)
        return dx, dw, whole_after if whole is None else whole, d_above

    def _split(
        self, arrays: dict[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """A layer's trained arrays, and its frozen ones."""
        frozen = {name: x for name, x in arrays.items() if self.weights.is_frozen(name)}
        return {name: x for name, x in arrays.items() if name not in frozen}, frozen

    def _weights(self, travelled: dict[str, jax.Array], others: Shards) -> dict[str, Weight]:
        """A layer's weights, from those received and the shards of the others."""
        return self.weights.layer_weights({**travelled, **self.weights.gather_layer_arrays(others)})

    def _of_layer(self, shards: Shards, i: Any) -> tuple[list[jax.Array], Shards]:
        """The packed shards of layer i, or of the nearest existing layer, and the shards that are
        not packed."""
        index = jnp.clip(i, 0, self.count - 1)
        layer = {
            name: lax.dynamic_index_in_dim(shard, index, 0, False) for name, shard in shards.items()
        }
        others = {name: layer.pop(name) for name in list(layer) if name not in self.packed.shapes}
        return self.packed.pack(layer), others
