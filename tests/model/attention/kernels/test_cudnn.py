"""cuDNN's kernel, which cannot run here: the classification of blocks, the algebra around a
stand-in that computes what cuDNN computes, and the calls in a GPU's program."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import Keys, Mask, Queries, TokenCoords, get_kernel
from model.attention.blocks import BackwardInputs
from model.attention.kernels import CudnnKernel, cudnn
from model.attention.kernels.cudnn import (
    CAUSAL,
    FULL,
    NOTHING,
    OTHER,
    PADDED_CAUSAL,
    PADDED_FULL,
    block_form,
    output_with,
)
from model.attention.layout import permutation

from ..cases import documents, inputs, out_and_gradients
from ..dense import dense_attention

CAUSAL_MASK = Mask()
BOTH_WAYS = Mask(causal=False)


kind_of = jax.jit(lambda q, kv, mask: block_form(q, kv, mask).kind, static_argnums=2)


def shards(layout, size, segments):
    """Returns the coordinates of each shard of rows with these documents."""
    segments = np.asarray(segments, np.int32)
    index = np.tile(np.arange(segments.shape[1], dtype=np.int32), (len(segments), 1))
    order = permutation(segments.shape[1], size, layout)
    parts = (np.split(x[:, order], size, 1) for x in (index, segments))
    return [TokenCoords(*pair) for pair in zip(*parts, strict=True)]


ONE, PADDED, PACKED = [[1] * 16] * 2, [[1] * 16, [1] * 13 + [0] * 3], [[1] * 6 + [2] * 10] * 2


@pytest.mark.parametrize(
    ("layout", "segments", "mask", "kinds"),
    [
        ("contiguous", ONE, CAUSAL_MASK, [[CAUSAL, NOTHING], [FULL, CAUSAL]]),
        ("striped", ONE, CAUSAL_MASK, [[CAUSAL, PADDED_CAUSAL], [CAUSAL, CAUSAL]]),
        ("contiguous", ONE, BOTH_WAYS, [[FULL, FULL], [FULL, FULL]]),
        ("contiguous", PADDED, CAUSAL_MASK, [[CAUSAL, NOTHING], [PADDED_FULL, PADDED_CAUSAL]]),
        ("striped", PADDED, CAUSAL_MASK, [[PADDED_CAUSAL] * 2] * 2),
        ("contiguous", PACKED, CAUSAL_MASK, [[OTHER, NOTHING], [OTHER, CAUSAL]]),
        ("striped", PACKED, CAUSAL_MASK, [[OTHER] * 2] * 2),
        ("zigzag", ONE, CAUSAL_MASK, [[CAUSAL, OTHER], [OTHER, CAUSAL]]),
    ],
)
def test_blocks_are_classified(layout, segments, mask, kinds):
    """For the queries of each shard against the keys of each."""
    parts = shards(layout, 2, segments)
    classified = [[int(kind_of(q, kv, mask)) for kv in parts] for q in parts]
    assert classified == kinds


def test_a_block_that_only_looks_causal_is_not_given_to_cudnn():
    """A query that sees one key too few, two swapped tokens, a row that is all padding."""
    index = jnp.arange(8, dtype=jnp.int32)[None]
    ones = jnp.ones_like(index)
    whole = TokenCoords(index, ones)
    assert kind_of(whole, whole, CAUSAL_MASK) == CAUSAL
    later = TokenCoords(index.at[0, 5].set(9).at[0, 6].set(10).at[0, 7].set(11), ones)
    swapped = TokenCoords(index.at[0, 2].set(3).at[0, 3].set(2), ones)
    empty = TokenCoords(jnp.concatenate([index, index]), jnp.concatenate([ones, 0 * ones]))
    both = TokenCoords(jnp.concatenate([index, index]), jnp.concatenate([ones, ones]))
    for q, kv in ((whole, later), (swapped, swapped), (empty, both), (both, empty)):
        assert kind_of(q, kv, CAUSAL_MASK) == OTHER


def visible(q, k, lengths, mask):
    """Returns which keys each query sees under cuDNN's masks, aligned at the upper left: [B, Tq,
    Tk]."""
    rows, columns = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    seen = jnp.ones((q.shape[0], q.shape[1], k.shape[1]), bool)
    if mask.endswith("CAUSAL"):
        seen &= rows >= columns
    if mask.startswith("PADDING"):
        queries, keys = lengths
        seen &= (rows < queries[:, None, None]) & (columns < keys[:, None, None])
    return seen


def scores_of(q, k, lengths, mask, scale):
    k_repeated = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
    dims, options = "bqhd,bkhd->bhqk", {"precision": "highest", "preferred_element_type": "float32"}
    scores = jnp.einsum(dims, q, k_repeated, **options) * scale
    return jnp.where(visible(q, k, lengths, mask)[:, None], scores, -jnp.inf)


def stand_in_forward(q, k, v, lengths, mask, scale):
    """NaN where cuDNN leaves memory unwritten: rows of padding."""
    scores = scores_of(q, k, lengths, mask, scale)
    lse = jax.nn.logsumexp(scores, -1)
    weights = jnp.exp(scores - lse[..., None])
    v_repeated = jnp.repeat(v, q.shape[2] // k.shape[2], 2)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, v_repeated, precision="highest")
    return out.astype(q.dtype), jnp.where(jnp.isneginf(lse), jnp.nan, lse)


def stand_in_backward(q, k, v, lse, out, dout, lengths, mask, scale):
    """Computes delta from out and dout; NaN where cuDNN leaves memory unwritten."""
    group = q.shape[2] // k.shape[2]
    weights = jnp.exp(scores_of(q, k, lengths, mask, scale) - lse[..., None])
    delta = jnp.einsum("bqhd,bqhd->bhq", out, dout, precision="highest")
    dweights = jnp.einsum("bqhd,bkhd->bhqk", dout, jnp.repeat(v, group, 2), precision="highest")
    dscores = jnp.where(weights > 0, weights * (dweights - delta[..., None]), 0) * scale
    dq = jnp.einsum("bhqk,bkhd->bqhd", dscores, jnp.repeat(k, group, 2), precision="highest")
    dk, dv = (
        jnp.einsum("bhqk,bqhd->bkhd", x, y, precision="highest")
        .reshape(*k.shape[:3], group, -1)
        .sum(3)
        for x, y in ((dscores, q), (weights, dout))
    )
    if lengths:
        token = jnp.arange(q.shape[1])
        dq, dk, dv = (
            jnp.where((token < count[:, None])[..., None, None], x, jnp.nan)
            for x, count in zip((dq, dk, dv), (lengths[0], lengths[1], lengths[1]), strict=True)
        )
    return [dq, dk, dv]


@pytest.mark.parametrize(
    ("layout", "kind", "mask"),
    [
        ("striped", "one", CAUSAL_MASK),
        ("contiguous", "one", BOTH_WAYS),
        ("contiguous", "padded", CAUSAL_MASK),
        ("contiguous", "packed", CAUSAL_MASK),
    ],
)
def test_a_ring_of_two_is_exact_with_cudnns_blocks(layout, kind, mask, monkeypatch):
    """Out, lse and gradients, merged over the blocks, for grouped heads of 12."""
    called: list[str] = []
    for name, stand_in in (("forward", stand_in_forward), ("backward", stand_in_backward)):
        monkeypatch.setattr(
            cudnn,
            f"cudnn_{name}",
            lambda *args, stand_in=stand_in: called.append(args[-2]) or stand_in(*args),
        )
    length = 48
    index, segments = documents("packed" if kind == "packed" else "one", length)
    if kind == "padded":
        segments[1, 41:] = 0
    q, k, v, dout = inputs("4/1", length, head_dim=12)
    order = permutation(length, 2, layout)
    run = out_and_gradients("ring", 2, mask, layout, CudnnKernel(others=get_kernel("reference")))
    coords = TokenCoords(index[:, order], segments[:, order])
    got = run(*(x[:, order] for x in (q, k, v, dout)), coords)
    truth = dense_attention(
        q, k, v, index, segments, dout, causal=mask.causal, window=None, global_tokens=0
    )
    for name, result, expected in zip(("out", "lse", "dq", "dk", "dv"), got, truth, strict=True):
        permuted = expected[..., order] if name == "lse" else expected[:, order]
        np.testing.assert_allclose(result, permuted, rtol=1e-4, atol=2e-4, err_msg=name)
    assert set(called) == set(cudnn.MASKS.values())


@pytest.mark.parametrize("segments", [[1] * 48, [1] * 40 + [0] * 8, [1] * 20 + [2] * 28])
def test_a_rounded_forward_is_the_forward_rounded(segments, monkeypatch):
    """For a causal block, one with padding, and packed documents, which the other kernel serves."""
    monkeypatch.setattr(cudnn, "cudnn_forward", stand_in_forward)
    q, k, v, _ = (jnp.asarray(x, jnp.bfloat16) for x in inputs("4/1", 48, head_dim=12))
    coords = TokenCoords(*(np.tile(np.int32(x), (2, 1)) for x in (range(48), segments)))
    blocks, options = (Queries(q, coords), Keys(k, v, coords)), {"mask": CAUSAL_MASK, "scale": 0.25}
    kernel = CudnnKernel(others=get_kernel("reference"))
    rounded, exact = kernel.rounded_forward(*blocks, **options), kernel.forward(*blocks, **options)
    assert rounded.out.dtype == jnp.bfloat16 and exact.out.dtype == jnp.float32
    np.testing.assert_array_equal(rounded.out, exact.out.astype(jnp.bfloat16))
    np.testing.assert_array_equal(rounded.lse, exact.lse)


def test_output_with_gives_an_output_of_the_requested_delta():
    """In bfloat16, also where rows of dout are tiny or zero; rows that are not zero stay
    unchanged."""
    rng = np.random.default_rng(0)
    dout = jnp.asarray(rng.standard_normal((1, 64, 4, 128)), jnp.bfloat16)
    dout = dout.at[:, 1].multiply(1e-25).at[:, 2].set(0)
    delta = jnp.asarray(rng.standard_normal((1, 64, 4)), jnp.float32).at[:, 1].multiply(1e-25)
    out, used = jax.jit(output_with)(delta, dout)
    assert out.dtype == used.dtype == jnp.bfloat16
    sums = np.einsum("bthd,bthd->bth", np.float64(out), np.float64(used))
    np.testing.assert_allclose(sums, delta, rtol=2e-3)
    np.testing.assert_allclose(sums[:, 2], delta[:, 2], rtol=1e-6)
    kept = np.arange(64) != 2
    np.testing.assert_array_equal(used[:, kept], dout[:, kept])
    assert np.abs(np.float32(used[:, 2])).max() < 1e-17


def test_a_cuda_program_has_cudnns_calls():
    """Lowered for CUDA: each mask's call in both directions, with its operands, grouped heads and
    scale; statistics have whole rows."""
    batch, length, heads, kv_heads, size = 2, 256, 4, 2, 64
    coords = TokenCoords(*[jax.ShapeDtypeStruct((batch, length), jnp.int32)] * 2)
    q, k = (
        jax.ShapeDtypeStruct((batch, length, count, size), jnp.bfloat16)
        for count in (heads, kv_heads)
    )
    row = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    kernel = CudnnKernel()

    def both(queries, keys, saved):
        options = {"mask": CAUSAL_MASK, "scale": 0.125}
        return (
            kernel.forward(queries, keys, **options),
            kernel.backward(queries, keys, saved, **options),
        )

    traced = jax.jit(both).trace(
        Queries(q, coords), Keys(k, k, coords), BackwardInputs(q, row, row)
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"@__cudnn\$fmha(\w+)\(([^)]*)\) \{(.*?)\} : (.*)", text)
    operand_counts = {}
    for name, operands, attributes, types in calls:
        config = json.loads(
            re.search(r'backend_config = "(.*?[^\\])"', attributes)[1].replace("\\22", '"')
        )["cudnn_fmha_backend_config"]
        assert config["fmha_scale"] == 0.125 and config["sliding_window_length"] == 0
        operand_counts[name, config["mask_type"]] = len(operands.split(","))
        assert types.count(f"tensor<{batch}x{length}x{kv_heads}x{size}xbf16>") == 2
        assert f"tensor<{batch}x{heads}x{length}xf32>" in types
    assert operand_counts == {
        **{("Softmax", mask): 3 for mask in ("NO_MASK", "CAUSAL")},
        **{("Softmax", mask): 5 for mask in ("PADDING", "PADDING_CAUSAL")},
        **{("SoftmaxBackward", mask): 6 for mask in ("NO_MASK", "CAUSAL")},
        **{("SoftmaxBackward", mask): 8 for mask in ("PADDING", "PADDING_CAUSAL")},
    }
