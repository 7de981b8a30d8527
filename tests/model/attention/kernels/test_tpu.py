"""The TPU kernel in TPU interpret mode against dense float64 attention: out, lse and all gradients,
within 1e-5.

Two shards attend as in a ring, without the ring: every query block attends to every key block, each
on top of earlier results (`so_far`). Contiguous shards give diagonal, full and empty blocks,
striped ones causal and strictly causal blocks.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from model.attention import AttentionOp, Keys, Mask, Queries, TokenCoords
from model.attention.blocks import BackwardInputs, StackedKeys
from model.attention.kernels import tpu_options
from model.attention.kernels.padding import tile_size
from model.attention.kernels.tpu import TpuKernel
from model.attention.kernels.tpu_options import LANES, VMEM, tiles_that_fit
from model.attention.layout import permutation
from tests.model.attention.cases import empty
from tests.model.attention.dense import dense_attention
from tests.model.attention.test_exactness import check

# head size -> (rows, query heads, key heads, length): the kernel pads irregular lengths to tiles
# of 128.
SHAPES = {
    64: (2, 2, 1, 330),
    80: (1, 2, 2, 512),
    96: (1, 3, 1, 330),
    100: (1, 2, 1, 330),
    128: (1, 2, 1, 512),
    256: (1, 1, 1, 300),
}
MASKS = [Mask(), Mask(causal=False), Mask(window=50), Mask(causal=False, window=150)]
KERNEL = TpuKernel(query_tile=128, key_tile=128, fused=True, interpret=pltpu.InterpretParams())
# The backward pass as two kernels, as on devices that do not support one.
PAIR = dataclasses.replace(KERNEL, fused=False)


def documents(kind, rows, length):
    """Returns index and segment_ids [rows, length]: `one` document, or documents with padding
    behind them and, if `packed`, inside them."""
    index = np.tile(np.arange(length, dtype=np.int32), (2, 1))
    segments = np.ones((2, length), np.int32)
    if kind != "one":
        for row, ends in enumerate(((97, 100, 270, length - 20), (160, length - 150))):
            segments[row] = np.searchsorted(ends, np.arange(length), side="right") + 1
            segments[row, ends[-1] :] = 0
    if kind == "packed":
        segments[0, 110:130] = 0
    return index[:rows], segments[:rows]


@functools.cache
def inputs(head_dim, seed=0):
    rng = np.random.default_rng(seed)
    rows, query_heads, kv_heads, length = SHAPES[head_dim]
    heads = (query_heads, kv_heads, kv_heads, query_heads)
    return [rng.standard_normal((rows, length, h, head_dim), dtype=np.float32) for h in heads]


@functools.cache
def compiled(mask, kernel=KERNEL):
    """Returns extend and gradients, jitted (shapes, coordinates and packing are runtime inputs)."""

    def options(queries):
        return {"mask": mask, "scale": queries.q.shape[-1] ** -0.5}

    return (
        jax.jit(
            lambda so_far, queries, *blocks: kernel.extend(
                so_far, queries, *blocks, **options(queries)
            )
        ),
        jax.jit(
            lambda so_far, queries, *blocks: kernel.gradients(
                so_far, queries, *blocks, **options(queries)
            )
        ),
    )


def attend(q, k, v, dout, coords, mask, kernel=KERNEL):
    """Returns out, lse, dq, dk, dv of two shards, from four kernel calls in each direction."""
    extend, gradients = compiled(mask, kernel)
    half = q.shape[1] // 2
    shards = [slice(0, half), slice(half, None)]
    shard_coords = [jax.tree.map(lambda x, s=s: x[:, s], coords) for s in shards]
    blocks = [
        StackedKeys(np.stack([k[:, s], v[:, s]]), kv_coords)
        for s, kv_coords in zip(shards, shard_coords, strict=True)
    ]
    parts, dqs, dkvs = [], [], [0.0, 0.0]
    for s, q_coords in zip(shards, shard_coords, strict=True):
        queries = Queries(q[:, s], q_coords)
        partial = empty(q.shape[0], half, q.shape[2], q.shape[3])
        for block in blocks:
            partial = extend(partial, queries, block)
        parts.append(partial)
        delta = np.einsum("bthd,bthd->bht", partial.out, dout[:, s])
        dq = np.zeros_like(q[:, s])
        for j, block in enumerate(blocks):
            dq, dkv = gradients(dq, queries, block, BackwardInputs(dout[:, s], partial.lse, delta))
            dkvs[j] = dkvs[j] + dkv
        dqs.append(dq)
    return (
        np.concatenate([part.out for part in parts], 1),
        np.concatenate([part.lse for part in parts], 2),
        np.concatenate(dqs, 1),
        *np.concatenate(dkvs, 2),
    )


def check_case(head_dim, mask, layout, kind, kernel=KERNEL, length=None):
    """Compares with dense attention the head size's inputs, or their first `length` tokens."""
    arrays = [x[:, :length] for x in inputs(head_dim)]
    rows, length = arrays[0].shape[:2]
    row_documents = documents(kind, rows, length)
    expected = dense_attention(
        *arrays[:3],
        *row_documents,
        arrays[3],
        kernel.softcap,
        causal=mask.causal,
        window=mask.window,
    )
    order = permutation(length, 2, layout)
    coords = TokenCoords(*(x[:, order] for x in row_documents))
    check(attend(*(x[:, order] for x in arrays), coords, mask, kernel), expected, order)


