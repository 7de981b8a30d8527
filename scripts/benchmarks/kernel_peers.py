"""Attention of one block by ours and by others: what scripts.benchmarks.bench_kernels compares, each behind the same call.

A peer takes a Case and its arrays and gives a function that runs one pass, waits for it and returns its results: out, or (out,
(dq, dk, dv)), like the arrays. It raises LeftOut where it cannot.
"""
from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

MEMORY = Path("/proc/meminfo")
BLOCKS = ("diagonal", "strict", "full", "packed", "empty")
DOCUMENTS = 16


class LeftOut(Exception):
    """Why a peer has no figure here."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement: which peer, which block of queries against which block of keys, and whether backward runs as well.

    Attributes:
      block: a kind of BLOCKS, all of them causal. `diagonal`: a block against itself; `strict`: against one whose tokens stand
        one place later (an upper round of a striped ring); `full`: against earlier tokens; `empty`: against later ones;
        `packed`: diagonal, DOCUMENTS documents of random lengths.
    """

    peer: str
    block: str
    length: int
    backward: bool
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    kernel: str = "auto"
    tile: int = 512
    repeats: int = 3

    def document_lengths(self) -> np.ndarray:
        """Lengths of the block's documents: they add up to `length`."""
        if self.block != "packed":
            return np.array([self.length])
        cuts = np.random.default_rng(0).choice(np.arange(1, self.length), DOCUMENTS - 1, replace=False)
        return np.diff(np.concatenate([[0], np.sort(cuts), [self.length]]))

    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees: causal work is counted once, hidden pairs not at all."""
        n = self.document_lengths().astype(object)
        pairs = {"strict": n * (n - 1) // 2, "full": n * n, "empty": n * 0}.get(self.block, n * (n + 1) // 2)
        return int(pairs.sum())

    def flops(self) -> float:
        """Two matrix products of the visible pairs forward, five more backward (the scores are made again)."""
        return 2.0 * self.head_dim * self.heads * self.visible_pairs() * (7 if self.backward else 2)


class Block(NamedTuple):
    """Arrays of a case on the host: q, dout [1, T, Hq, D], k, v [1, T, Hkv, D]; coordinates int32 [1, T]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    q_index: np.ndarray
    kv_index: np.ndarray
    segment_ids: np.ndarray

    def mask(self) -> np.ndarray:
        """The block's mask, dense: bool [T, T]."""
        same = self.segment_ids[0][:, None] == self.segment_ids[0][None]
        return same & (self.q_index[0][:, None] >= self.kv_index[0][None])


def make_block(case: Case) -> Block:
    """Random vectors and the coordinates of the case's kind of block."""
    rng, length = np.random.default_rng(0), case.length
    index = np.arange(length, dtype=np.int32)[None]
    q_index, kv_index = {
        "strict": (2 * index, 2 * index + 1), "full": (index + length, index), "empty": (index, index + length),
    }.get(case.block, (index, index))  # fmt: skip
    segments = np.repeat(np.arange(1, len(case.document_lengths()) + 1, dtype=np.int32), case.document_lengths())[None]
    query, key = (1, length, case.heads, case.head_dim), (1, length, case.kv_heads, case.head_dim)
    vectors = (rng.standard_normal(shape, dtype=np.float32) for shape in (query, key, key, query))
    return Block(*vectors, q_index, kv_index, segments)


def refuse_dense(case: Case, copies: int) -> None:
    """Leaves a peer out whose T x T arrays would not fit the host, before it swaps or kills."""
    needed, free = copies * 4 * case.heads * case.length**2, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if MEMORY.exists():  # Linux knows better: what caches hold can be had
        free = int(re.search(r"MemAvailable:\s+(\d+) kB", MEMORY.read_text()).group(1)) * 1024
    if needed > 0.7 * free:
        raise LeftOut(f"its T x T scores need about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free")


def _jax_pass(case: Case, attention: Callable, arrays: tuple, extra: tuple = ()) -> Callable:
    """One compiled pass of attention(q, k, v, *extra). `extra` are arguments, so that no compiler folds them away."""
    import jax
    import jax.numpy as jnp

    def forward(q, k, v, dout, *extra):
        del dout
        return attention(q, k, v, *extra)

    def forward_backward(q, k, v, dout, *extra):
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, *extra), q, k, v)
        return out, pull(dout)

    args = (*(jnp.asarray(x, case.dtype) for x in arrays), *jax.tree.map(jnp.asarray, extra))
    compiled = jax.jit(forward_backward if case.backward else forward).lower(*args).compile()
    return lambda: jax.block_until_ready(compiled(*args))


def ours(case: Case, block: Block) -> Callable:
    from model.attention import TokenCoords, attend, get_kernel

    kernel = get_kernel(case.kernel, query_tile=case.tile, key_tile=case.tile)

    def attention(q, k, v, q_coords, kv_coords):
        return attend(q, k, v, q_coords, kv_coords, schedule="local", kernel=kernel, axis="sequence", size=1)[0]

    coords = (TokenCoords(block.q_index, block.segment_ids), TokenCoords(block.kv_index, block.segment_ids))
    return _jax_pass(case, attention, block[:4], coords)


