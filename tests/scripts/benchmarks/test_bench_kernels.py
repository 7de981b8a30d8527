"""The kernels' benchmark: every peer computes the same attention, work is counted by the mask, and
files are written."""

import functools
import json
import shlex
import sys
import types

import jax
import numpy as np
import pytest
import torch
from jax._src.cudnn import fused_attention_stablehlo

from model.attention import choice
from scripts.benchmarks.bench_kernels import __main__ as bench_kernels
from scripts.benchmarks.bench_kernels import case as one_process
from scripts.benchmarks.bench_kernels.__main__ import Options, main
from scripts.benchmarks.bench_kernels.block import BLOCKS, Case, LeftOut, make_block
from scripts.benchmarks.bench_kernels.peers import ON_DEVICE, PEERS, splash
from trainer.options import parse

LENGTH = 128


@pytest.mark.parametrize("kind", BLOCKS)
def test_work_is_the_number_of_visible_pairs(kind):
    case = Case("ours", kind, LENGTH, False)
    assert case.visible_pairs() == make_block(case).mask().sum()
    forward, both = case.flops(), Case("ours", kind, LENGTH, True).flops()
    assert (forward, both) == (
        4 * 8 * 64 * case.visible_pairs(),
        14 * 8 * 64 * case.visible_pairs(),
    )


def dense(block):
    """out and gradients by the definition, in float64; queries that attend to nothing give
    zeros."""
    q, k, v, dout = (np.asarray(x, np.float64).swapaxes(1, 2) for x in block[:4])
    scores = np.where(block.mask(), q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e30))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    dweights = dout @ v.swapaxes(-1, -2)
    dscores = (
        weights * (dweights - (weights * dweights).sum(-1, keepdims=True)) * q.shape[-1] ** -0.5
    )
    results = (
        weights @ v,
        dscores @ k,
        dscores.swapaxes(-1, -2) @ q,
        weights.swapaxes(-1, -2) @ dout,
    )
    return [x.swapaxes(1, 2) for x in results]


@pytest.mark.parametrize("kind", ["diagonal", "strict", "full", "packed"])
@pytest.mark.parametrize("peer", [*ON_DEVICE["cpu"], "splash"])
def test_every_peer_computes_the_same(peer, kind):
    case = Case(peer, kind, LENGTH, backward=True, heads=2, kv_heads=2, head_dim=16)
    block = make_block(case)
    # Peers differ for a query that attends to nothing: it gets a zero cotangent and is not
    # compared.
    sees = block.mask().any(-1)
    block = block._replace(dout=block.dout * sees[:, None, None])
    try:
        run = splash(case, block, interpret=True) if peer == "splash" else PEERS[peer](case, block)
    except LeftOut as why:
        pytest.skip(str(why))
    out, gradients = run()
    for actual, expected in zip((out, *gradients), dense(block), strict=True):
        rows = sees if actual is out else slice(None)
        np.testing.assert_allclose(
            np.asarray(actual)[:, rows], expected[:, rows], atol=1e-5 * np.abs(expected).max()
        )


@pytest.mark.slow
def test_documented_accelerator_commands_parse(repository):
    rows = json.loads((repository / "docs/results/accelerators.json").read_text(encoding="utf-8"))[
        "rows"
    ]
    commands = [
        words
        for row in rows.values()
        if "scripts.benchmarks.bench_kernels" in (words := shlex.split(row.get("command", "")))
    ]
    assert len(commands) == 2 and all(
        parse(Options, words[3:]).dtype == "bfloat16" for words in commands
    )


