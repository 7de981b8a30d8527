"""The layers, each of which runs while the next one's weights arrive.

A layer's weights ride the sequence axis with the keys and values of the layer before (`schedules.ring.carry_forward`), so what
hides the ring hides them too. Backward the same the other way round: while a layer's attention runs, the weights of the layer
below arrive, and the gradients of the layer above, added up on their way (a reduce-scatter), go home to the ranks that store
them. Plain differentiation would keep every layer's whole weights for the backward, so both scans are written by hand.
Only the first layer's gather and scatter have nothing to hide behind.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from model.attention import AttentionOp, AttentionPartial, Keys, Payload, Queries, TokenCoords
from model.sharding import gather, reduce_scatter

from .packed_shards import Parcels


class Layer(NamedTuple):
    """One layer's parts; none closes over a traced value.

    Attributes:
      parcels: of those weights that travel; trim: these, whole -> as the layer takes them.
      others: shards of the others -> these, whole.
      project: (weights, x, positions) -> x, q, k, v; finish: (weights, x, attended) -> the next layer's input.
      op: attention, whose schedule carries other arrays; keep_attention: whether its output and lse are kept, so that it
        never runs forward again.
      on_host: whether the layers' inputs are kept in the host's memory.
      inward: begins the names of the weights that `project` takes; `finish` takes the others.
    """

    parcels: Parcels
    trim: Callable
    others: Callable
    project: Callable
    finish: Callable
    op: AttentionOp
    keep_attention: bool
    on_host: bool
    inward: tuple[str, ...]

    def parts(self, whole: dict, others: dict) -> tuple[dict, dict]:
        """What `project` and what `finish` takes, of the weights that travelled and of the others."""
        weights = {**self.trim(whole), **others}
        inward = {name: weights.pop(name) for name in list(weights) if name.startswith(self.inward)}
        return inward, weights


def run_layers(layer: Layer, shards: dict, x: jax.Array, positions: jax.Array, coords: TokenCoords) -> jax.Array:
    """All layers: [B, T, E] -> [B, T, E] (inside `shard_map`).

    Args:
      shards: name within the layer -> float32 shards of all layers [layers, ...].
    """
    parcels = layer.parcels
    count = jax.tree.leaves(shards)[0].shape[0]
    rows = PartitionSpec("sequence")

    def split(shards):
        """(those that travel, the others)"""
        return ({name: shards[name] for name in parcels.shapes},
                {name: shard for name, shard in shards.items() if name not in parcels.shapes})

    def of_layer(shards, i):
        """Layer i's parcel, and its other shards; that of the nearest layer that there is."""
        at = jnp.clip(i, 0, count - 1)
        travelling, others = split({name: lax.dynamic_index_in_dim(w, at, 0, False) for name, w in shards.items()})
        return parcels.pack(travelling), others

    @jax.custom_vjp
    def run(*arrays):
        return forward(*arrays)[0]

    def forward(shards, x, positions, coords):
        def one(carry, i):
            x, whole, positions, coords = carry
            inward, outward = layer.parts(parcels.unpack(whole), layer.others(of_layer(shards, i)[1]))
            _, q, k, v = layer.project(inward, x, positions)
            (out, lse), whole = layer.op.carry_forward(Queries(q, coords), Keys(k, v, coords), of_layer(shards, i + 1)[0])
            kept = (out, lse) if layer.keep_attention else ()
            there = jax.device_put(x, jax.memory.Space.Host) if layer.on_host else x
            return (layer.finish(outward, x, out), whole, positions, coords), (there, *kept)

        first = of_layer(shards, 0)[0]
        # As float32 by type, of which `gather` makes what travels; in turns where they are needed.
        whole = [gather(x.astype(jnp.float32)[None], rows, x.dtype).astype(x.dtype) for x in first]
        (y, whole, *_), kept = lax.scan(one, (x, whole, positions, coords), jnp.arange(count))
        return y, (shards, kept, whole, positions, coords)

    def backward(residuals, dy):
        shards, kept, whole, positions, coords = residuals

        def one(carry, this):
            dx, whole, shares, positions, coords = carry
            i, (x, *attended) = this
            x = jax.device_put(x, jax.memory.Space.Device) if layer.on_host else x
            (inward, outward), give_back = jax.vjp(lambda whole, others: layer.parts(whole, layer.others(others)),
                                                   parcels.unpack(whole), of_layer(shards, i)[1])
            (_, q, k, v), pull = jax.vjp(lambda w, x: layer.project(w, x, positions), inward, x)
            queries, keys = Queries(q, coords), Keys(k, v, coords)
            below = of_layer(shards, i - 1)[0]
            # What arrives rides with attention's forward where that runs again, else with its backward.
            arrived = None
            if not attended:
                attended, arrived = layer.op.carry_forward(queries, keys, below)
            d_outward, dx, dout = jax.vjp(layer.finish, outward, x, attended[0])[1](dx)
            rides = below if arrived is None else None
            dqkv, with_backward, above = layer.op.carry_backward(queries, keys, AttentionPartial(*attended), dout,
                                                                 Payload(rides, shares))
            d_inward, dx = pull((dx, *dqkv))
            travelled, d_others = give_back((d_inward, d_outward))
            whole = with_backward if arrived is None else arrived
            return (dx, whole, parcels.pack_gradients(travelled), positions, coords), (
                parcels.unpack_gradient(above), d_others)

        none = [jnp.zeros(x.shape, jnp.float32) for x in whole]
        (dx, _, shares, *_), (above, d_others) = lax.scan(
            one, (dy, whole, none, positions, coords), (jnp.arange(count), kept), reverse=True)
        first = parcels.unpack_gradient([reduce_scatter(rows, x)[0] for x in shares])
        # Layer i's gradients came home while layer i - 1 ran.
        travelled = {name: jnp.concatenate([first[name][None], above[name][:-1]]) for name in first}
        return {**travelled, **d_others}, dx, None, None

    run.defvjp(forward, backward)
    return run(shards, x, positions, coords)
