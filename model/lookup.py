"""Rows of a table, such as a vocabulary's embeddings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .frozen import FrozenWeight, Plain, Weight
from .memory.chunked import over_chunks

BLOCK = 512
"""Tokens whose equal ids are joined by one product."""


def rows(
    table: Weight, ids: Int[Array, "B T"], learned: Bool[Array, "B T"]
) -> Float[Array, "B T E"]:
    """Returns rows of a possibly frozen table, float32; the table itself is not cast.

    Args:
      learned: the tokens whose gradient reaches the table.
    """
    if isinstance(table, FrozenWeight):
        assert isinstance(table, Plain), "tables are never quantized"
        return table.value[ids].astype(jnp.float32)
    return _rows(table, ids, learned)


@jax.custom_vjp
def _rows(
    table: Float[Array, "V E"], ids: Int[Array, "B T"], learned: Bool[Array, "B T"]
) -> Float[Array, "B T E"]:
    """Returns rows of a table. The gradient is bitwise repeatable: on GPUs, where a scatter adds
    the tokens of a repeated id in whatever order threads arrive, it is `sums_by_block`."""
    return table[ids]


def _rows_backward(residuals, gradient):
    ids, learned, table = residuals
    zeros = jnp.zeros((len(table), gradient.shape[-1]), gradient.dtype)
    ids = jnp.where(learned, ids, jnp.iinfo(ids.dtype).max)  # outside the table: dropped
    arrays = ids.reshape(1, -1), gradient.reshape(1, -1, gradient.shape[-1])
    sums = lax.platform_dependent(zeros, *arrays, cuda=sums_by_block, default=_sums_by_scatter)
    return sums, None, None


_rows.defvjp(
    lambda table, ids, learned: (table[ids], (ids, learned, jnp.zeros((len(table), 0)))),
    _rows_backward,
)


def _sums_by_scatter(
    zeros: Float[Array, "V E"], ids: Int[Array, "1 T"], values: Float[Array, "1 T E"]
) -> Float[Array, "V E"]:
    return zeros.at[ids].add(values, mode="drop")


def sums_by_block(
    zeros: Float[Array, "V E"], ids: Int[Array, "1 T"], values: Float[Array, "1 T E"]
) -> Float[Array, "V E"]:
    """Returns for each id the sum of its values, in a fixed order.

    A block's values of equal ids are summed by a product, and then every id is added once, so
    nothing depends on the order of threads. XLA's own way (xla_gpu_exclude_nondeterministic_ops)
    sorts single numbers, all T E of them.
    """

    def add(total, block):
        ids, values = (x[0] for x in block)
        position = jnp.arange(len(ids))
        same = ids[:, None] == ids
        sums = jnp.dot(same.astype(values.dtype), values, precision="highest")
        # All but an id's first token go to rows outside the table, each to another one: dropped.
        rows = jnp.where(jnp.argmax(same, 1) == position, ids, len(total) + position)
        return total.at[rows].add(sums, mode="drop", unique_indices=True), ()

    return over_chunks(add, zeros, (ids, values), min(BLOCK, ids.shape[1]))[0]