def test_the_table_and_the_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_kernels, "measure", one_process.measure_all)  # without processes
    monkeypatch.setitem(one_process.PRODUCTS, "cpu", ((1, 256, 256, 256),))
    arguments = "--lengths 64 --blocks diagonal --peers ours jax-cudnn --heads 2 --head_dim 8"
    arguments += f" --rounds 1 --repeats 1 --output {tmp_path}"
    assert main(arguments.split()) == 0
    result = json.loads((tmp_path / "bench_kernels.json").read_text())
    ours = [row for row in result["rows"] if row["peer"] == "ours"]
    assert [row["pass"] for row in ours] == ["forward", "forward+backward"]
    for row in ours:
        work = (4 if row["pass"] == "forward" else 14) * 64 * 65 // 2 * 2 * 8
        assert row["tflops"] == pytest.approx(work / row["seconds"] / 1e12)
        assert row["share_of_matmul"] == pytest.approx(
            work / row["seconds"] / result["device"]["matmul_flops"]
        )
        assert row["peak_mib"] >= 0
    assert all("left_out" in row for row in result["rows"] if row["peer"] == "jax-cudnn"), (
        "cuDNN needs a GPU"
    )
    table = (tmp_path / "bench_kernels.txt").read_text()
    assert table.strip() == capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        ("ours-triton", "the kernel gpu needs an NVIDIA GPU, found cpu"),
        ("ours-any-order", "any_order needs a Hopper GPU, found cpu"),
        ("flash-attn-3", "FlashAttention-3 needs a Hopper GPU, found cpu"),
        ("jax-cudnn", "cuDNN needs an NVIDIA GPU, found cpu"),
    ],
)
def test_peers_that_need_a_gpu_are_left_out_without_one(peer, reason):
    case = Case(peer, "diagonal", 256, backward=False)
    with pytest.raises(LeftOut, match=reason):
        PEERS[peer](case, make_block(case))


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Makes the peers take the CPU for a GPU, with stand-ins for cuDNN and FlashAttention-3 that
    compute by the definition."""
    monkeypatch.setattr(choice, "HOPPER", ("cpu",))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        functools.partial(cudnn_unpacked, jax.nn.dot_product_attention),
    )
    monkeypatch.setattr(fused_attention_stablehlo, "dot_product_attention", cudnn_packed)
    flash = types.ModuleType("flash_attn_interface")
    flash.flash_attn_func, flash.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash)


def cudnn_unpacked(xla, q, k, v, *, is_causal, implementation):
    """As jax.nn.dot_product_attention; the causal mask is aligned at the first key."""
    assert implementation == "cudnn" and q.dtype == "float16"
    return xla(
        *(x.astype("float32") for x in (q, k, v)), is_causal=is_causal, implementation="xla"
    ).astype("float16")


def cudnn_packed(
    q, k, v, bias, mask, q_seqlen, kv_seqlen, q_offsets, kv_offsets, *, scale, mask_type
):
    """As JAX's packed call of cuDNN, which gets each document's tokens from the offsets."""
    assert (
        bias is None and mask is None and mask_type.name == "PADDING_CAUSAL" and q.shape == k.shape
    )
    assert q_seqlen.dtype == q_offsets.dtype == "int32" and q_offsets.shape == (
        1,
        q_seqlen.shape[1] + 1,
    )
    assert q_seqlen is kv_seqlen
    token = np.arange(q.shape[1])
    documents = [
        jax.numpy.searchsorted(offsets[0], token, side="right")
        for offsets in (q_offsets, kv_offsets)
    ]
    seen = (documents[0][:, None] == documents[1][None]) & (token[:, None] >= token[None])
    q, k, v = (x.astype("float32") for x in (q, k, v))
    scores = jax.numpy.where(
        seen, jax.numpy.einsum("bqhd,bkhd->bhqk", q, k) * scale, -jax.numpy.inf
    )
    return jax.numpy.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).astype("float16")


def flash_attn_func(q, k, v, *, causal):
    """As FlashAttention-3's function, [B, T, H, D]; the causal mask is aligned at the last key, and
    a query without keys gives zero."""
    assert q.dtype == torch.float16 and q.is_contiguous()
    queries, keys = q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    seen = torch.ones(queries, keys, dtype=torch.bool)
    seen = seen.tril(keys - queries) if causal else seen
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * q.shape[3] ** -0.5
    weights = scores.masked_fill(~seen, -1e30).softmax(-1).masked_fill(~seen, 0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.float()).half()


def flash_attn_varlen_func(q, k, v, starts, kv_starts, longest, kv_longest, *, causal):
    """As FlashAttention-3's function, [T, H, D], for documents that begin at `starts`; it returns
    the lse, as its earlier releases do."""
    assert starts.dtype == torch.int32 and longest == kv_longest == int(starts.diff().max())
    documents = zip(*(x.split(starts.diff().tolist()) for x in (q, k, v)), strict=True)
    assert torch.equal(starts, kv_starts)
    return torch.cat(
        [flash_attn_func(*(x[None] for x in document), causal=causal)[0] for document in documents]
    ), None


@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("kind", ["diagonal", "strict", "full", "packed"])
@pytest.mark.parametrize("peer", ["jax-cudnn", "flash-attn-3"])
def test_a_gpu_peer_is_called_for_the_same_attention(peer, kind, kv_heads, on_a_gpu):
    """With stand-ins in float16, on inputs exact in float16; results are rounded to it."""
    case = Case(
        peer, kind, LENGTH, backward=True, heads=2, kv_heads=kv_heads, head_dim=16, dtype="float16"
    )
    block = make_block(case)
    sees = block.mask().any(-1)
    rounded = (
        x.astype(np.float16).astype(np.float32)
        for x in (*block[:3], block.dout * sees[:, None, None])
    )
    block = block._replace(**dict(zip(("q", "k", "v", "dout"), rounded, strict=True)))
    if (peer, kind, kv_heads) == ("jax-cudnn", "packed", 1):
        with pytest.raises(LeftOut, match="with the number of query heads"):
            PEERS[peer](case, block)
        return
    out, gradients = PEERS[peer](case, block)()
    grouped = block._replace(
        **{name: np.repeat(getattr(block, name), 2 // kv_heads, 2) for name in "kv"}
    )
    out_expected, dq, *dkv = dense(grouped)
    dkv = [x.reshape(*x.shape[:2], kv_heads, 2 // kv_heads, -1).sum(3) for x in dkv]
    for actual, expected in zip((out, *gradients), (out_expected, dq, *dkv), strict=True):
        rows = sees if actual is out else slice(None)
        np.testing.assert_allclose(
            np.asarray(actual)[:, rows], expected[:, rows], atol=1e-3 * np.abs(expected).max()
        )


@pytest.mark.parametrize(
    ("peer", "name"), [("jax-cudnn", "cuDNN"), ("flash-attn-3", "FlashAttention-3")]
)
def test_a_gpu_peer_is_left_out_where_it_lacks_a_feature(peer, name, on_a_gpu, monkeypatch):
    empty = Case(peer, "empty", LENGTH, backward=False, dtype="float16")
    single = Case(peer, "full", LENGTH, backward=False)
    with pytest.raises(LeftOut, match=f"{name} has no mask that hides everything"):
        PEERS[peer](empty, make_block(empty))
    with pytest.raises(LeftOut, match=f"{name}.* has no float32"):
        PEERS[peer](single, make_block(single))
    if peer == "flash-attn-3":
        monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
        with pytest.raises(
            LeftOut, match=r"FlashAttention-3 cannot be imported: .*flash_attn_interface"
        ):
            PEERS[peer](empty, make_block(empty))
