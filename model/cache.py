"""A key/value cache that is split over the sequence axis, and the layers run on a few new tokens against it.

Token i of a row is kept by device i mod P of the sequence axis: whatever the row's length, all devices hold equally many tokens
and do equal work, prompt or generated. A new token's query attends to every device's part of the cache; the partial results are
merged over the axis. Coordinates carry the mask, so rows may be of different lengths.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from .attention import AttentionPartial, Keys, Queries, TokenCoords
from .attention.partial import per_row
from .sharding import BATCH_AXES
from .transformer import Batch, Transformer
from .weights import Shards

ROWS = PartitionSpec(BATCH_AXES)


def merge_over(partial: AttentionPartial, axis: str) -> AttentionPartial:
    """Returns attention over all keys, on every device of a mesh axis, from each device's part of it."""
    maximum = lax.pmax(partial.lse, axis)
    maximum = jnp.where(jnp.isneginf(maximum), 0.0, maximum)
    weight = jnp.exp(partial.lse - maximum)
    total = lax.psum(weight, axis)
    safe = jnp.where(total == 0, 1.0, total)
    out = lax.psum(partial.out * per_row(weight), axis) / per_row(safe)
    return AttentionPartial(out, jnp.where(total == 0, -jnp.inf, maximum + jnp.log(safe)))


class Cache(NamedTuple):
    """The keys and values of N layers and B rows of up to C tokens.

    Attributes:
      k, v: in the compute dtype, with RoPE applied; H counts the key heads of all tensor ranks.
      index: int32, of each slot's token in its row; segment_ids: int32, 0 where the slot is empty.
    """

    k: Float[Array, "N B C H D"]
    v: Float[Array, "N B C H D"]
    index: Int[Array, "B C"]  # type: ignore[assignment]  # hides tuple.index, which nothing calls
    segment_ids: Int[Array, "B C"]


_KV = PartitionSpec(None, BATCH_AXES, "sequence", "tensor", None)
_SLOTS = PartitionSpec(BATCH_AXES, "sequence")
SPECS: Any = Cache(*cast(Any, (_KV, _KV, _SLOTS, _SLOTS)))


@dataclasses.dataclass(frozen=True)
class CachedModel:
    """Runs a transformer on new tokens against a cache of one shape.

    Attributes:
      model: computes on its mesh.
      head: from the model, its shards and the last layer's output [B, n, E] on a device to the result [B, n, ...], such as
        `Llama.local_logits`.
      rows: B, a multiple of data x fsdp; capacity: C, rounded up to a multiple of the sequence axis.
    """

    model: Transformer
    head: Callable[[Transformer, Shards, Float[Array, "B n E"]], Float[Array, "B n ..."]]
    rows: int
    capacity: int

    def empty(self) -> Cache:
        """Returns a cache without tokens."""
        model, ranks = self.model, self.model.mesh.shape["sequence"]
        slots = -(-self.capacity // ranks) * ranks
        heads = model.parallel.local_key_heads * model.mesh.shape["tensor"]
        kv = (model.config.num_hidden_layers, self.rows, slots, heads, model.config.head_dim)
        shardings = jax.tree.map(functools.partial(NamedSharding, model.mesh), SPECS)

        def zeros():
            k, index = jnp.zeros(kv, model.dtype), jnp.zeros((self.rows, slots), jnp.int32)
            return Cache(k, k, index, index)

        return jax.jit(zeros, out_shardings=shardings)()

    def extend(self, params: Shards, cache: Cache, batch: Batch) -> tuple[Cache, Float[Array, "B n ..."]]:
        """Appends n tokens to each row. The old cache's memory is reused: do not read it again.

        Args:
          batch: what the model embeds, and `index` and `segment_ids` [B, n]: a token's index in its row, at which it is kept,
            and 1, or 0 for one that is only padding and is not kept.

        Returns:
          The cache with the new tokens, and the head's results for them.
        """
        return self._extend(params, cache, batch)

    @functools.cached_property
    def _extend(self) -> Callable:
        extend = jax.shard_map(self._local, mesh=self.model.mesh, in_specs=(self.model.specs, SPECS, ROWS),
                               out_specs=(SPECS, ROWS), check_vma=False)
        return jax.jit(extend, donate_argnums=1)

    def _local(self, params: Shards, cache: Cache, batch: Batch) -> tuple[Cache, Float[Array, "B n ..."]]:
        """Runs inside `shard_map`."""
        model, index, segment_ids = self.model, batch["index"], batch["segment_ids"]
        write = self._writer(cache, index, segment_ids)
        slots = TokenCoords(write(cache.index, index), write(cache.segment_ids, segment_ids), jnp.zeros_like(cache.index))
        coords = TokenCoords(index, segment_ids, jnp.zeros_like(index))
        attend = functools.partial(model.kernel.forward, mask=model.mask, scale=model.config.head_dim ** -0.5)
        # With the RoPE rule `dynamic` all tokens have one embedding, that of a full cache, so that cached keys stay valid.
        layer = model.layer(self.capacity)

        def run_layer(x, of_layer):
            shards, k, v = of_layer
            weights = model.weights.layer(shards)
            q, new_k, new_v = layer.project(weights, x, index)
            k, v = write(k, new_k), write(v, new_v)
            attended = merge_over(attend(Queries(q, coords), Keys(k, v, slots)), "sequence")
            return layer.finish(weights, x, attended.out.astype(x.dtype)), (k, v)

        x = model.local_embed(params, batch)
        x, (k, v) = lax.scan(run_layer, x, (model.weights.of_layers(params), cache.k, cache.v))
        return Cache(k, v, slots.index, slots.segment_ids), self.head(model, params, x)

    def _writer(self, cache: Cache, index: Int[Array, "B n"], segment_ids: Int[Array, "B n"]) -> Callable:
        """Returns a function that writes new tokens [B, n, ...] to those of their slots that this device has."""
        ranks = self.model.mesh.shape["sequence"]
        is_local = (index % ranks == lax.axis_index("sequence")) & (segment_ids > 0)
        slot = jnp.where(is_local, index // ranks, cache.index.shape[1])  # a slot after the last one is not written
        rows = jnp.arange(index.shape[0])[:, None]
        return lambda old, new: old.at[rows, slot].set(new.astype(old.dtype), mode="drop")
