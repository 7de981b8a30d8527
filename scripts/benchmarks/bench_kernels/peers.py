"""The attention kernels that bench_kernels compares, ours and others, behind one interface.

A peer is a function of a `Case` and its `Block` of arrays. It returns a function without arguments
that runs one pass, waits for it and returns the results in the arrays' shapes: out, or (out, (dq,
dk, dv)). It raises `LeftOut` if it does not support the case.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from scripts.benchmarks.bench_kernels.block import Block, Case, LeftOut, refuse_dense

# Tokens: the mask takes a quarter of a GiB. With masks of twice as many, packed rows of 32K took
# most of the GPU time.
DENSE_MASK_LIMIT = 16384


_PROGRAMS: dict[Case | None, Callable] = {}  # compiled in this process


def _jax_pass(
    case: Case, attention: Callable, arrays: tuple, extra: tuple = (), program: Case | None = None
) -> Callable:
    """Compiles one pass of attention(q, k, v, *extra); `extra` cannot be constant-folded.

    Args:
      program: identifies cases that share a compiled program; None if it is not shared.
    """
    import jax
    import jax.numpy as jnp

    def forward(q, k, v, dout, *extra):
        del dout
        return attention(q, k, v, *extra)

    def forward_backward(q, k, v, dout, *extra):
        out, backward = jax.vjp(lambda q, k, v: attention(q, k, v, *extra), q, k, v)
        return out, backward(dout)

    args = (*(jnp.asarray(x).astype(case.dtype) for x in arrays), *jax.tree.map(jnp.asarray, extra))
    compiled = (
        _PROGRAMS.get(program)
        or jax.jit(forward_backward if case.backward else forward).lower(*args).compile()
    )
    if program is not None:
        _PROGRAMS[program] = compiled
    return lambda: jax.block_until_ready(compiled(*args))


def ours(case: Case, block: Block) -> Callable:
    """This project's kernel, on one device."""
    import jax.numpy as jnp

    from model.attention import AttentionOp, Keys, Queries, TokenCoords, attend, get_kernel

    kernel = get_kernel(case.kernel, query_tile=case.tile, key_tile=case.tile, backward=case.order)
    op = AttentionOp.create(
        block[0].shape[-1], schedule="local", kernel=kernel, axis="sequence", size=1
    )

    def attention(q, k, v, q_coords, kv_coords):
        return attend(op, Queries(q, q_coords), Keys(k, v, kv_coords)).out

    coords = tuple(
        TokenCoords(jnp.asarray(index), jnp.asarray(block.segment_ids))
        for index in (block.q_index, block.kv_index)
    )
    # One program serves all kinds of blocks, which differ only in their coordinates.
    return _jax_pass(
        case, attention, block[:4], coords, program=dataclasses.replace(case, block="")
    )


def ours_triton(case: Case, block: Block) -> Callable:
    """Our Triton kernel for any NVIDIA GPU; on Hopper `auto` takes it for 32-bit operands."""
    import jax

    if jax.default_backend() != "gpu":
        raise LeftOut(f"the kernel gpu needs an NVIDIA GPU, found {jax.default_backend()}")
    return ours(dataclasses.replace(case, kernel="gpu"), block)


def ours_any_order(case: Case, block: Block) -> Callable:
    """Our kernel for Hopper GPUs with one backward kernel, which sums dq in arbitrary order."""
    import jax

    _refuse_but_hopper("any_order", case, jax.devices()[0].device_kind)
    return ours(dataclasses.replace(case, kernel="mosaic", order="any_order"), block)


def _refuse_but_hopper(peer: str, case: Case, device: str) -> None:
    """Raises LeftOut unless the operands have 16 bits and the device is a Hopper GPU."""
    from model.attention.choice import HOPPER

    if not any(name in device for name in HOPPER):
        raise LeftOut(f"{peer} needs a Hopper GPU, found {device}")
    if not _has_16_bits(case):
        raise LeftOut(f"{peer} has no {case.dtype}")