def torch_sdpa(case: Case, block: Block) -> Callable:
    try:
        import torch
    except ImportError as error:
        raise LeftOut("torch is not installed") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    dtype = getattr(torch, case.dtype)
    q, k, v, dout = (torch.from_numpy(x).to(device, dtype).transpose(1, 2).contiguous() for x in block[:4])
    options = {"enable_gqa": case.heads != case.kv_heads, "is_causal": case.block == "diagonal"}
    if case.block not in ("diagonal", "full"):
        options["attn_mask"] = torch.from_numpy(block.mask()).to(device)
    for x in (q, k, v):
        x.requires_grad_(case.backward)

    def run():
        for x in (q, k, v):
            x.grad = None
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        if case.backward:
            out.backward(dout)
        if device == "cuda":
            torch.cuda.synchronize()
        out, *gradients = (x.detach().transpose(1, 2) for x in (out, q.grad, k.grad, v.grad) if x is not None)
        return (out, tuple(gradients)) if case.backward else out

    return run


def jax_dot_product(case: Case, block: Block, implementation: str) -> Callable:
    import jax

    if implementation == "xla" and jax.default_backend() == "cpu":
        refuse_dense(case, copies=4 if case.backward else 2)
    causal, masked = case.block == "diagonal", case.block not in ("diagonal", "full")

    def attention(q, k, v, *mask):
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask[0] if mask else None, is_causal=causal, implementation=implementation)

    return _jax_pass(case, attention, block[:4], (block.mask()[None, None],) if masked else ())


def splash(case: Case, block: Block, interpret: bool = False) -> Callable:
    """JAX's TPU kernel. Its mask is static, its documents are not."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    shape = (case.length, case.length)
    masks = {"full": splash_attention_mask.FullMask(shape), "strict": splash_attention_mask.CausalMask(shape, offset=-1)}
    if case.block == "empty":
        raise LeftOut("splash attention takes no mask that hides everything")
    mask = masks.get(case.block, splash_attention_mask.CausalMask(shape))
    tile = min(512, case.length)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq",
             "block_kv_dq")
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * case.heads), head_shards=1, q_seq_shards=1, interpret=interpret,
        block_sizes=splash_attention_kernel.BlockSizes(**dict.fromkeys(names, tile)))

    def attention(q, k, v, segments):
        ids = splash_attention_kernel.SegmentIds(segments[0], segments[0])
        q, k, v = (x[0].swapaxes(0, 1) for x in (q * case.head_dim**-0.5, k, v))
        return kernel(q, k, v, segment_ids=ids).swapaxes(0, 1)[None]

    return _jax_pass(case, attention, block[:4], (block.segment_ids,))


def ringattention_package(case: Case, block: Block) -> Callable:
    """The package of Ring Attention's authors, on a ring of one device."""
    try:
        from ringattention import ringattention
    except (ImportError, AttributeError) as error:  # its releases read jax.lib.xla_bridge, which newer JAX has not
        raise LeftOut(f"ringattention cannot be imported: {error}") from error
    import jax
    from jax.sharding import PartitionSpec

    if case.block in ("strict", "empty"):
        raise LeftOut("ringattention's blocks are causal or full")
    if case.heads != case.kv_heads:
        raise LeftOut("ringattention has as many key heads as query heads")
    tile = min(512, case.length)
    options = {
        "causal_block_size": None if case.block == "full" else 1, "query_chunk_size": tile, "key_chunk_size": tile,
        "deterministic": True, "dropout_rng": None, "attn_pdrop": 0.0, "dtype": jax.numpy.dtype(case.dtype), "precision": None,
        "policy": jax.checkpoint_policies.nothing_saveable, "prevent_cse": False,
    }  # fmt: skip
    mesh = jax.make_mesh((1,), ("sequence",))

    def attention(q, k, v, segments):
        local = lambda q, k, v, segments: ringattention(q, k, v, None, segments, None, "sequence", True, options)  # noqa: E731
        every = PartitionSpec()
        return jax.shard_map(local, mesh=mesh, in_specs=(every,) * 4, out_specs=every, check_vma=False)(q, k, v, segments)

    return _jax_pass(case, attention, block[:4], (block.segment_ids,))


PEERS: dict[str, Callable[[Case, Block], Callable]] = {
    "ours": ours,
    "torch-sdpa": torch_sdpa,
    "jax-xla": lambda case, block: jax_dot_product(case, block, "xla"),
    "jax-cudnn": lambda case, block: jax_dot_product(case, block, "cudnn"),
    "splash": splash,
    "ringattention": ringattention_package,
}
# Which of them can run on which kind of device.
ON_DEVICE = {
    "cpu": ("ours", "torch-sdpa", "jax-xla", "ringattention"),
    "gpu": ("ours", "torch-sdpa", "jax-cudnn", "jax-xla", "ringattention"),
    "tpu": ("ours", "splash", "jax-xla", "ringattention"),
}
