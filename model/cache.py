"""A key/value cache split over the sequence axis, and the layers run on new tokens against it.

Token i of a row is kept by device i mod P of the sequence axis: whatever the row's length, all
devices hold the same number of tokens and do equal work, for prompt and generated tokens. A few new
tokens are computed by every device (`extend`); many are split over the axis as in training
(`prefill`). Their queries visit every device's part of the cache, and partial results are merged:
queries and outputs travel, never the cache. Coordinates carry the mask, so rows may be of different
lengths.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from .attention import AttentionOp, AttentionPartial, Keys, Queries, TokenCoords
from .attention.kernels.reference import ReferenceKernel
from .attention.layout import permutation
from .attention.names import BATCH_AXES
from .attention.partial import merge, per_row, with_sinks
from .attention.schedules import in_any_layout
from .dropout import TokenInfo
from .memory.period import scan_periods
from .transformer import TOKENS, Batch, Transformer
from .weight_gathering import Shards

ROWS = PartitionSpec(BATCH_AXES)
# The most bytes of a layer's keys, and of its values, that `extend` copies out of the array of all
# layers at once: few on a CPU, so that they stay in its cache; more on other platforms, where each
# iteration costs more.
CPU_BYTES_AT_ONCE = 1 << 20
BYTES_AT_ONCE = 1 << 25


def merge_over_sequence(partial: AttentionPartial, scatter: bool = False) -> AttentionPartial:
    """Returns attention over all keys, from the parts computed by the devices of the sequence axis.

    Args:
      scatter: returns only this device's share of the queries, instead of all of them on every
        device.
    """
    maximum = lax.pmax(partial.lse, "sequence")
    maximum = jnp.where(jnp.isneginf(maximum), 0.0, maximum)
    weight = jnp.exp(partial.lse - maximum)
    out = partial.out * per_row(weight)
    if scatter:
        out = lax.psum_scatter(out, "sequence", scatter_dimension=1, tiled=True)
        total = lax.psum_scatter(weight, "sequence", scatter_dimension=2, tiled=True)
        maximum = lax.dynamic_slice_in_dim(
            maximum, lax.axis_index("sequence") * total.shape[2], total.shape[2], 2
        )
    else:
        out, total = lax.psum(out, "sequence"), lax.psum(weight, "sequence")
    safe = jnp.where(total == 0, 1.0, total)
    return AttentionPartial(
        out / per_row(safe), jnp.where(total == 0, -jnp.inf, maximum + jnp.log(safe))
    )


def _over_cache(op: AttentionOp, queries: Queries, keys: Keys, dense: int) -> AttentionPartial:
    """Returns attention over slots of this device's part of the cache.

    Args:
      dense: the most new tokens whose scores are all in memory at once.
    """
    # One token has few scores, and other kernels' query tiles would be almost empty. A cache may
    # have empty slots between a document's tokens.
    kernel = (
        ReferenceKernel(softcap=op.kernel.softcap)
        if queries.q.shape[1] <= dense
        else op.kernel.with_rows_in_order(False)
    )
    return kernel.forward(queries, keys, mask=op.mask, scale=op.scale)


class Cache(NamedTuple):
    """The keys and values of N layers and B rows of up to C tokens.

    Attributes:
      k, v: in the compute dtype, with RoPE applied; H counts the key heads of all tensor ranks. A
        head's tokens are contiguous, so that a product with one query reads them in order.
      index: int32, of each slot's token in its row.
      segment_ids: int32, 0 if the slot is empty.
    """

    k: Float[Array, "N B H C D"]
    v: Float[Array, "N B H C D"]
    index: Int[Array, "B C"]  # type: ignore[assignment]  # hides tuple.index, which nothing calls
    segment_ids: Int[Array, "B C"]


class _LayerCache(NamedTuple):
    """A layer's slots on this device, including the new tokens.

    Attributes:
      k, v: of all layers.
      layer: this one's number, from 0.
      coords: of the slots, [B, C].
      before: the same without the new tokens.
      used: number of slots up to the last token of any row.
    """

    k: Float[Array, "N B H C D"]
    v: Float[Array, "N B H C D"]
    layer: Int[Array, ""]
    coords: TokenCoords
    before: TokenCoords
    used: Int[Array, ""]

    def keys(self) -> Keys:
        """Returns the keys in all C slots."""
        k, v = (jnp.swapaxes(x[self.layer], 1, 2) for x in (self.k, self.v))
        return Keys(k, v, self.coords)

    def keys_from(self, first: Int[Array, ""], size: int) -> Keys:
        """Returns `size` slots, from slot `first` on. Near the end these are the last `size` slots,
        with those before `first` marked as empty.

        Args:
          size: at most C.
        """
        _, rows, heads, slots, head_dim = self.k.shape
        start = jnp.minimum(first, slots - size)

        def part(x: Float[Array, "N B H C D"]) -> Float[Array, "B c H D"]:
            sizes = (1, rows, heads, size, head_dim)
            return jnp.swapaxes(lax.dynamic_slice(x, (self.layer, 0, 0, start, 0), sizes)[0], 1, 2)

        coords = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, 1), self.coords)
        is_requested = start + jnp.arange(size) >= first
        coords = coords._replace(segment_ids=jnp.where(is_requested, coords.segment_ids, 0))
        return Keys(part(self.k), part(self.v), coords)


_KV = PartitionSpec(None, BATCH_AXES, "tensor", "sequence", None)
_SLOTS = PartitionSpec(BATCH_AXES, "sequence")
SPECS: Any = Cache(*cast(Any, (_KV, _KV, _SLOTS, _SLOTS)))


@dataclasses.dataclass(frozen=True)
class CachedModel:
    """Runs a transformer on new tokens against a cache of one shape.

    Attributes:
      model: computes on its mesh, without Megatron's sequence parallelism, which cannot split a
        single token.
      head: from the model, its shards and the last layer's output [B, n, E] on a device to the
        result [B, n, ...], such as `LanguageModel.local_logits`.
      rows: B, a multiple of data x fsdp.
      capacity: most tokens of a row; C is this rounded up to a multiple of the sequence axis. Under
        the RoPE rules `dynamic` and `longrope` all tokens are embedded as in a row of this length.
      dense: most new tokens whose scores over the cache are all in memory at once, which is faster
        for few tokens.
    """

    model: Transformer
    head: Callable[[Any, Shards, Float[Array, "B n E"]], Float[Array, "B n ..."]]
    rows: int
    capacity: int
    dense: int = 1

    @property
    def ranks(self) -> int:
        """Devices of the sequence axis."""
        return self.model.mesh.shape["sequence"]

    @functools.cached_property
    def shapes(self) -> Any:
        """Shape, dtype and sharding of each array of the cache."""
        model, slots = self.model, -(-self.capacity // self.ranks) * self.ranks
        heads = model.parallel.local_key_heads * model.mesh.shape["tensor"]
        k = jax.ShapeDtypeStruct(
            (model.config.num_hidden_layers, self.rows, heads, slots, model.config.head_dim),
            model.dtype,
            sharding=NamedSharding(model.mesh, _KV),
        )
        index = jax.ShapeDtypeStruct(
            (self.rows, slots), jnp.int32, sharding=NamedSharding(model.mesh, _SLOTS)
        )
        return Cache(*cast(Any, (k, k, index, index)))

    @property
    def shardings(self) -> Any:
        """How the arrays of the cache are split."""
        return jax.tree.map(lambda x: x.sharding, self.shapes)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the cache on each device."""
        return sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in self.shapes
        )

    def empty(self) -> Cache:
        """Returns a cache without tokens."""
        return self._empty()

    @functools.cached_property
    def _empty(self) -> Callable:
        return jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.shapes),
            out_shardings=self.shardings,
        )

    def truncate(self, cache: Cache, lengths: Int[np.ndarray, " B"]) -> Cache:
        """Forgets each row's tokens beyond its length, without moving or copying keys and
        values."""
        return cache._replace(segment_ids=self._truncate(cache.index, cache.segment_ids, lengths))

    @functools.cached_property
    def _truncate(self) -> Callable:
        def truncate(index, segment_ids, lengths):
            return jnp.where(index < lengths[:, None], segment_ids, 0)

        return jax.jit(truncate, out_shardings=self.shardings.segment_ids, donate_argnums=1)

    def extend(
        self, params: Shards, cache: Cache, batch: Batch
    ) -> tuple[Cache, Float[Array, "B n ..."]]:
        """Appends n tokens to each row, computed by every device. The old cache's memory is reused:
        do not read it again.

        Only the slots up to the rows' last tokens are read.

        Args:
          batch: the model's inputs, and `index` and `segment_ids` [B, n]: a token's index in its
            row, which is its place in the cache, and 1, or 0 for padding, which is not kept.

        Returns:
          The cache with the new tokens, and the head's results for them.
        """
        return self._extend(params, cache, batch)

    @functools.cached_property
    def _extend(self) -> Any:
        return self.compiled(self.local_extend, (ROWS,), (SPECS, ROWS))

    def prefill(self, params: Shards, cache: Cache, batch: Batch) -> Cache:
        """Appends n tokens to each row, split over the sequence axis. The old cache's memory is
        reused: do not read it again.

        The tokens attend to each other by the model's schedule, and to the cache as in `extend`.

        Args:
          batch: as in `extend`, in natural order; n and each row's first index are multiples of the
            sequence axis. Tokens already in the cache come as padding.
        """
        # So that each device computes the tokens it keeps.
        order = permutation(batch["index"].shape[1], self.ranks, "striped")
        return self._prefill(
            params,
            cache,
            {name: np.ascontiguousarray(array[:, order]) for name, array in batch.items()},
        )

    def lower_prefill(self, params: Any, cache: Any, batch: Any) -> Any:
        """Returns the program of `prefill` for arrays of these shapes, for its memory."""
        return self._prefill.lower(params, cache, batch)

    @functools.cached_property
    def _prefill(self) -> Any:
        def local(params, cache, batch):
            return self.local_run(params, cache, batch)[0]

        return self.compiled(local, (TOKENS,), SPECS)

    def compiled(self, fn: Callable, inputs: tuple[PartitionSpec, ...], results: Any) -> Any:
        """Returns fn, which takes a device's shards and its parts of the cache and of other inputs,
        as a compiled function of global arrays, which reuses the cache's memory.

        Args:
          inputs, results: the specs of the other inputs, and of the results.
        """
        sharded = jax.shard_map(
            fn,
            mesh=self.model.mesh,
            in_specs=(self.model.specs, SPECS, *inputs),
            out_specs=results,
            check_vma=False,
        )
        return jax.jit(sharded, donate_argnums=1)

    # On a device, inside `shard_map`

    def local_extend(
        self, params: Shards, cache: Cache, batch: Batch
    ) -> tuple[Cache, Float[Array, "B n ..."]]:
        """`extend` on this device's shards."""
        cache, x = self._run(params, cache, batch, self._attend_whole)
        return cache, self.head(self._model, params, x)

    def local_run(
        self, params: Shards, cache: Cache, batch: Batch
    ) -> tuple[Cache, Float[Array, "B n E"]]:
        """`prefill` on this device's shards, which also returns the last layer's output; the batch
        is in the layout striped."""
        return self._run(params, cache, batch, self._attend_split)

    @functools.cached_property
    def _model(self) -> Transformer:
        # The schedule may have been made for a contiguous layout.
        return dataclasses.replace(
            self.model, sequence_parallel=False, schedule=in_any_layout(self.model.schedule)
        )

    def _attend_whole(
        self, op: AttentionOp, queries: Queries, new: Keys, cached: _LayerCache
    ) -> AttentionPartial:
        rows, length, heads, head_dim = queries.q.shape
        size = self._slots_at_once

        def attend_part(part, so_far):
            keys = cached.keys_from(part * size, size)
            return merge(so_far, _over_cache(op, queries, keys, self.dense))

        no_keys = AttentionPartial(
            jnp.zeros((rows, length, heads, head_dim), jnp.float32),
            jnp.full((rows, heads, length), -jnp.inf, jnp.float32),
        )
        parts = -(-cached.used // size)
        return merge_over_sequence(lax.fori_loop(0, parts, attend_part, no_keys))

    @property
    def _slots_at_once(self) -> int:
        """How many slots of a device's cache are read at once: a multiple of 128, or all."""
        _, rows, heads, slots, head_dim = self.shardings.k.shard_shape(self.shapes.k.shape)
        is_cpu = self.model.mesh.devices.flat[0].platform == "cpu"
        bytes_at_once = CPU_BYTES_AT_ONCE if is_cpu else BYTES_AT_ONCE
        fitting = bytes_at_once // (rows * heads * head_dim * self.shapes.k.dtype.itemsize)
        return min(max(128, fitting // 128 * 128), slots)

    def _attend_split(
        self, op: AttentionOp, queries: Queries, new: Keys, cached: _LayerCache
    ) -> AttentionPartial:
        every = jax.tree.map(lambda x: lax.all_gather(x, "sequence", axis=1, tiled=True), queries)
        keys = cached.keys()._replace(coords=cached.before)
        past = merge_over_sequence(_over_cache(op, every, keys, self.dense), scatter=True)
        return merge(op.forward(queries, new), past)

    def _run(
        self,
        params: Shards,
        cache: Cache,
        batch: Batch,
        attend: Callable[[AttentionOp, Queries, Keys, _LayerCache], AttentionPartial],
    ) -> tuple[Cache, Float[Array, "B n E"]]:
        """Runs the layers on new tokens and keeps their keys and values.

        Args:
          attend: from a layer's operation, the new tokens' queries and keys, and the layer's cache
            with them, to attention's result.
        """
        model, index, segment_ids = self._model, batch["index"], batch["segment_ids"]
        write, write_heads = self._writers(cache, index, segment_ids)
        # A row of the cache is one document, which starts at 0.
        before = TokenCoords(cache.index, cache.segment_ids, jnp.zeros_like(cache.index))
        slots = TokenCoords(
            write(cache.index, index), write(cache.segment_ids, segment_ids), before.start
        )
        last = jnp.max(jnp.where(slots.segment_ids > 0, slots.index, -1))
        used = 1 + last // self.ranks
        coords = TokenCoords(index, segment_ids, jnp.zeros_like(index))
        # The same length for all tokens, so that cached keys stay valid under the RoPE rules
        # `dynamic` and `longrope`.
        info = TokenInfo(index)

        # The cache is in the carry, where it is updated in place; restacked, it would be in memory
        # twice.
        def run_layer(gatherer, layer, carry, of_layer):
            x, k, v = carry
            shards, number = of_layer
            weights = gatherer.gather_layer(shards)
            q, new_k, new_v = layer.project(weights, x, info)
            k, v = (write_heads(old, new, number) for old, new in ((k, new_k), (v, new_v)))
            attended = attend(
                layer.attention,
                Queries(q, coords),
                Keys(new_k, new_v, coords),
                _LayerCache(k, v, number, slots, before, used),
            )
            attended = with_sinks(attended, layer.sinks(weights)).out.astype(x.dtype)
            return (layer.finish(weights, x, attended, info).hidden, k, v), None

        x, k, v = model.local_embed(params, batch), cache.k, cache.v
        for stack in model.config.stacks:
            gatherer, layers = model.weights_of(stack), model.layers(stack, self.capacity)
            numbers = jnp.arange(stack.first, stack.first + stack.layers)
            (x, k, v), _ = scan_periods(
                [functools.partial(run_layer, gatherer, layer) for layer in layers],
                (x, k, v),
                (gatherer.of_layers(params), numbers),
            )
        return Cache(k, v, slots.index, slots.segment_ids), x

    def _writers(
        self, cache: Cache, index: Int[Array, "B n"], segment_ids: Int[Array, "B n"]
    ) -> tuple[Callable, Callable]:
        """Returns functions that write new tokens to their slots on this device: [B, n] to [B, C],
        and [B, n, H, D] to one layer of [N, B, H, C, D]."""
        is_local = (index % self.ranks == lax.axis_index("sequence")) & (segment_ids > 0)
        # A slot after the last one is not written.
        slot = jnp.where(is_local, index // self.ranks, cache.index.shape[1])
        rows = jnp.arange(index.shape[0])[:, None]

        def write(old, new):
            return old.at[rows, slot].set(new.astype(old.dtype), mode="drop")

        def write_heads(old, new, layer):
            return old.at[layer, rows, :, slot].set(new.astype(old.dtype), mode="drop")

        return write, write_heads
