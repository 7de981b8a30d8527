"""Attention2D (section 3): queries along rows, keys and values along columns of a grid of ranks.

On a grid of R rows and C columns a rank gathers the queries of its row and the keys and values of its column, so that
every query block meets every key block on exactly one rank, in one round. Forward each rank receives (C-1) blocks of queries,
T Hq D numbers each, (R-1) of keys and values, 2 T Hkv D, and in the merge C-1 partial outputs (float32) and lse: about
(sqrt(P)-1)/P of everything, where a ring receives (P-1)/P. Backward: queries, dout, lse and delta along the row, float32 dq
back; keys and values along the column, float32 dk and dv back.

With `overlap` (Algorithms 4-6, Appendices A and B) nothing is gathered at once: K, V go round the column while the rank's own
queries meet them, then the row's queries come round, one block on its way while another is met; partials, and dQ, follow
one hop behind to their owner, and dK, dV are summed on their way round the column while the last queries meet block after
block. As many numbers travel, every hop beside a kernel but the last one home of a partial or dQ.

The paper first moves keys and values once, so that the ranks' masks are triangles; coordinates travel here, so exactness
does not need that move.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..blocks import Gradients, Keys, Queries, Saved
from ..coords import Mask
from ..kernels.kernel import Kernel
from ..partial import AttentionPartial, merge, per_row
from . import plan
from .ranks import Ranks
from .ring import Ring
from .ring_pass import ring_pass
from .schedule import Context, Schedule


@dataclasses.dataclass(frozen=True)
class Attention2D(Schedule):
    """Rows x columns; `columns` 0 chooses the grid with the fewest bytes for these heads. overlap: tiled, see above."""

    columns: int = 0
    overlap: bool = False

    def check(self, size: int) -> None:
        self._check_divides("columns", size)

    def _columns(self, size: int, query_heads: int, kv_heads: int, itemsize: int) -> int:
        return self.columns or fewest_bytes(size, query_heads, kv_heads, itemsize)

    def _grid(self, context: Context, queries: Queries, keys: Keys) -> tuple[Ranks, Ranks]:
        q, k = queries.q, keys.k
        column, row = context.ranks.split(self._columns(context.ranks.size, q.shape[2], k.shape[2], q.dtype.itemsize))
        return row, column

    def forward(self, kernel: Kernel, queries: Queries, keys: Keys, context: Context) -> AttentionPartial:
        row, column = self._grid(context, queries, keys)
        if self.overlap:
            return _overlapped_forward(kernel, queries, keys, context, row, column)
        return _merge_scatter(row, kernel.forward(row.gather(queries, 1), column.gather(keys, 1), **context.scores))

    def backward(self, kernel: Kernel, queries: Queries, keys: Keys, saved: Saved, context: Context) -> Gradients:
        row, column = self._grid(context, queries, keys)
        if self.overlap:
            return _overlapped_backward(kernel, queries, keys, saved, context, row, column)
        q, dout, q_coords = row.gather((queries.q, saved.dout, queries.coords), 1)
        lse, delta = row.gather((saved.lse, saved.delta), 2)
        dq, dk, dv = kernel.backward(Queries(q, q_coords), column.gather(keys, 1), Saved(dout, lse, delta), **context.scores)
        # dK and dV apart: for a stack the TPU compiler emits an all-reduce, which moves twice the bytes.
        return Gradients(row.reduce_scatter(dq, 1), *column.reduce_scatter((dk, dv), 1))

    def plan(self, size: int, block: plan.Block, mask: Mask = Mask()) -> plan.Plan:
        columns = self._columns(size, block.query_heads, block.kv_heads, block.itemsize)
        down, along = plan.lines(size, columns)
        if self.overlap:
            return _overlapped_plan(size, block, mask, columns)
        row, column = plan.everyone(along), plan.everyone(down)
        tasks = tuple(plan.Task(rank, tuple(along[rank // columns]), tuple(down[rank % columns])) for rank in range(size))

        def gather(queries: str, nbytes: int):
            return plan.Round((), (
                plan.Send(queries, plan.GATHER, nbytes, row), plan.Send("row's coordinates", plan.GATHER, block.coords, row),
                plan.Send("K, V", plan.GATHER, block.keys, column),
                plan.Send("column's coordinates", plan.GATHER, block.coords, column)))

        forward = plan.Round(tasks, (
            # The maximum of the row's lse, as an all-reduce of C blocks of it: 2 (C - 1) / C of them.
            plan.Send("maximum of lse", plan.REDUCE, 2 * block.statistics, row),
            plan.Send("out and weights", plan.SCATTER, block.out + block.statistics, row)))
        backward = plan.Round(tasks, (
            plan.Send("dQ", plan.SCATTER, block.out, row), plan.Send("dK, dV", plan.SCATTER, block.key_gradients, column)))
        return plan.Plan((gather("Q", block.queries), forward),
                         (gather("Q, dout, lse, delta", 2 * block.queries + 2 * block.statistics), backward))


def fewest_bytes(ranks: int, query_heads: int, kv_heads: int, itemsize: int) -> int:
    """The number of columns whose forward and backward receive the fewest bytes; coordinates and lse are left out."""

    def received(columns):
        rows = ranks // columns
        forward = query_heads * itemsize + query_heads * 4, 2 * kv_heads * itemsize
        backward = 2 * query_heads * itemsize + query_heads * 4, 2 * kv_heads * (itemsize + 4)
        return (columns - 1) * (forward[0] + backward[0]) + (rows - 1) * (forward[1] + backward[1])

    return min((c for c in range(1, ranks + 1) if ranks % c == 0), key=received)


def _merge_scatter(row: Ranks, partial: AttentionPartial) -> AttentionPartial:
    """Partials of the row's queries [B, C T, ...], merged over the row; each rank gets its own queries' [B, T, ...]."""
    top = lax.pmax(partial.lse, row.axis, axis_index_groups=row.groups())
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weight = jnp.exp(partial.lse - top)
    out = row.reduce_scatter(partial.out * per_row(weight), 1)
    total = row.reduce_scatter(weight, 2)
    length = total.shape[2]
    top = lax.dynamic_slice_in_dim(top, row.index() * length, length, 2)
    out = out / per_row(jnp.where(total == 0, 1.0, total))
    return AttentionPartial(out, jnp.where(total == 0, -jnp.inf, top + jnp.log(jnp.where(total == 0, 1.0, total))))


def _overlapped_forward(kernel: Kernel, queries: Queries, keys: Keys, context: Context, row: Ranks,
                        column: Ranks) -> AttentionPartial:
    """Algorithm 4: this rank's queries against the column as it comes by, then the row's against the column."""
    if row.size == 1:
        return Ring().forward(kernel, queries, keys, dataclasses.replace(context, ranks=column))
    onwards = _neighbour(row)
    waiting = onwards(queries)

    def meet_keys(partial, block):
        return kernel.extend(partial, queries, block, **context.scores), (), block

    own, _, blocks = ring_pass(keys.stacked(), column.size - 1, column.shift, column.shift, meet_keys)
    column_keys = _joined(blocks)
    own, waiting = lax.optimization_barrier((own, waiting))  # what waits goes on when it is met, not before

    def meet_queries(carry, queries):
        return carry, kernel.extend(None, queries, column_keys, **context.scores), ()

    others = ring_pass(waiting, row.size - 2, onwards, onwards, meet_queries).returned
    return merge(own, others)


def _overlapped_backward(kernel: Kernel, queries: Queries, keys: Keys, saved: Saved, context: Context, row: Ranks,
                         column: Ranks) -> Gradients:
    """Algorithm 8: as the forward; dK, dV stay until the row's last queries come by, and then leave for their owners."""
    if row.size == 1:
        return Ring().backward(kernel, queries, keys, saved, dataclasses.replace(context, ranks=column))
    onwards = _neighbour(row)
    # Stacked for the wire, as K and V are: few transfers, that can all be under way at once.
    packet = (jnp.stack([queries.q, saved.dout]), jnp.stack([saved.lse, saved.delta]), queries.coords)
    waiting = onwards(packet)

    def gradients(dq, packet, block):
        (q, dout), (lse, delta), coords = packet
        return kernel.gradients(dq, Queries(q, coords), block, Saved(dout, lse, delta), **context.scores)

    def meet_keys(dq, block):
        dq, dkv = gradients(dq, packet, block)
        return dq, (), (block, dkv)

    dq, _, (blocks, dkv) = ring_pass(keys.stacked(), column.size - 1, column.shift, column.shift, meet_keys)
    column_block = _joined(blocks)
    dq, waiting = lax.optimization_barrier((dq, waiting))

    def meet_queries(dkv, packet):
        dq, dkv_here = gradients(None, packet, column_block)
        blockwise = dkv_here.reshape(*dkv_here.shape[:2], column.size, -1, *dkv_here.shape[3:])
        return dkv + jnp.moveaxis(blockwise, 2, 0), dq, ()

    def meet_and_scatter(dkv, packet):
        """Algorithm 11: block after block, so that the sum for an owner is one hop nearer with each, and last its own."""
        def meet(dq, place):
            block, dkv_before = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, place, keepdims=False), (blocks, dkv))
            dq, dkv_here = gradients(dq, packet, block)
            return dq, dkv_before + dkv_here

        def stop(carry, place):
            dq, dkv = carry
            arriving = column.shift(dkv)
            dq, dkv_here = meet(dq, place)
            return (dq, arriving + dkv_here), None

        (dq, dkv_home), _ = lax.scan(stop, meet(None, 1 % column.size), np.arange(2, column.size + 1) % column.size)
        return dkv_home, dq, ()

    dkv, others, _ = ring_pass(waiting, row.size - 2, onwards, onwards, meet_queries, dkv, meet_and_scatter)
    return Gradients(dq + others, *dkv)