def _has_16_bits(case: Case) -> bool:
    return case.dtype in ("bfloat16", "float16")


def torch_sdpa(case: Case, block: Block) -> Callable:
    """torch.nn.functional.scaled_dot_product_attention."""
    torch = _torch()
    options = {"enable_gqa": case.heads != case.kv_heads, "is_causal": case.block == "diagonal"}
    if case.block not in ("diagonal", "full"):
        if case.length > DENSE_MASK_LIMIT:
            raise LeftOut(f"its dense mask is limited to {DENSE_MASK_LIMIT:,} tokens")
        options["attn_mask"] = torch.from_numpy(block.mask()).to(_torch_device())

    def attention(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return _torch_pass(
        case, attention, [x.swapaxes(1, 2) for x in block[:4]], lambda x: x.transpose(1, 2)
    )


def flash_attention_3(case: Case, block: Block) -> Callable:
    """FlashAttention-3 by its authors: the package flash_attn_3, module flash_attn_interface."""
    torch = _torch()
    _refuse_but_hopper(
        "FlashAttention-3",
        case,
        torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    )
    try:
        import flash_attn_interface
    except ImportError as error:
        raise LeftOut(f"FlashAttention-3 cannot be imported: {error}") from error
    if case.block == "empty":
        raise LeftOut("FlashAttention-3 has no mask that hides everything")
    causal, lengths = case.block != "full", case.document_lengths()
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(
        _torch_device()
    )

    def attention(q, k, v):
        if case.block == "packed":
            longest = int(lengths.max())
            out = flash_attn_interface.flash_attn_varlen_func(
                q[0], k[0], v[0], starts, starts, longest, longest, causal=causal
            )
            return _only_out(out)[None]
        # The causal mask is aligned at the last key: without that key, a query sees only earlier
        # keys.
        last = -1 if case.block == "strict" else None
        return _only_out(
            flash_attn_interface.flash_attn_func(q, k[:, :last], v[:, :last], causal=causal)
        )

    return _torch_pass(case, attention, block[:4], lambda x: x)


def _only_out(result):
    """The output alone; earlier releases also return lse."""
    return result[0] if isinstance(result, tuple) else result


def _torch():
    try:
        import torch
    except ImportError as error:
        raise LeftOut("torch is not installed") from error
    return torch


def _torch_device() -> str:
    return "cuda" if _torch().cuda.is_available() else "cpu"


def _torch_pass(
    case: Case, attention: Callable, arrays: Sequence[np.ndarray], back: Callable
) -> Callable:
    """One pass of attention(q, k, v) in torch; `back` restores the block's layout."""
    torch, device = _torch(), _torch_device()
    if device == "cpu":
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    q, k, v, dout = (
        torch.from_numpy(x).to(device, getattr(torch, case.dtype)).contiguous() for x in arrays
    )
    for x in (q, k, v):
        x.requires_grad_(case.backward)

    def run():
        for x in (q, k, v):
            x.grad = None
        out = attention(q, k, v)
        if case.backward:
            out.backward(dout)
        if device == "cuda":
            torch.cuda.synchronize()
        out, *gradients = (back(x.detach()) for x in (out, q.grad, k.grad, v.grad) if x is not None)
        return (out, tuple(gradients)) if case.backward else out

    return run


def jax_xla(case: Case, block: Block) -> Callable:
    """jax.nn.dot_product_attention compiled by XLA; masks other than causal and full are dense."""
    import jax

    if jax.default_backend() == "cpu":
        refuse_dense(case, copies=4 if case.backward else 2)
    causal, masked = case.block == "diagonal", case.block not in ("diagonal", "full")

    def attention(q, k, v, *mask):
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask[0] if mask else None, is_causal=causal, implementation="xla"
        )

    return _jax_pass(case, attention, block[:4], (block.mask()[None, None],) if masked else ())


