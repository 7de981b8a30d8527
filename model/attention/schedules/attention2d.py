"""Attention2D (section 3): queries are gathered along the rows and keys along the columns of a grid
of ranks.

Without overlap (Attention2D-NO, section 3.2, Algorithm 1), on a grid of R rows and C columns:

1. K and V are transposed from column-major to row-major order (line 2), which makes the ranks'
  causal masks triangles. Omitted here: with coordinates, exactness does not need it.
2. A rank gathers the queries of its row (line 3) and the keys and values of its column (line 4), so
  each block of queries meets each block of keys on exactly one rank.
3. The kernel is called once (line 5).
4. The partial results of a row are merged and scattered (lines 6 and 7).

The backward (Algorithm 3) gathers queries, dout, lse and delta along the row and keys and values
along the column, and reduce-scatters dQ in float32 along the row and dK and dV in float32 along the
column.

Traffic forward, received by each rank: C - 1 blocks of queries, T Hq D numbers each, R - 1 of keys
and values, 2 T Hkv D each, and in the merge C - 1 partial outputs in float32 with their lse: about
(sqrt(P) - 1) / P of everything, where a ring receives (P - 1) / P.

With `overlap` (Attention2D-O, section 3.4, Algorithms 4 to 6; backward Appendix B, Algorithms 8 to
11) nothing is gathered at once. K and V pass round the column while the rank computes with its own
queries; then the queries of the row pass by, one block travelling while another is in use. Partial
results, and dQ, follow one hop behind to their owner, and dK and dV are reduce-scattered round the
column during the last block of queries, block after block. The same numbers travel, and every hop
except the last one of a partial result or dQ overlaps with a kernel.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..blocks import BackwardInputs, Gradients, Keys, Queries, StackedKeys
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
    """Queries along rows, keys along columns.

    Attributes:
      columns: of the grid; 0 chooses the grid that moves the fewest bytes for the model's heads.
      overlap: Attention2D-O instead of Attention2D-NO.
    """

    columns: int = 0
    overlap: bool = False

    def check(self, size: int) -> None:
        self._check_divides("columns", size)

    def _columns(self, size: int, query_heads: int, kv_heads: int, itemsize: int) -> int:
        return self.columns or fewest_bytes(size, query_heads, kv_heads, itemsize)

    def _grid(self, context: Context, queries: Queries, keys: Keys) -> tuple[Ranks, Ranks]:
        q, k = queries.q, keys.k
        column, row = context.ranks.split(
            self._columns(context.ranks.size, q.shape[2], k.shape[2], q.dtype.itemsize)
        )
        return row, column

    def forward(
        self, kernel: Kernel, queries: Queries, keys: Keys, context: Context
    ) -> AttentionPartial:
        row, column = self._grid(context, queries, keys)
        if self.overlap:
            return _overlapped_forward(kernel, queries, keys, context, row, column)
        kernel = kernel.over_shards(row.size, column.size)
        return _merge_scatter(
            row, kernel.forward(row.gather(queries, 1), column.gather(keys, 1), **context.scores)
        )

    def backward(
        self, kernel: Kernel, queries: Queries, keys: Keys, saved: BackwardInputs, context: Context
    ) -> Gradients:
        row, column = self._grid(context, queries, keys)
        if self.overlap:
            return _overlapped_backward(kernel, queries, keys, saved, context, row, column)
        q, dout, q_coords = row.gather((queries.q, saved.dout, queries.coords), 1)
        lse, delta = row.gather((saved.lse, saved.delta), 2)
        kernel = kernel.over_shards(row.size, column.size)
        dq, dk, dv = kernel.backward(
            Queries(q, q_coords),
            column.gather(keys, 1),
            BackwardInputs(dout, lse, delta),
            **context.scores,
        )
        # dK and dV separately: for a stack the TPU compiler emits an all-reduce, which moves twice
        # the bytes.
        return Gradients(row.reduce_scatter(dq, 1), *column.reduce_scatter((dk, dv), 1))

    def plan(self, size: int, block: plan.Block, mask: Mask = Mask()) -> plan.Plan:
        columns = self._columns(size, block.query_heads, block.kv_heads, block.itemsize)
        column_lines, row_lines = plan.lines(size, columns)
        if self.overlap:
            return _overlapped_plan(size, block, mask, columns)
        row, column = plan.everyone(row_lines), plan.everyone(column_lines)
        tasks = tuple(
            plan.Task(rank, tuple(row_lines[rank // columns]), tuple(column_lines[rank % columns]))
            for rank in range(size)
        )

        def gather(queries: str, nbytes: int) -> plan.Round:
            return plan.Round(
                (),
                (
                    plan.Send(queries, plan.GATHER, nbytes, row),
                    plan.Send("row's coordinates", plan.GATHER, block.coords, row),
                    plan.Send("K, V", plan.GATHER, block.keys, column),
                    plan.Send("column's coordinates", plan.GATHER, block.coords, column),
                ),
            )

        forward = plan.Round(
            tasks,
            (
                # The maximum of the row's lse, as an all-reduce of C blocks of it: 2 (C - 1) / C of
                # them.
                plan.Send("maximum of lse", plan.REDUCE, 2 * block.statistics, row),
                plan.Send("out and weights", plan.SCATTER, block.out + block.statistics, row),
            ),
        )
        backward = plan.Round(
            tasks,
            (
                plan.Send("dQ", plan.SCATTER, block.out, row),
                plan.Send("dK, dV", plan.SCATTER, block.key_gradients, column),
            ),
        )
        return plan.Plan(
            (gather("Q", block.queries), forward),
            (gather("Q, dout, lse, delta", 2 * block.queries + 2 * block.statistics), backward),
        )


def fewest_bytes(ranks: int, query_heads: int, kv_heads: int, itemsize: int) -> int:
    """Returns the number of grid columns with which both passes receive the fewest bytes.

    Coordinates and lse are not counted. Section 3.2: if the traffic along rows and columns differs,
    a rectangular grid beats a square one.

    Args:
      ranks: of the grid.
      itemsize: bytes per element of queries, keys and values.
    """

    def received(columns):
        rows = ranks // columns
        forward = query_heads * itemsize + query_heads * 4, 2 * kv_heads * itemsize
        backward = 2 * query_heads * itemsize + query_heads * 4, 2 * kv_heads * (itemsize + 4)
        return (columns - 1) * (forward[0] + backward[0]) + (rows - 1) * (forward[1] + backward[1])

    return min((columns for columns in range(1, ranks + 1) if ranks % columns == 0), key=received)


def _merge_scatter(row: Ranks, partial: AttentionPartial) -> AttentionPartial:
    """The reduce-scatter of Algorithm 1: partial results of the row's queries [B, C T, ...],
    merged; each rank gets its own.

    XLA has no merging reduce-scatter, so every rank rescales its results to the row's largest lse,
    and then a sum suffices.
    """
    highest = lax.pmax(partial.lse, row.axis, axis_index_groups=row.groups())
    highest = jnp.where(jnp.isneginf(highest), 0.0, highest)
    weight = jnp.exp(partial.lse - highest)
    out = row.reduce_scatter(partial.out * per_row(weight), 1)
    total = row.reduce_scatter(weight, 2)
    length = total.shape[2]
    highest = lax.dynamic_slice_in_dim(highest, row.index() * length, length, 2)
    out = out / per_row(jnp.where(total == 0, 1.0, total))
    return AttentionPartial(
        out, jnp.where(total == 0, -jnp.inf, highest + jnp.log(jnp.where(total == 0, 1.0, total)))
    )


def _overlapped_forward(
    kernel: Kernel, queries: Queries, keys: Keys, context: Context, row: Ranks, column: Ranks
) -> AttentionPartial:
    """Algorithm 4: this rank's queries over the column's keys as they pass by, then the row's
    queries over all of them."""
    if row.size == 1:
        return Ring().forward(kernel, queries, keys, dataclasses.replace(context, ranks=column))
    send = _to_left(row)
    incoming = send(queries)

    def visit_keys(partial, block):  # GthrCmpt, Algorithm 5
        return kernel.extend(partial, queries, block, **context.scores), (), block

    local, _, blocks = ring_pass(
        keys.stacked(), column.size - 1, column.shift, column.shift, visit_keys
    )
    column_keys = _concatenate(blocks)
    # The next queries are sent on when they are in use, not while the column's keys still pass by.
    local, incoming = lax.optimization_barrier((local, incoming))

    def visit_queries(carry, queries):  # GthrCmptSctr, Algorithm 6
        return (
            carry,
            kernel.over_shards(1, column.size).extend(None, queries, column_keys, **context.scores),
            (),
        )

    from_row = ring_pass(incoming, row.size - 2, send, send, visit_queries).returned
    return merge(local, from_row)


def _overlapped_backward(
    kernel: Kernel,
    queries: Queries,
    keys: Keys,
    saved: BackwardInputs,
    context: Context,
    row: Ranks,
    column: Ranks,
) -> Gradients:
    """Algorithm 8, like the forward; dK and dV stay until the row's last queries pass by, then
    leave for their owners."""
    if row.size == 1:
        return Ring().backward(
            kernel, queries, keys, saved, dataclasses.replace(context, ranks=column)
        )
    send = _to_left(row)
    # Stacked like K and V, so that the few transfers can all be in flight at once.
    local = (
        jnp.stack([queries.q, saved.dout]),
        jnp.stack([saved.lse, saved.delta]),
        queries.coords,
    )
    incoming = send(local)

    def gradients(dq, queries_side, block, kernel=kernel):
        (q, dout), (lse, delta), coords = queries_side
        return kernel.gradients(
            dq, Queries(q, coords), block, BackwardInputs(dout, lse, delta), **context.scores
        )

    def visit_keys(dq, block):  # GthrCmptBwd, Algorithm 9
        dq, dkv = gradients(dq, local, block)
        return dq, (), (block, dkv)

    dq, _, (blocks, dkv) = ring_pass(
        keys.stacked(), column.size - 1, column.shift, column.shift, visit_keys
    )
    column_keys = _concatenate(blocks)
    dq, incoming = lax.optimization_barrier((dq, incoming))

    def visit_queries(dkv, queries_side):  # GthrCmptSctrBwd, Algorithm 10
        dq, more = gradients(None, queries_side, column_keys, kernel.over_shards(1, column.size))
        more_by_block = more.reshape(*more.shape[:2], column.size, -1, *more.shape[3:])
        return dkv + jnp.moveaxis(more_by_block, 2, 0), dq, ()

    def visit_last_queries(dkv, queries_side):
        dq, own_dkv = _compute_and_scatter(gradients, column, queries_side, blocks, dkv)
        return own_dkv, dq, ()

    dkv, from_row, _ = ring_pass(
        incoming, row.size - 2, send, send, visit_queries, dkv, visit_last_queries
    )
    return Gradients(dq + from_row, *dkv)


def _compute_and_scatter(gradients, column: Ranks, queries_side, blocks: StackedKeys, dkv):
    """CmptSctrBwd, Algorithm 11: the last queries' gradients block by block, alongside the
    reduce-scatter of dK and dV.

    The sum for an owner moves one hop nearer to it with each block; this rank's own block comes
    last.

    Args:
      gradients: (dq or None, queries' side, block) -> dq, dk and dv of the block.
      blocks: the column's blocks of keys, stacked on a leading axis, this rank's own first; dkv:
        their gradients so far.

    Returns:
      dq of these queries, and dk and dv of this rank's own block, summed over the column.
    """

    def compute(dq, number):
        block, before = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), (blocks, dkv)
        )
        dq, more = gradients(dq, queries_side, block)
        return dq, before + more

    def compute_and_shift(carry, number):
        dq, block_sum = carry
        arriving = column.shift(block_sum)
        dq, more = compute(dq, number)
        return (dq, arriving + more), None

    order = np.arange(2, column.size + 1) % column.size
    return lax.scan(compute_and_shift, compute(None, 1 % column.size), order)[0]


def _overlapped_plan(size: int, block: plan.Block, mask: Mask, columns: int) -> plan.Plan:
    rows = size // columns
    if columns == 1:
        return Ring().plan(size, block, mask)

    def to_left(*sends):
        pairs = tuple(
            (rank, rank - 1 if rank % columns else rank + columns - 1) for rank in range(size)
        )
        return tuple(plan.Send(name, plan.PERMUTE, nbytes, pairs) for name, nbytes in sends)

    def to_next_row(*sends):
        return tuple(
            plan.Send(name, plan.PERMUTE, nbytes, plan.shift(size, columns))
            for name, nbytes in sends
        )

    def tasks(right, rows_up):
        """Each rank computes with the queries of the rank `right` steps on in its row and the keys
        `rows_up` rows before."""
        return tuple(
            plan.Task(
                rank,
                (rank - rank % columns + (rank + right) % columns,),
                tuple((rank - columns * up) % size for up in rows_up),
            )
            for rank in range(size)
        )

    def rounds(queries, returned, scattered):
        """queries: sent round the row; returned: results that follow to their owner; scattered:
        down the column in the last round."""
        for up in range(rows):
            keys = (
                to_next_row(("K, V", block.keys), ("column's coordinates", block.coords))
                if up < rows - 1
                else ()
            )
            yield plan.Round(tasks(0, (up,)), keys + (() if up else to_left(*queries)))
        for right in range(1, columns):
            sends = (to_left(*queries) if right < columns - 1 else ()) + (
                to_left(*returned) if right > 1 else ()
            )
            if right < columns - 1 or not scattered:
                yield plan.Round(tasks(right, range(rows)), sends)
                continue
            for number in range(rows):
                yield plan.Round(
                    tasks(right, ((number + 1) % rows,)),
                    to_next_row(*scattered) if number else sends,
                )
        yield plan.Round((), to_left(*((f"{name} home", nbytes) for name, nbytes in returned)))

    coords = ("row's coordinates", block.coords)
    return plan.Plan(
        tuple(
            rounds([("Q", block.queries), coords], [("out, lse", block.out + block.statistics)], [])
        ),
        tuple(
            rounds(
                [("Q, dout", 2 * block.queries), ("lse, delta", 2 * block.statistics), coords],
                [("dQ", block.out)],
                [("dK, dV", block.key_gradients)],
            )
        ),
    )


def _to_left(row: Ranks):
    """Sends a tree to the left neighbour; after visiting the whole row, that is also the owner."""
    return lambda tree: row.shift(tree, -1)


def _concatenate(blocks: StackedKeys) -> StackedKeys:
    """Blocks of keys stacked on a leading axis [R, ...], as one block of all their tokens."""

    def concatenate(x):
        # The axis of tokens: coordinates are [R, B, T], K and V [R, 2, B, T, Hkv, D].
        axis = 1 if x.ndim == 3 else 2
        x = jnp.moveaxis(x, 0, axis)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    return jax.tree.map(concatenate, blocks)
