"""The one-pass backward kernel of `mosaic`: five products per tile, where `mosaic_backward` needs
seven. It loops over queries for dk and dv, and adds each tile's part of dq in global memory.

    S^T = scale K Q^T     P^T = exp(S^T - lse)   dP^T = V dO^T    dS^T = P^T * (dP^T - delta)
    dV += P^T dO          dK += scale dS^T Q     dQ += scale dS K

(FlashAttention-3's backward.) dk and dv stay in registers, of which a thread's 240 have no room for
dq: it leaves through shared memory, and TMA adds it in float32 to the sum of other blocks. Blocks
add in no fixed order, so the rounding of dq differs from run to run.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from ..blocks import BackwardInputs
from .intervals import Intervals, tile_edges
from .kernel import LOG2E
from .mosaic_tiles import (
    COMPUTE_REGISTERS,
    LOAD_REGISTERS,
    ROWS,
    WARPGROUPS,
    Arithmetic,
    Slots,
    down,
    put_all,
    shared_tiles,
    visit,
)

HEAD_DIMS = (64, 128)
KEY_TILE = WARPGROUPS * ROWS
QUERY_STEP = ROWS
SLOTS = 2


def gradients(
    carry: Float[Array, "B Tq Hq D"] | None,
    q: Float[Array, "B Tq Hq D"],
    keys: tuple[jax.Array, ...],
    saved: BackwardInputs,
    seeing: Intervals,
    *,
    scale: float,
    interpret: Any,
) -> tuple[Float[Array, "B Tq Hq D"], Float[Array, "2 B Tk Hkv D"]]:
    """Returns the gradient of the queries, added to `carry` (None: zero), and those of keys and
    values, stacked; float32.

    Args:
      q: the queries; Tq is a multiple of QUERY_STEP, and D in HEAD_DIMS.
      keys: K and V [B, Tk, Hkv, D], or both stacked in one array; Tk is a multiple of KEY_TILE.
      saved: dout in the queries' dtype; a finite lse.
      seeing: the queries that see each key.
      interpret: parameters of Mosaic's interpreter; None to compile.
    """
    batch, _, heads, head_dim = q.shape
    *_, length, kv_heads, _ = keys[0].shape
    rows = (batch, length // ROWS, ROWS)
    body = functools.partial(
        _kernel,
        len(keys),
        group=heads // kv_heads,
        scale=scale,
        arithmetic=Arithmetic(interpret is not None),
    )
    # Swizzled rows are as wide as a warpgroup's part of dq, for which K is sliced.
    tiles = functools.partial(shared_tiles, dtype=q.dtype, swizzle=head_dim)
    key_tile = [tiles(1, KEY_TILE, head_dim), plgpu.Barrier()]
    query_slots = Slots.scratch(tiles(SLOTS, QUERY_STEP, head_dim))
    scratch = [
        *key_tile,
        *key_tile,
        *query_slots,
        *query_slots,
        *Slots.scratch(plgpu.SMEM((SLOTS, 2, QUERY_STEP), jnp.float32)),
        tiles(2, KEY_TILE, QUERY_STEP),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
        shared_tiles(WARPGROUPS, QUERY_STEP, head_dim // WARPGROUPS, jnp.float32),
    ]

    def scoped(*refs):
        pl.run_scoped(functools.partial(body, *refs), *scratch, collective_axes="warpgroup")

    dq = jax.new_ref(
        jnp.zeros(q.shape, jnp.float32) if carry is None else carry, memory_space=plgpu.GMEM
    )
    # `plgpu.kernel` does not accept references that are updated in place.
    (dkv,) = pl.kernel(
        scoped,
        (jax.ShapeDtypeStruct((2, *rows, kv_heads, head_dim), jnp.float32),),
        mesh=plgpu.Mesh(
            grid=(kv_heads, length // KEY_TILE, batch),
            grid_names=("head", "tile", "row"),
            num_threads=WARPGROUPS + 1,
            thread_name="warpgroup",
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        name="attention_backward",
    )(
        tile_edges(seeing, KEY_TILE, QUERY_STEP),
        *(x.reshape(rows) for x in seeing),
        q,
        saved.dout,
        jnp.stack([saved.lse * LOG2E, saved.delta]),
        *keys,
        dq,
    )
    return jax.freeze(dq), dkv.reshape(2, batch, length, kv_heads, head_dim)


def _kernel(
    key_arrays: int,
    edges_ref,
    first_ref,
    last_ref,
    q_ref,
    dout_ref,
    statistics_ref,
    *refs,
    group: int,
    scale: float,
    arithmetic: Arithmetic,
) -> None:
    k_ref, v_ref = (refs[0].at[0], refs[0].at[1]) if key_arrays == 1 else refs[:2]
    dq_ref, dkv_ref, k_tiles, k_full, v_tiles, v_full, *slots = refs[key_arrays:]
    q_slots, dout_slots, statistics_slots = (Slots(*slots[i : i + 3]) for i in (0, 3, 6))
    dscores_tiles, dscores_full, dq_tiles = slots[9:]
    row, kv_head, tile, warpgroup = (
        lax.axis_index(name) for name in ("row", "head", "tile", "warpgroup")
    )

    def edge(number):
        return edges_ref[row, tile, number]

    begin = edge(0)
    steps = edge(3) - begin
    width = dq_tiles.shape[2]

    def head_and_queries(step):
        """Returns the query head of a step, and its queries."""
        queries = pl.ds((begin + lax.rem(step, steps)) * QUERY_STEP, QUERY_STEP)
        return kv_head * group + lax.div(step, steps), queries

    @pl.when(warpgroup == WARPGROUPS)
    def _load():
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        index = (row, pl.ds(tile * KEY_TILE, KEY_TILE), kv_head)
        plgpu.copy_gmem_to_smem(k_ref.at[index], k_tiles.at[0], k_full)
        plgpu.copy_gmem_to_smem(v_ref.at[index], v_tiles.at[0], v_full)

        def tiles_of(step):
            head, queries = head_and_queries(step)
            return (
                q_ref.at[row, queries, head],
                dout_ref.at[row, queries, head],
                statistics_ref.at[:, row, head, queries],
            )

        put_all((q_slots, dout_slots, statistics_slots), 0, group * steps, tiles_of)

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        number, rows = tile * WARPGROUPS + warpgroup, pl.ds(warpgroup * ROWS, ROWS)
        columns = pl.ds(warpgroup * width, width)  # this warpgroup's part of dq
        plgpu.barrier_wait(k_full)
        plgpu.barrier_wait(v_full)

        def body(head, i, carry, masked):
            dk, dv = carry
            step = head * steps + i - begin
            # 0, but the compiler cannot know: addresses that are the same in every step would each
            # occupy registers throughout, and 184 bytes would be spilled instead of 56.
            zero = lax.div(step, jnp.int32(1 << 30))
            k, v = k_tiles.at[zero, rows], v_tiles.at[zero, rows]
            dq_tile = dq_tiles.at[warpgroup + zero]
            q, dout, statistics = (
                slots.wait(step) for slots in (q_slots, dout_slots, statistics_slots)
            )

            def weigh(scores):
                lse = arithmetic.columns(statistics, 0)
                weights = jnp.exp2(scores * (scale * LOG2E) - down(lse, scores.shape))
                if masked:
                    seen = arithmetic.within(
                        (first_ref, last_ref), row, number, start=i * QUERY_STEP, columns=QUERY_STEP
                    )
                    weights = jnp.where(seen, weights, 0.0)
                return weights

            weights, dweights = arithmetic.two_products((k, q), (v, dout), weigh)
            dscores = weights * (dweights - down(arithmetic.columns(statistics, 1), weights.shape))
            statistics_slots.release(step)
            dscores = dscores.astype(q.dtype)
            # Double-buffered: the other warpgroup may still be multiplying the previous one.
            shared = dscores_tiles.at[lax.rem(step, jnp.int32(2))]
            shared[rows] = dscores
            plgpu.commit_smem()
            plgpu.barrier_arrive(dscores_full)

            def send(dq):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                dq_tile[...] = dq * scale
                head, queries = head_and_queries(step)
                arithmetic.add_into(dq_ref.at[row, queries, head, columns], dq_tile)

            dv, dk = arithmetic.products_around(
                (dv, weights, dout),
                (shared, k_tiles.at[zero, :, columns]),
                (dk, dscores, q),
                ready=lambda: plgpu.barrier_wait(dscores_full),
                use=send,
            )
            q_slots.release(step)
            dout_slots.release(step)
            return dk, dv

        def visit_head(head, carry):
            return visit(edge, functools.partial(body, head), carry)

        zeros = arithmetic.zeros((ROWS, k_tiles.shape[2]))
        dk, dv = lax.fori_loop(0, group, visit_head, (zeros, zeros))
        dkv_ref[0, row, number, :, kv_head] = dk * scale
        dkv_ref[1, row, number, :, kv_head] = dv
        plgpu.wait_smem_to_gmem(0)
