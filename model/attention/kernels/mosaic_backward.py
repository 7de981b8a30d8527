"""The backward kernels of `mosaic`: one for dq, which loops over keys, and one for dk and dv, which
loops over queries.

    S = scale Q K^T       P = exp(S - lse)      dP = dO V^T       dS = P * (dP - delta)
    dQ = scale dS K       dV = P^T dO           dK = scale dS^T Q

(FlashAttention-2, Algorithm 2.) The second kernel transposes the scores, one row per key: P^T and
dS^T are then left operands in registers, and the mask again applies by row, to the interval of
queries that see the key.
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
    across,
    down,
    put_all,
    shared_tiles,
    visit,
)

QUERY_TILE = WARPGROUPS * ROWS  # for dq
# Keys per tile for dq, by head size: what fits into registers and shared memory.
KEY_TILES = {64: 128, 128: 64, 256: 32}
QUERY_STEP = ROWS  # queries per step of dk and dv
# Columns of dk and dv per warpgroup: for wider heads two warpgroups share the keys, and each has
# half of the columns.
WIDTH = 128
SLOTS = 2  # for dq
# Slots for dk and dv, by head size: what fits into shared memory. A power of two: with head size
# 128 on an H200, 3 took 9% longer than 2 because its remainders cost more, and 4 took less.
STEP_SLOTS = {64: 4, 128: 4, 256: 2}


def keys_in_tile(head_dim: int) -> int:
    """Returns the keys per tile of dk and dv."""
    return ROWS * WARPGROUPS // max(head_dim // WIDTH, 1)


def dq_pass(
    carry: Float[Array, "B Tq Hq D"] | None,
    q: Float[Array, "B Tq Hq D"],
    keys: tuple[jax.Array, ...],
    saved: BackwardInputs,
    seen: Intervals,
    *,
    scale: float,
    interpret: Any,
) -> Float[Array, "B Tq Hq D"]:
    """Returns the gradient of the queries, float32, added to `carry` (None: zero).

    Args:
      q: the queries; Tq is a multiple of QUERY_TILE, and D in KEY_TILES.
      keys: K and V [B, Tk, Hkv, D], or both stacked in one array; Tk is a multiple of KEY_TILES[D].
      saved: dout in the queries' dtype; a finite lse.
      seen: the keys that each query sees.
      interpret: parameters of Mosaic's interpreter; None to compile.
    """
    batch, length, heads, head_dim = q.shape
    key_tile = KEY_TILES[head_dim]
    numbers = (batch, length // ROWS, ROWS)
    carried = () if carry is None else (carry.reshape(*numbers, heads, head_dim),)
    # Stacked, so that both share one address.
    rows = jnp.stack([x.reshape(numbers) for x in seen])
    statistics = jnp.stack([saved.lse * LOG2E, saved.delta]).reshape(2, batch, heads, *numbers[1:])
    body = functools.partial(
        _dq_kernel,
        len(keys),
        carry is not None,
        key_tile=key_tile,
        group=heads // keys[0].shape[-2],
        scale=scale,
        arithmetic=Arithmetic(interpret is not None),
    )
    # Swizzle at most the depth of a product.
    tiles = functools.partial(shared_tiles, dtype=q.dtype, swizzle=min(2 * key_tile, 128))
    query_tiles = [tiles(WARPGROUPS, ROWS, head_dim), plgpu.Barrier(num_barriers=WARPGROUPS)]
    dq = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((*numbers, heads, head_dim), jnp.float32),
        grid=(heads, length // QUERY_TILE, batch),
        grid_names=("head", "tile", "row"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        scratch_types=[
            *query_tiles,
            *query_tiles,
            *Slots.scratch(tiles(SLOTS, key_tile, head_dim)),
            *Slots.scratch(tiles(SLOTS, key_tile, head_dim)),
        ],
        kernel_name="attention_dq",
    )(tile_edges(seen, QUERY_TILE, key_tile), rows, statistics, q, saved.dout, *keys, *carried)
    return dq.reshape(q.shape)


def _dq_kernel(
    key_arrays: int,
    carried: bool,
    edges_ref,
    seen_ref,
    statistics_ref,
    q_ref,
    dout_ref,
    *refs,
    key_tile: int,
    group: int,
    scale: float,
    arithmetic: Arithmetic,
) -> None:
    k_ref, v_ref = (refs[0].at[0], refs[0].at[1]) if key_arrays == 1 else refs[:2]
    carry_refs, refs = refs[key_arrays : key_arrays + carried], refs[key_arrays + carried :]
    dq_ref, q_tiles, q_full, dout_tiles, dout_full, *slots = refs
    k_slots, v_slots = Slots(*slots[:3]), Slots(*slots[3:])
    row, head, warpgroup = (lax.axis_index(name) for name in ("row", "head", "warpgroup"))
    tile = edges_ref.shape[1] - 1 - lax.axis_index("tile")  # the longest first

    def edge(number):
        return edges_ref[row, tile, number]

    @pl.when(warpgroup == WARPGROUPS)
    def _load():
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        kv_head = lax.div(head, jnp.int32(group))
        for i in range(WARPGROUPS):
            index = (row, pl.ds((tile * WARPGROUPS + i) * ROWS, ROWS), head)
            plgpu.copy_gmem_to_smem(q_ref.at[index], q_tiles.at[i], q_full.at[i])
            plgpu.copy_gmem_to_smem(dout_ref.at[index], dout_tiles.at[i], dout_full.at[i])

        def tiles_of(i):
            index = (row, pl.ds(i * key_tile, key_tile), kv_head)
            return k_ref.at[index], v_ref.at[index]

        put_all((k_slots, v_slots), edge(0), edge(3), tiles_of)

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        number = tile * WARPGROUPS + warpgroup
        q, dout = q_tiles.at[warpgroup], dout_tiles.at[warpgroup]

        def statistic(index):  # 0: lse, 1: delta
            return arithmetic.rows(statistics_ref, index, row, head, number)

        # For head size 256 they would take registers that addresses need: there they are read again
        # for each tile.
        in_registers = None if q.shape[1] == 256 else (statistic(0), statistic(1))
        plgpu.barrier_wait(q_full.at[warpgroup])
        plgpu.barrier_wait(dout_full.at[warpgroup])

        def body(i, dq, masked):
            k, v = k_slots.wait(i), v_slots.wait(i)

            def weigh(scores):
                lse = in_registers[0] if in_registers else statistic(0)
                weights = jnp.exp2(scores * (scale * LOG2E) - across(lse, scores.shape))
                if masked:
                    interval = seen_ref.at[0], seen_ref.at[1]
                    seen = arithmetic.within(
                        interval, row, number, start=i * key_tile, columns=key_tile
                    )
                    weights = jnp.where(seen, weights, 0.0)
                return weights

            weights, dweights = arithmetic.two_products((q, k), (dout, v), weigh)
            v_slots.release(i)
            delta = in_registers[1] if in_registers else statistic(1)
            dscores = weights * (dweights - across(delta, weights.shape))
            (dq,) = arithmetic.add_products((dq, dscores, k))
            k_slots.release(i)
            return dq

        # Unscaled here and scaled with the rest: adding it at the end would double the registers.
        if carried:
            dq = arithmetic.load(carry_refs[0], row, number, slice(None), head) * (1 / scale)
        else:
            dq = arithmetic.zeros((ROWS, q.shape[1]))
        dq_ref[row, number, :, head] = visit(edge, body, dq) * scale


def dkv_pass(
    q: Float[Array, "B Tq Hq D"],
    keys: tuple[jax.Array, ...],
    saved: BackwardInputs,
    seeing: Intervals,
    *,
    scale: float,
    interpret: Any,
) -> Float[Array, "2 B Tk Hkv D"]:
    """Returns the gradients of keys and values, stacked, float32.

    Args:
      q: the queries; Tq is a multiple of QUERY_STEP, and D in KEY_TILES.
      keys: K and V [B, Tk, Hkv, D], or both stacked in one array; Tk is a multiple of
        `keys_in_tile`.
      saved: dout in the queries' dtype; a finite lse.
      seeing: the queries that see each key.
      interpret: parameters of Mosaic's interpreter; None to compile.
    """
    batch, _, heads, head_dim = q.shape
    *_, length, kv_heads, _ = keys[0].shape
    width, key_tile, dtype = min(head_dim, WIDTH), keys_in_tile(head_dim), q.dtype
    rows = (batch, length // ROWS, ROWS)
    statistics = jnp.stack([saved.lse * LOG2E, saved.delta])
    body = functools.partial(
        _dkv_kernel,
        len(keys),
        group=heads // kv_heads,
        scale=scale,
        arithmetic=Arithmetic(interpret is not None),
    )
    key_tiles = [
        shared_tiles(key_tile // ROWS, ROWS, head_dim, dtype),
        plgpu.Barrier(num_barriers=key_tile // ROWS),
    ]
    slots = STEP_SLOTS[head_dim]
    query_slots = Slots.scratch(shared_tiles(slots, QUERY_STEP, head_dim, dtype))
    dkv = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2, *rows, kv_heads, head_dim // width, width), jnp.float32),
        grid=(kv_heads, length // key_tile, batch),
        grid_names=("head", "tile", "row"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        scratch_types=[
            *key_tiles,
            *key_tiles,
            *query_slots,
            *query_slots,
            *Slots.scratch(plgpu.SMEM((slots, 2, QUERY_STEP), jnp.float32)),
        ],
        kernel_name="attention_dkv",
    )(
        tile_edges(seeing, key_tile, QUERY_STEP),
        *(x.reshape(rows) for x in seeing),
        q,
        saved.dout,
        statistics,
        *keys,
    )
    return dkv.reshape(2, batch, length, kv_heads, head_dim)


def _dkv_kernel(
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
    dkv_ref, k_tiles, k_full, v_tiles, v_full, *slots = refs[key_arrays:]
    q_slots, dout_slots, statistics_slots = (Slots(*slots[i : i + 3]) for i in (0, 3, 6))
    row, kv_head, tile, warpgroup = (
        lax.axis_index(name) for name in ("row", "head", "tile", "warpgroup")
    )

    def edge(number):
        return edges_ref[row, tile, number]

    begin = edge(0)
    steps = edge(3) - begin
    parts, width = dkv_ref.shape[-2:]

    @pl.when(warpgroup == WARPGROUPS)
    def _load():
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        for i in range(k_tiles.shape[0]):
            index = (row, pl.ds((tile * k_tiles.shape[0] + i) * ROWS, ROWS), kv_head)
            plgpu.copy_gmem_to_smem(k_ref.at[index], k_tiles.at[i], k_full.at[i])
            plgpu.copy_gmem_to_smem(v_ref.at[index], v_tiles.at[i], v_full.at[i])

        def tiles_of(step):
            head = kv_head * group + lax.div(step, steps)
            queries = pl.ds((begin + lax.rem(step, steps)) * QUERY_STEP, QUERY_STEP)
            return (
                q_ref.at[row, queries, head],
                dout_ref.at[row, queries, head],
                statistics_ref.at[:, row, head, queries],
            )

        put_all((q_slots, dout_slots, statistics_slots), 0, group * steps, tiles_of)

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        # Either each warpgroup has its own keys, or both have the same keys and each some of the
        # columns.
        part, key_tile = (0, warpgroup) if parts == 1 else (warpgroup, 0)
        number = tile * k_tiles.shape[0] + key_tile
        k, v = k_tiles.at[key_tile], v_tiles.at[key_tile]
        plgpu.barrier_wait(k_full.at[key_tile])
        plgpu.barrier_wait(v_full.at[key_tile])

        def body(head, i, carry, masked):
            dk, dv = carry
            step = head * steps + i - begin
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
            q_part, dout_part = (_columns(x, part, width) for x in (q, dout))
            dv, dk = arithmetic.add_products((dv, weights, dout_part), (dk, dscores, q_part))
            q_slots.release(step)
            dout_slots.release(step)
            return dk, dv

        def visit_head(head, carry):
            return visit(edge, functools.partial(body, head), carry)

        dk, dv = lax.fori_loop(0, group, visit_head, (arithmetic.zeros((ROWS, width)),) * 2)
        dkv_ref[0, row, number, :, kv_head, part] = dk * scale
        dkv_ref[1, row, number, :, kv_head, part] = dv


def _columns(tile: Any, part: jax.Array | int, width: int) -> Any:
    """Returns a warpgroup's part of a tile's columns; the whole tile if it is one part."""
    return tile if tile.shape[1] == width else tile.at[:, pl.ds(part * width, width)]
