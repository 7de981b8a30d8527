"""The forward kernel of `mosaic`: two warpgroups of 64 queries each alternate in using the matrix
units (FlashAttention-3, section 3.1)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from ..partial import AttentionPartial
from .intervals import Intervals, tile_edges
from .kernel import LOG2E
from .mosaic_tiles import (
    COMPUTE_REGISTERS,
    LOAD_REGISTERS,
    ROWS,
    WARPGROUPS,
    Arithmetic,
    Slots,
    across,
    put_all,
    shared_tiles,
    visit,
)

QUERY_TILE = WARPGROUPS * ROWS
# Keys per tile, by head size: what fits into registers and shared memory.
KEY_TILES = {64: 128, 128: 128, 256: 64}
SLOTS = 2


def forward(
    carry: AttentionPartial | None,
    q: Float[Array, "B Tq Hq D"],
    keys: tuple[jax.Array, ...],
    seen: Intervals,
    *,
    scale: float,
    rounded: bool,
    interpret: Any,
) -> AttentionPartial:
    """Returns attention over these keys and over those that `carry` covers.

    Args:
      carry: float32; None for no keys yet.
      q: the queries; Tq is a multiple of QUERY_TILE, and D in KEY_TILES.
      keys: K and V [B, Tk, Hkv, D], or both stacked in one array; Tk is a multiple of KEY_TILES[D].
      seen: the keys that each query sees.
      rounded: whether out has the dtype of q, instead of float32. Half as many bytes are then
        written, by TMA.
      interpret: parameters of Mosaic's interpreter; None to compile.
    """
    batch, length, heads, head_dim = q.shape
    *_, kv_heads, _ = keys[0].shape
    key_tile = KEY_TILES[head_dim]
    edges = tile_edges(seen, QUERY_TILE, key_tile)
    # Rows are grouped by warpgroup, so that registers are loaded from and stored to whole tiles.
    rows = (batch, length // ROWS, ROWS)
    out, lse = (*rows, heads, head_dim), (batch, heads, *rows[1:])
    carried = () if carry is None else (carry.out.reshape(out), carry.lse.reshape(lse))
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (out, lse)]
    if rounded:
        results[0] = jax.ShapeDtypeStruct(q.shape, q.dtype)
    body = functools.partial(
        _kernel,
        len(keys),
        carry is not None,
        key_tile=key_tile,
        group=heads // kv_heads,
        scale=scale,
        rounded=rounded,
        arithmetic=Arithmetic(interpret is not None),
    )
    tiles = functools.partial(shared_tiles, dtype=q.dtype)
    out, lse = plgpu.kernel(
        body,
        out_type=results,
        grid=(heads, length // QUERY_TILE, batch),
        grid_names=("head", "tile", "row"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        scratch_types=[
            tiles(WARPGROUPS, ROWS, head_dim),
            plgpu.Barrier(num_barriers=WARPGROUPS),
            *Slots.scratch(tiles(SLOTS, key_tile, head_dim)),
            *Slots.scratch(tiles(SLOTS, key_tile, head_dim)),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ],
        kernel_name="attention_forward",
    )(edges, *(x.reshape(rows) for x in seen), q, *keys, *carried)
    return AttentionPartial(out.reshape(q.shape), lse.reshape(batch, heads, length))


@dataclasses.dataclass(frozen=True)
class _Turns:
    """Makes two warpgroups alternate: one multiplies while the other computes weights.

    Each alternates between two phases, products and softmax, and they synchronize at a barrier
    after each; they start one phase apart.
    """

    barrier: Any

    def end(self) -> None:
        plgpu.barrier_arrive(self.barrier)
        plgpu.barrier_wait(self.barrier)


def _kernel(
    key_arrays: int,
    carried: bool,
    edges_ref,
    first_ref,
    last_ref,
    q_ref,
    *refs,
    key_tile: int,
    group: int,
    scale: float,
    rounded: bool,
    arithmetic: Arithmetic,
) -> None:
    k_ref, v_ref = (refs[0].at[0], refs[0].at[1]) if key_arrays == 1 else refs[:2]
    carry_refs, refs = refs[key_arrays : key_arrays + 2 * carried], refs[key_arrays + 2 * carried :]
    out_ref, lse_ref, q_tiles, q_full, *slots, turn = refs
    k_slots, v_slots = Slots(*slots[:3]), Slots(*slots[3:])
    row, head, warpgroup = (lax.axis_index(name) for name in ("row", "head", "warpgroup"))
    # Later tiles see more keys: the longest run first, so that none starts when most cores are
    # done.
    tile = edges_ref.shape[1] - 1 - lax.axis_index("tile")

    def edge(number):
        return edges_ref[row, tile, number]

    @pl.when(warpgroup == WARPGROUPS)
    def _load():
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        kv_head = lax.div(head, jnp.int32(group))
        for i in range(WARPGROUPS):
            queries = pl.ds((tile * WARPGROUPS + i) * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(q_ref.at[row, queries, head], q_tiles.at[i], q_full.at[i])

        def tiles_of(i):
            index = (row, pl.ds(i * key_tile, key_tile), kv_head)
            return k_ref.at[index], v_ref.at[index]

        put_all((k_slots, v_slots), edge(0), edge(3), tiles_of)

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        number, turns = tile * WARPGROUPS + warpgroup, _Turns(turn)
        q = q_tiles.at[warpgroup]
        if carried:
            out = arithmetic.load(carry_refs[0], row, number, slice(None), head)
            highest = arithmetic.rows(carry_refs[1], row, head, number) * LOG2E
            # The carry is normalized: its weights sum to 1.
            total = jnp.where(highest == -jnp.inf, 0.0, 1.0)
        else:
            out, total = arithmetic.zeros((ROWS, q.shape[1])), arithmetic.zeros((ROWS,))
            highest = total - jnp.inf
        plgpu.barrier_wait(q_full.at[warpgroup])
        pl.when(warpgroup == 1)(turns.end)

        def body(i, carry, masked):
            out, highest, total = carry
            scores = arithmetic.product(q, k_slots.wait(i), meanwhile=turns.end)
            k_slots.release(i)
            if masked:
                seen = arithmetic.within(
                    (first_ref, last_ref), row, number, start=i * key_tile, columns=key_tile
                )
                scores = jnp.where(seen, scores, -jnp.inf)
            highest_before, highest = highest, jnp.maximum(highest, scores.max(1) * (scale * LOG2E))
            # A row that has seen no key keeps -inf; subtracting 0 instead avoids -inf - -inf.
            finite = jnp.where(highest == -jnp.inf, 0.0, highest)
            weights = jnp.exp2(scores * (scale * LOG2E) - across(finite, scores.shape))
            shrink = jnp.exp2(highest_before - finite)
            out = out * across(shrink, out.shape)
            total = total * shrink + weights.sum(1)
            weights = weights.astype(q.dtype)
            out, highest, total, weights = lax.optimization_barrier((out, highest, total, weights))
            v = v_slots.wait(i)
            turns.end()
            (out,) = arithmetic.add_products((out, weights, v))
            v_slots.release(i)
            return out, highest, total

        out, highest, total = visit(edge, body, (out, highest, total))
        pl.when(warpgroup == 0)(turns.end)
        nonzero = jnp.where(total == 0, 1.0, total)
        out = out * across(1.0 / nonzero, out.shape)
        if rounded:
            q[...] = out.astype(q.dtype)  # the queries are no longer needed
            plgpu.commit_smem()
            queries = pl.ds(number * ROWS, ROWS)
            plgpu.copy_smem_to_gmem(q, out_ref.at[row, queries, head])
        else:
            out_ref[row, number, :, head] = out
        lse_ref[row, head, number] = jnp.where(
            total == 0, -jnp.inf, highest * (1 / LOG2E) + jnp.log(nonzero)
        )
        if rounded:  # the copy has overlapped with storing lse
            plgpu.wait_smem_to_gmem(0)
