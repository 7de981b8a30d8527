"""Attention2D (section 3, without overlap): queries along rows, keys and values along columns of a grid of ranks.

On a grid of R rows and C columns a rank gathers the queries of its row and the keys and values of its column, so that
every query block meets every key block on exactly one rank. Forward each rank receives (C-1) blocks of queries, (R-1) of
keys and values, and in the merge C-1 partial outputs (float32) and lse: about (sqrt(P)-1)/P of everything, where a ring
receives (P-1)/P. Backward: queries, dout, lse and delta along the row, dq back; keys and values along the column, dk and
dv back.

The paper first moves keys and values once, so that the ranks' masks are triangles; coordinates travel here, so exactness
does not need that move.
"""
from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from ..coords import TokenCoords
from ..partial import AttentionPartial, per_row
from . import plan
from .ranks import Ranks


@dataclasses.dataclass(frozen=True)
class Attention2D:
    """Rows x columns; `columns` 0 chooses the grid with the fewest bytes for these heads."""

    columns: int = 0

    def _columns(self, size: int, query_heads: int, kv_heads: int, itemsize: int) -> int:
        columns = self.columns or fewest_bytes(size, query_heads, kv_heads, itemsize)
        if size % columns:
            good = [c for c in range(1, size + 1) if size % c == 0]
            raise ValueError(f"attention2d.columns: {columns} does not divide {size} sequence shards; those do: {good}")
        return columns

    def _grid(self, ranks: Ranks, q, k):
        column, row = ranks.split(self._columns(ranks.size, q.shape[2], k.shape[2], q.dtype.itemsize))
        return row, column

    def forward(self, kernel, q, k, v, q_coords, kv_coords, *, ranks, mask, scale):
        row, column = self._grid(ranks, q, k)
        queries, q_coords = row.gather((q, tuple(q_coords)), 1)
        keys, values, kv_coords = column.gather((k, v, tuple(kv_coords)), 1)
        partial = kernel.forward(queries, keys, values, TokenCoords(*q_coords), TokenCoords(*kv_coords), mask=mask, scale=scale)
        return _merge_scatter(row, partial)

    def backward(self, kernel, q, k, v, dout, lse, delta, q_coords, kv_coords, *, ranks, mask, scale):
        row, column = self._grid(ranks, q, k)
        queries, dout, q_coords = row.gather((q, dout, tuple(q_coords)), 1)
        lse, delta = row.gather((lse, delta), 2)
        keys, values, kv_coords = column.gather((k, v, tuple(kv_coords)), 1)
        dq, dk, dv = kernel.backward(
            queries, keys, values, dout, lse, delta, TokenCoords(*q_coords), TokenCoords(*kv_coords), mask=mask, scale=scale)
        # Apart, not stacked: of a stack the TPU's compiler makes an all-reduce, twice the bytes.
        return row.add_scatter(dq, 1), *column.add_scatter((dk, dv), 1)

    def plan(self, size: int, block: plan.Block) -> plan.Plan:
        columns = self._columns(size, block.query_heads, block.kv_heads, block.itemsize)
        down, along = plan.lines(size, columns)
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
    out = row.add_scatter(partial.out * per_row(weight), 1)
    total = row.add_scatter(weight, 2)
    length = total.shape[2]
    top = lax.dynamic_slice_in_dim(top, row.index() * length, length, 2)
    out = out / per_row(jnp.where(total == 0, 1.0, total))
    return AttentionPartial(out, jnp.where(total == 0, -jnp.inf, top + jnp.log(jnp.where(total == 0, 1.0, total))))
