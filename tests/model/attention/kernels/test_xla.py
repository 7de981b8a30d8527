"""The XLA kernel's memory on CPUs is linear in the length: read from the compiler's plan, without
running it."""

import functools

import jax
import jax.numpy as jnp
import pytest

from model.attention import Keys, Mask, Queries, TokenCoords, get_kernel
from model.attention.blocks import BackwardInputs

HEADS, HEAD_DIM = 4, 16


@functools.cache
def planned_bytes(which, length):
    """Returns the temporary and output bytes that the compiler plans for one pass."""
    kernel = get_kernel("xla", query_tile=128, key_tile=128)
    vectors = jax.ShapeDtypeStruct((1, length, HEADS, HEAD_DIM), jnp.float32)
    statistics = jax.ShapeDtypeStruct((1, HEADS, length), jnp.float32)
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def run(arrays, coords):
        q, k, v, *saved = arrays
        blocks = (
            Queries(q, coords),
            Keys(k, v, coords),
            *([BackwardInputs(*saved)] if saved else []),
        )
        return getattr(kernel, which)(*blocks, mask=Mask(), scale=0.25)

    arrays = {"forward": [vectors] * 3, "backward": [vectors] * 4 + [statistics] * 2}[which]
    plan = jax.jit(run).lower(arrays, TokenCoords(tokens, tokens)).compile().memory_analysis()
    return plan.temp_size_in_bytes + plan.output_size_in_bytes


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_memory_is_linear_in_length(which):
    """From 2K to 32K tokens it grows at most 16 times; scores of T x T would grow 256 times, to 16
    GiB at 32K."""
    short, long = planned_bytes(which, 2048), planned_bytes(which, 32768)
    assert long <= 16 * short
    arrays = 4 * HEADS * HEAD_DIM * 32768  # one float32 array shaped like q
    assert long <= 20 * arrays