def check_rounded(kernel, dtype):
    """Compares a single rank's attention, whose output is rounded by the kernel: two documents and
    padding, which sees no key, in rows of several tiles."""
    limit = 1e-5 if dtype == jnp.float32 else 5e-3
    rng, length = np.random.default_rng(0), 256
    q, k, v = (
        np.asarray(jnp.asarray(rng.standard_normal((1, length, heads, 80)), dtype))
        for heads in (2, 1, 1)
    )
    index = np.arange(length, dtype=np.int32)[None]
    segments = np.repeat([1, 2, 0], [90, 150, 16]).astype(np.int32)[None]
    expected_out, expected_lse, *_ = dense_attention(q, k, v, index, segments, q)
    coords = TokenCoords(index, segments)
    op = AttentionOp.create(80, schedule="ring", kernel=kernel, axis="sequence", size=1)
    blocks = Queries(q, coords), Keys(k, v, coords)
    rounded = jax.eval_shape(lambda: kernel.rounded_forward(*blocks, mask=Mask(), scale=1.0))
    assert rounded.out.dtype == dtype
    out, lse = jax.jit(op.forward)(*blocks)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    assert np.linalg.norm(out - expected_out) <= limit * np.linalg.norm(expected_out)
    assert not np.asarray(out)[segments == 0].any()
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=limit)


EVERYTHING = list(itertools.product(SHAPES, MASKS, ("contiguous", "striped"), ("one", "packed")))
# Each layout and packing; cases with the same head size and mask share compiled functions.
COVERING = [
    (64, MASKS[0], "contiguous", "packed"),
    (64, MASKS[0], "striped", "one"),
    (100, MASKS[2], "striped", "packed"),
]
PAIRED = [case for case in EVERYTHING if case[2:] == ("striped", "packed")]


@pytest.mark.parametrize(("head_dim", "mask", "layout", "kind"), COVERING, ids=str)
def test_kernel_is_exact(head_dim, mask, layout, kind):
    check_case(head_dim, mask, layout, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "mask", "layout", "kind"),
    [case for case in EVERYTHING if case not in COVERING],
    ids=str,
)
def test_kernel_is_exact_in_every_case(head_dim, mask, layout, kind):
    check_case(head_dim, mask, layout, kind)


@pytest.mark.parametrize(
    ("fused", "mask"),
    [
        (True, MASKS[0]),
        (False, MASKS[0]),
        *(
            pytest.param(fused, mask, marks=pytest.mark.slow)
            for fused in (True, False)
            for mask in MASKS[1:]
        ),
    ],
    ids=str,
)
def test_one_and_two_kernels_are_exact_with_parts_of_a_tile(fused, mask, monkeypatch):
    monkeypatch.setattr(tpu_options, "SUB_TILE", 128)
    check_case(
        80,
        mask,
        "striped",
        "packed",
        dataclasses.replace(KERNEL, query_tile=256, key_tile=256, fused=fused),
    )


@pytest.mark.parametrize("kernel", [KERNEL, PAIR], ids=["fused", "pair"])
def test_softcap_is_exact(kernel):
    check_case(64, MASKS[0], "striped", "packed", kernel.with_softcap(1.5))


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "mask", "layout", "kind"), PAIRED, ids=str)
def test_two_kernels_are_exact_in_every_case(head_dim, mask, layout, kind):
    check_case(head_dim, mask, layout, kind, PAIR)


def check_no_visible_keys(kernel):
    """Checks K and V as a pair. Queries that see no key: out 0, lse -inf, gradients 0, and no
    NaN."""
    q, k, v, dout = (x[:1, :130, :1] for x in inputs(96))
    q_coords = TokenCoords(*(x[:, :130] for x in documents("one", 1, 130)))
    kv_coords = TokenCoords(q_coords.index, 2 * q_coords.segment_ids)
    options = {"mask": Mask(), "scale": 1.0}
    blocks = Queries(q, q_coords), Keys(k, v, kv_coords)
    out, lse = jax.jit(functools.partial(kernel.forward, **options))(*blocks)
    assert (np.asarray(out) == 0).all() and np.isneginf(lse).all()
    saved = BackwardInputs(dout, lse, np.zeros_like(lse))
    for gradient in jax.jit(functools.partial(kernel.backward, **options))(*blocks, saved):
        assert (np.asarray(gradient) == 0).all()


def test_queries_that_see_no_key_are_zero():
    check_no_visible_keys(KERNEL)


def test_requested_tiles_are_reduced_to_fit():
    cases = (131072, 1024), (16384, 512), (500, 1024), (16256, 1024), (1280, 1024), (7, 64)
    assert [tile_size(*case, LANES) for case in cases] == [1024, 512, 512, 1024, 640, 128]
    assert tiles_that_fit(1024, 1024, 128, 2) == (1024, 1024)
    assert tiles_that_fit(1024, 1024, 256, 2) == (512, 1024)
    for vmem in VMEM.values():
        sizes = itertools.product((128, 256), (2, 4))
        assert {
            tiles_that_fit(1024, 1024, head_dim, itemsize, vmem) for head_dim, itemsize in sizes
        } == {(1024, 1024)}
