"""The TPU kernel in the TPU interpret mode against dense float64 attention: out, lse and all gradients, within 1e-5.

Two shards attend as in a ring, without the ring: every block of queries meets every block of keys, the second one on top of the
first (`carry`). Contiguous shards give diagonal, full and empty blocks, striped ones causal and strictly causal blocks.
"""
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from model.attention import AttentionPartial, Mask, TokenCoords
from model.attention.kernels.tpu import Tpu
from model.attention.layout import permutation

from .dense import dense_attention
from .test_exactness import check

# head size -> query heads, key heads, length: irregular ones are padded inside, to tiles of 128.
SHAPES = {64: (4, 2, 500), 80: (2, 2, 512), 96: (3, 1, 500), 100: (2, 1, 500), 128: (4, 1, 768), 256: (2, 2, 300)}
MASKS = [Mask(), Mask(causal=False), Mask(window=50), Mask(causal=False, window=150)]
KERNEL = Tpu(query_tile=128, key_tile=128, interpret=pltpu.InterpretParams())


def documents(kind, length):
    """index and segment_ids [2, length]: one document, or several with padding between and behind them."""
    index = np.tile(np.arange(length, dtype=np.int32), (2, 1))
    segments = np.ones((2, length), np.int32)
    if kind == "packed":
        for row, ends in enumerate(((97, 100, 270, length - 20), (160, length - 150))):
            segments[row] = np.searchsorted(ends, np.arange(length), side="right") + 1
            segments[row, ends[-1]:] = 0
        segments[0, 110:130] = 0
    return index, segments


@functools.cache
def inputs(head_dim, seed=0):
    rng = np.random.default_rng(seed)
    query_heads, kv_heads, length = SHAPES[head_dim]
    heads = (query_heads, kv_heads, kv_heads, query_heads)
    return [rng.standard_normal((2, length, h, head_dim), dtype=np.float32) for h in heads]


@functools.cache
def compiled(mask, kernel=KERNEL):
    """forward, forward on top of a carry, backward: jitted (shapes, coordinates and packing are runtime inputs)."""
    def options(q):
        return {"mask": mask, "scale": q.shape[-1] ** -0.5}

    return (jax.jit(lambda q, *block: kernel.forward(q, *block, **options(q))),
            jax.jit(lambda carry, q, *block: kernel.forward(q, *block, carry=carry, **options(q))),
            jax.jit(lambda q, *block: kernel.backward(q, *block, **options(q))))


def attend(q, k, v, dout, coords, mask):
    """out, lse, dq, dk, dv of two shards, by four kernel calls each way."""
    forward, extend, backward = compiled(mask)
    half = q.shape[1] // 2
    shards = [slice(0, half), slice(half, None)]
    blocks = [(k[:, s], v[:, s]) for s in shards]
    places = [TokenCoords(*(x[:, s] for x in coords)) for s in shards]
    parts = []
    for s, place in zip(shards, places, strict=True):
        partial = forward(q[:, s], *blocks[0], place, places[0])
        parts.append(extend(partial, q[:, s], *blocks[1], place, places[1]))
    out = np.concatenate([part.out for part in parts], 1)
    lse = np.concatenate([part.lse for part in parts], 2)
    delta = np.einsum("bthd,bthd->bht", out, dout)
    gradients = [[backward(q[:, s], *block, dout[:, s], lse[:, :, s], delta[:, :, s], place, other)
                  for block, other in zip(blocks, places, strict=True)] for s, place in zip(shards, places, strict=True)]
    dq = np.concatenate([sum(np.asarray(g[0]) for g in row) for row in gradients], 1)
    dk, dv = (np.concatenate([np.asarray(gradients[0][j][i]) + np.asarray(gradients[1][j][i]) for j in range(2)], 1)
              for i in (1, 2))
    return out, lse, dq, dk, dv


def check_case(head_dim, mask, layout, kind):
    arrays = inputs(head_dim)
    length = arrays[0].shape[1]
    expected = dense_attention(*arrays[:3], *documents(kind, length), arrays[3], causal=mask.causal, window=mask.window)
    order = permutation(length, 2, layout)
    coords = TokenCoords(*(x[:, order] for x in documents(kind, length)))
    check(attend(*(x[:, order] for x in arrays), coords, mask), expected, order)


EVERYTHING = list(itertools.product(SHAPES, MASKS, ("contiguous", "striped"), ("one", "packed")))
# Each head size, mask, layout and packing at least once; what shares a head size and a mask shares its compiled functions.
COVERING = [
    (64, MASKS[0], "contiguous", "packed"), (64, MASKS[0], "striped", "one"), (80, MASKS[2], "contiguous", "packed"),
    (96, MASKS[1], "striped", "packed"), (100, MASKS[0], "striped", "packed"), (128, MASKS[0], "contiguous", "one"),
    (128, MASKS[0], "striped", "packed"), (256, MASKS[3], "contiguous", "packed"),
]


@pytest.mark.parametrize(("head_dim", "mask", "layout", "kind"), COVERING, ids=str)
def test_kernel_is_exact(head_dim, mask, layout, kind):
    check_case(head_dim, mask, layout, kind)