def _overlapped_plan(size: int, block: plan.Block, mask: Mask, columns: int) -> plan.Plan:
    rows = size // columns
    if columns == 1:
        return Ring().plan(size, block, mask)

    def along(*sends):  # a hop to the left neighbour
        pairs = tuple((rank, rank - 1 if rank % columns else rank + columns - 1) for rank in range(size))
        return tuple(plan.Send(what, plan.PERMUTE, nbytes, pairs) for what, nbytes in sends)

    def down(*sends):  # a hop to the next row
        return tuple(plan.Send(what, plan.PERMUTE, nbytes, plan.shift(size, columns)) for what, nbytes in sends)

    def tasks(right, up):
        """Each rank meets the queries of the rank `right` places on in its row with the keys of ranks `up` rows before."""
        return tuple(plan.Task(rank, (rank - rank % columns + (rank + right) % columns,),
                               tuple((rank - columns * rows_up) % size for rows_up in up)) for rank in range(size))

    def rounds(queries, back, scatter):
        """queries, back: what goes round the row, and home; scatter: what the last queries' gradients send down the column."""
        for up in range(rows):
            on = down(("K, V", block.keys), ("column's coordinates", block.coords)) if up < rows - 1 else ()
            yield plan.Round(tasks(0, (up,)), on + (() if up else along(*queries)))
        for right in range(1, columns):
            sends = (along(*queries) if right < columns - 1 else ()) + (along(*back) if right > 1 else ())
            if right < columns - 1 or not scatter:
                yield plan.Round(tasks(right, range(rows)), sends)
                continue
            for stop in range(rows):
                yield plan.Round(tasks(right, ((stop + 1) % rows,)), (() if stop else sends) + (down(*scatter) if stop else ()))
        yield plan.Round((), along(*((f"{what} home", nbytes) for what, nbytes in back)))

    coords = ("row's coordinates", block.coords)
    return plan.Plan(
        tuple(rounds([("Q", block.queries), coords], [("out, lse", block.out + block.statistics)], [])),
        tuple(rounds([("Q, dout", 2 * block.queries), ("lse, delta", 2 * block.statistics), coords], [("dQ", block.out)],
                     [("dK, dV", block.key_gradients)])))


def _neighbour(row: Ranks):
    """A tree, to the left neighbour. After a whole round that is also the way home."""
    return lambda tree: row.shift(tree, -1)


def _joined(blocks):
    """Blocks of keys and coordinates stacked on a leading axis, as one block of their tokens."""
    def join(x):
        tokens = 1 if x.ndim == 3 else 2  # coordinates [R, B, T]; K and V [R, 2, B, T, Hkv, D]
        x = jnp.moveaxis(x, 0, tokens)
        return x.reshape(*x.shape[:tokens], -1, *x.shape[tokens + 2:])

    return jax.tree.map(join, blocks)