def jax_cudnn(case: Case, block: Block) -> Callable:
    """cuDNN's attention through JAX, without a dense mask."""
    import jax
    import jax.numpy as jnp
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    if jax.default_backend() != "gpu":
        raise LeftOut(f"cuDNN needs an NVIDIA GPU, found {jax.default_backend()}")
    if not _has_16_bits(case):
        raise LeftOut(f"cuDNN's attention has no {case.dtype}")
    if case.block == "empty":
        raise LeftOut("cuDNN has no mask that hides everything")
    if case.block == "packed" and case.heads != case.kv_heads:
        raise LeftOut(
            "JAX computes the keys' document starts for cuDNN with the number of query heads"
        )
    lengths = case.document_lengths().astype(np.int32)[None]
    starts = np.concatenate([np.zeros((1, 1), np.int32), np.cumsum(lengths, 1, dtype=np.int32)], 1)

    def packed(q, k, v, lengths, starts):
        return cudnn.dot_product_attention(
            q,
            k,
            v,
            None,
            None,
            lengths,
            lengths,
            starts,
            starts,
            scale=case.head_dim**-0.5,
            mask_type=cudnn.MaskType.PADDING_CAUSAL,
        )

    def attention(q, k, v):
        if case.block == "strict":
            # The mask is aligned at the first key, so all queries but the first move back by one.
            out = jax.nn.dot_product_attention(
                q[:, 1:], k[:, :-1], v[:, :-1], is_causal=True, implementation="cudnn"
            )
            return jnp.pad(out, ((0, 0), (1, 0), (0, 0), (0, 0)))
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=case.block == "diagonal", implementation="cudnn"
        )

    return _jax_pass(
        case,
        *(
            (packed, block[:4], (lengths, starts))
            if case.block == "packed"
            else (attention, block[:4])
        ),
    )


def splash(case: Case, block: Block, interpret: bool = False) -> Callable:
    """JAX's TPU kernel splash attention. Its mask is static; documents are an argument."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    shape = (case.length, case.length)
    masks = {
        "full": splash_attention_mask.FullMask(shape),
        "strict": splash_attention_mask.CausalMask(shape, offset=-1),
    }
    if case.block == "empty":
        raise LeftOut("splash attention takes no mask that hides everything")
    mask = masks.get(case.block, splash_attention_mask.CausalMask(shape))
    tile: Any = min(512, case.length)
    names = (
        "block_q",
        "block_kv",
        "block_kv_compute",
        "block_q_dkv",
        "block_kv_dkv",
        "block_kv_dkv_compute",
        "block_q_dq",
        "block_kv_dq",
    )
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * case.heads),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
        block_sizes=splash_attention_kernel.BlockSizes(**dict.fromkeys(names, tile)),
    )

    def attention(q, k, v, segments):
        ids = splash_attention_kernel.SegmentIds(segments[0], segments[0])
        q, k, v = (x[0].swapaxes(0, 1) for x in (q * case.head_dim**-0.5, k, v))
        return kernel(q, k, v, segment_ids=ids).swapaxes(0, 1)[None]

    return _jax_pass(case, attention, block[:4], (block.segment_ids,))


PEERS: dict[str, Callable[[Case, Block], Callable]] = {
    "ours": ours,
    "ours-triton": ours_triton,
    "ours-any-order": ours_any_order,
    "torch-sdpa": torch_sdpa,
    "flash-attn-3": flash_attention_3,
    "jax-xla": jax_xla,
    "jax-cudnn": jax_cudnn,
    "splash": splash,
}
# The peers that can run on each kind of device.
ON_DEVICE = {
    "cpu": ("ours", "torch-sdpa", "jax-xla"),
    "gpu": (
        "ours",
        "ours-any-order",
        "ours-triton",
        "flash-attn-3",
        "jax-cudnn",
        "torch-sdpa",
        "jax-xla",
    ),
    "tpu": ("ours", "splash", "jax-xla"),
}
