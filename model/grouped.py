"""Products of rows sorted into groups with a matrix per group: a mixture's experts.

On TPUs `jax.lax.ragged_dot` is compiled to a grouped product. Elsewhere it becomes a dense product
of all rows with every group's matrix, which multiplies the FLOPs by the number of groups; there we
loop over blocks of rows, each of one group. Empty groups cost nothing, and one program serves any
sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .frozen import FrozenWeight, Weight, array

# The least and the most rows per block in the loop; between them an eighth of the average group.
BLOCK_ROWS = (16, 512)


@jax.custom_vjp
def grouped_product(
    x: Float[Array, "M K"], w: Weight, sizes: Int[Array, " G"]
) -> Float[Array, "M N"]:
    """Returns x[i] @ w[g] for each row i of group g, in x's dtype; zeros after the last group.

    The gradient of a float32 weight is a float32 sum; a frozen weight has none.

    Args:
      x: the rows of the first group, then those of the second, and so on.
      w: [G, K, N], float32 by type with values of x's dtype, or frozen.
      sizes: the rows of each group; their sum may be less than M.
    """
    return _rows_product(x, array(w, x.dtype), sizes)


def _forward(x, w, sizes):
    # A frozen weight is kept as stored, and has no gradient: of x only the dtype is needed.
    kept = jnp.zeros(0, x.dtype) if isinstance(w, FrozenWeight) else x
    return grouped_product(x, w, sizes), (kept, w, sizes)


def _backward(residuals, dy):
    x, w, sizes = residuals
    dy = dy.astype(x.dtype)
    dx = _rows_product(dy, array(w, x.dtype), sizes, transpose=True)
    dw = None if isinstance(w, FrozenWeight) else _weights_product(x, dy, sizes).astype(w.dtype)
    return dx, dw, None


grouped_product.defvjp(_forward, _backward)


def _rows_product(x, w, sizes, transpose=False):
    """`grouped_product` with an array; with `transpose`, of [G, N, K]."""
    return lax.platform_dependent(
        x,
        w,
        sizes,
        tpu=functools.partial(_rows_by_compiler, transpose=transpose),
        default=functools.partial(_rows_by_blocks, transpose=transpose),
    )


def _weights_product(x, dy, sizes):
    """Returns the sum of x[i]^T dy[i] over each group's rows, float32 [G, K, N]."""
    return lax.platform_dependent(
        x, dy, sizes, tpu=_weights_by_compiler, default=_weights_by_blocks
    )


def _rows_by_compiler(x, w, sizes, transpose):
    y = lax.ragged_dot(x, w.swapaxes(1, 2) if transpose else w, sizes)
    # The rows after the last group are unspecified.
    return jnp.where((jnp.arange(len(x)) < sizes.sum())[:, None], y, 0)


def _weights_by_compiler(x, dy, sizes):
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(),
    )
    return lax.ragged_dot_general(x, dy, sizes, numbers, preferred_element_type=jnp.float32)


def block_rows(rows: int, groups: int) -> int:
    """Returns the number of rows per block of the loop."""
    least, most = BLOCK_ROWS
    eighth = max(rows // (8 * groups), 1)
    return min(most, max(least, 1 << eighth.bit_length() - 1))  # a power of 2


def _over_blocks(sizes: Int[Array, " G"], block: int, step: Callable, carry: Any) -> Any:
    """Runs `step(carry, group, first row, remaining rows of the group)` for each block, in row
    order."""
    starts = jnp.cumsum(sizes) - sizes
    counts = -(-sizes // block)
    ends = jnp.cumsum(counts)

    def run(i, carry):
        group = jnp.searchsorted(ends, i, side="right").astype(jnp.int32)
        before = (i - (ends[group] - counts[group])) * block
        return step(carry, group, starts[group] + before, sizes[group] - before)

    return lax.fori_loop(0, ends[-1], run, carry)


def _padded(x: Float[Array, "M K"], block: int) -> Float[Array, "M_b K"]:
    """The rows, then a block of zeros, since the last block may reach beyond the rows."""
    return jnp.pad(x, ((0, block), (0, 0)))


def _own_rows(x: Float[Array, "b K"], count: Any) -> Float[Array, "b K"]:
    """The first `count` rows; zeros for the others, which belong to later groups."""
    return jnp.where((jnp.arange(len(x)) < count)[:, None], x, 0)


def _rows_by_blocks(x, w, sizes, transpose):
    block = block_rows(len(x), len(sizes))
    padded, equation = _padded(x, block), "bk,nk->bn" if transpose else "bk,kn->bn"

    def step(y, group, first, count):
        rows = _own_rows(lax.dynamic_slice_in_dim(padded, first, block), count)
        part = jnp.einsum(equation, rows, lax.dynamic_index_in_dim(w, group, keepdims=False))
        # Rows written after the group's last are zero, and later groups overwrite them.
        return lax.dynamic_update_slice_in_dim(y, part, first, 0)

    empty = jnp.zeros((len(padded), w.shape[1 if transpose else 2]), x.dtype)
    return _over_blocks(sizes, block, step, empty)[: len(x)]


def _weights_by_blocks(x, dy, sizes):
    block = block_rows(len(x), len(sizes))
    x, dy = _padded(x, block), _padded(dy, block)

    def step(dw, group, first, count):
        rows, d_rows = (lax.dynamic_slice_in_dim(array, first, block) for array in (x, dy))
        part = jnp.einsum(
            "bk,bn->kn", _own_rows(rows, count), d_rows, preferred_element_type=jnp.float32
        )
        return dw.at[group].add(part)

    return _over_blocks(
        sizes, block, step, jnp.zeros((len(sizes), x.shape[1], dy.shape[1]), jnp.float32)
    )
