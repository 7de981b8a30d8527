"""Compares the attention kernels, compiled for this machine, with dense float64.

    python -m scripts.benchmarks.kernel_exactness [--kernels gpu mosaic] [--dtypes bfloat16]
    python -m scripts.benchmarks.kernel_exactness --kernels auto --dtypes bfloat16 --long 1048576

The tests run the accelerators' kernels in JAX's interpreters, without matrix units or asynchronous
copies; this command runs the compiled kernels. Two shards of a row attend as in a ring: every block
of queries to every block of keys, continuing from earlier results. An error is the norm of the
difference over the norm of the float64 result; for lse it is the largest difference. --long instead
takes a row of that many tokens with a window, whose results have more elements than 32 bits can
count, and compares its beginning, middle and end. Prints a line for each case and writes
kernel_exactness.json.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from data.outputs import output_files
from model.attention import Keys, Mask, Queries, TokenCoords, get_kernel
from model.attention.blocks import BackwardInputs
from model.attention.kernels import Kernel
from model.attention.layout import permutation
from scripts.benchmarks.commands import write_json
from trainer.options import TokensOr0, command, option

ROWS, LENGTH, HEADS, KV_HEADS = 2, 1180, 4, 2  # 1,180: not a multiple of any tile
HEAD_DIMS = (64, 128, 256)
MASKS = {"causal": Mask(), "window 300": Mask(window=300), "full": Mask(causal=False)}
# Mask, layout, and packing of the row: one document; several documents, then padding; several, with
# padding also inside one of them.
CASES = (
    ("causal", "contiguous", "packed"),
    ("causal", "striped", "one"),
    ("causal", "striped", "interrupted"),
    ("window 300", "zigzag", "packed"),
    ("full", "striped", "packed"),
)
# For --long: heads as in LLaMA-3.1-8B; the last heads, at the largest offsets, are compared.
LONG_HEADS, LONG_KV_HEADS, LONG_HEAD_DIM, LONG_WINDOW, LONG_PART = 32, 8, 128, 500, 64
RESULTS = ("out", "lse", "dq", "dk", "dv")
# bfloat16 operands, including the softmax weights, have 8 bits of precision. The limits were chosen
# before any measurement.
LIMITS = {"bfloat16": {"lse": 1e-3, "other": 1e-2}, "float32": {"lse": 1e-5, "other": 1e-5}}


def documents(packing: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns index and segment_ids, int32 [ROWS, LENGTH], in row order."""
    index = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    segments = np.ones((ROWS, LENGTH), np.int32)
    if packing != "one":
        for row, ends in enumerate(((97, 500, 870, LENGTH - 20), (460, LENGTH - 150))):
            segments[row] = np.searchsorted(ends, np.arange(LENGTH), side="right") + 1
            segments[row, ends[-1] :] = 0
    if packing == "interrupted":
        segments[0, 510:530] = 0
    return index, segments


@functools.cache
def arrays(head_dim: int, dtype: str) -> list[np.ndarray]:
    """Returns q, k, v, dout: [ROWS, LENGTH, HEADS or KV_HEADS, D] in `dtype`."""
    rng = np.random.default_rng(head_dim)
    shapes = [(ROWS, LENGTH, heads, head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [
        np.asarray(jnp.asarray(rng.standard_normal(shape, dtype=np.float32), dtype))
        for shape in shapes
    ]


@functools.cache
def truth(head_dim: int, dtype: str, mask_name: str, packing: str) -> dict[str, np.ndarray]:
    """Returns RESULTS by definition in float64."""
    q, k, v, dout = arrays(head_dim, dtype)
    return dense(q, k, v, dout, *documents(packing), MASKS[mask_name])


def dense(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    index: np.ndarray,
    segments: np.ndarray,
    mask: Mask,
) -> dict[str, np.ndarray]:
    """Returns RESULTS by definition in float64, for vectors [B, T, H, D] and coordinates [B, T]."""
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    (rows, length, kv_heads, head_dim), group = k.shape, q.shape[2] // k.shape[2]
    scale = head_dim**-0.5
    distance = index[:, :, None] - index[:, None]
    seen = (segments[:, :, None] == segments[:, None]) & (segments[:, None] > 0)
    seen &= (distance >= 0) | (not mask.causal)
    seen &= np.abs(distance) < (mask.window or length)
    wide_k, wide_v = (np.repeat(x, group, 2) for x in (k, v))
    scores = np.where(
        seen[:, None], np.einsum("bqhd,bkhd->bhqk", q, wide_k, optimize=True) * scale, -np.inf
    )
    highest = scores.max(-1, keepdims=True, initial=-1e30)
    weights = np.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, highest + np.log(total), -np.inf)[..., 0]
    dweights = np.einsum("bqhd,bkhd->bhqk", dout, wide_v, optimize=True)
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True)) * scale
    dk, dv = (
        np.einsum("bhqk,bqhd->bkhd", x, y, optimize=True)
        for x, y in ((dscores, q), (weights, dout))
    )
    dk, dv = (x.reshape(rows, length, kv_heads, group, head_dim).sum(3) for x in (dk, dv))
    return {
        "out": np.einsum("bhqk,bkhd->bqhd", weights, wide_v, optimize=True),
        "lse": lse,
        "dq": np.einsum("bhqk,bkhd->bqhd", dscores, wide_k, optimize=True),
        "dk": dk,
        "dv": dv,
    }


def kernel_of(name: str) -> Kernel:
    """Returns a kernel by name; `any_order` is the device's default with that backward pass."""
    return get_kernel(backward=name) if name == "any_order" else get_kernel(name)


@functools.cache
def compiled(kernel_name: str, mask_name: str, head_dim: int):
    """Returns the kernel's `extend` and `gradients`, jitted."""
    kernel = kernel_of(kernel_name)
    options = {"mask": MASKS[mask_name], "scale": head_dim**-0.5}
    return (
        jax.jit(lambda *blocks: kernel.extend(*blocks, **options)),
        jax.jit(lambda *blocks: kernel.gradients(*blocks, **options)),
    )


def attend(
    kernel_name: str, head_dim: int, dtype: str, mask_name: str, layout: str, packing: str
) -> dict[str, np.ndarray]:
    """Returns RESULTS of two shards in row order, computed by four kernel calls in each direction.

    Args:
      dtype: dtype of the operands.
      mask_name, packing: as in CASES.

    Returns:
      float64 by name: lse [1, H, LENGTH], the others [1, LENGTH, H, head_dim].
    """
    extend, gradients = compiled(kernel_name, mask_name, head_dim)
    order = permutation(LENGTH, 2, layout)
    q, k, v, dout = (jnp.asarray(x)[:, order] for x in arrays(head_dim, dtype))
    coords = TokenCoords(*(jnp.asarray(x)[:, order] for x in documents(packing)))
    shards = [slice(0, LENGTH // 2), slice(LENGTH // 2, None)]
    shard_coords = [jax.tree.map(lambda x, shard=shard: x[:, shard], coords) for shard in shards]
    keys = [
        Keys(k[:, shard], v[:, shard], kv_coords)
        for shard, kv_coords in zip(shards, shard_coords, strict=True)
    ]
    outs, lses, dqs = [], [], []
    dkvs: list[Any] = [0.0, 0.0]
    for shard, q_coords in zip(shards, shard_coords, strict=True):
        queries = Queries(q[:, shard], q_coords)
        partial: Any = None
        dq: Any = None
        for block in keys:
            partial = extend(partial, queries, block)
        delta = jnp.einsum("bthd,bthd->bht", partial.out, dout[:, shard].astype(jnp.float32))
        saved = BackwardInputs(dout[:, shard], partial.lse, delta)
        for number, block in enumerate(keys):
            dq, dkv = gradients(dq, queries, block, saved)
            dkvs[number] = dkvs[number] + dkv
        outs.append(partial.out)
        lses.append(partial.lse)
        dqs.append(dq)
    dk, dv = jnp.concatenate(dkvs, 2)
    results = (jnp.concatenate(outs, 1), jnp.concatenate(lses, 2), jnp.concatenate(dqs, 1), dk, dv)
    back = np.argsort(order)
    return {
        name: np.take(np.asarray(x, np.float64), back, 2 if name == "lse" else 1)
        for name, x in zip(RESULTS, results, strict=True)
    }


def errors(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the error of each of RESULTS; NaN for non-finite numbers and wrong empty rows."""
    empty = np.isneginf(expected["lse"])
    if (np.isneginf(got["lse"]) != empty).any():
        return {**dict.fromkeys(RESULTS, float("nan"))}
    differences = {name: got[name] - expected[name] for name in RESULTS if name != "lse"}
    relative = {
        name: float(np.linalg.norm(x) / np.linalg.norm(expected[name]))
        for name, x in differences.items()
    }
    return {**relative, "lse": float(np.abs(got["lse"][~empty] - expected["lse"][~empty]).max())}


def compare(
    kernel: str, dtype: str, head_dim: int, case: str, measure: Callable[[], dict[str, float]]
) -> dict:
    """Prints and returns a row: the errors that `measure` returns, or why it failed."""
    row: dict[str, Any] = {"kernel": kernel, "dtype": dtype, "head_dim": head_dim, "case": case}
    start, limits = time.perf_counter(), LIMITS[dtype]
    try:
        row |= measure()
        row["held"] = all(row[name] <= limits.get(name, limits["other"]) for name in RESULTS)
        text = " ".join(f"{row[name]:8.1e}" for name in RESULTS)
    except Exception as error:  # one refused case must not hide the others
        row |= {
            "held": False,
            "failed": (
                f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:300]}"
            ),
        }
        text = row["failed"]
    print(
        f"{kernel:8} {dtype:9} {head_dim:4} {case:34} {text} "
        f"{'' if row['held'] else 'ABOVE THE LIMIT'} ({time.perf_counter() - start:.1f} s)",
        flush=True,
    )
    return row


def check(args: Options) -> list[dict]:
    """Prints and returns a row for each kernel, dtype, head size and case."""
    print(
        f"{'kernel':8} {'dtype':9} {'D':>4} {'case':34}",
        *(f"{name:>8}" for name in RESULTS),
        "",
        flush=True,
    )
    if args.long:
        return [
            compare(
                kernel,
                dtype,
                LONG_HEAD_DIM,
                f"window {LONG_WINDOW}, {args.long:,} tokens",
                functools.partial(long_errors, kernel, dtype, args.long),
            )
            for kernel, dtype in itertools.product(args.kernels, args.dtypes)
        ]
    return [
        compare(
            kernel,
            dtype,
            head_dim,
            ", ".join(case),
            functools.partial(case_errors, kernel, dtype, head_dim, case),
        )
        for kernel, dtype, head_dim, case in itertools.product(
            args.kernels, args.dtypes, args.head_dims, CASES
        )
    ]


def case_errors(
    kernel: str, dtype: str, head_dim: int, case: tuple[str, str, str]
) -> dict[str, float]:
    """Returns the errors of one of CASES."""
    mask, _, packing = case
    return errors(attend(kernel, head_dim, dtype, *case), truth(head_dim, dtype, mask, packing))


class LongRow(NamedTuple):
    """A long row with a window, and a kernel's results.

    Attributes:
      vectors: q, k, v and dout, [1, T, H, D].
      results: RESULTS by name, [1, T, H, D]; lse [1, T, H, 1].
    """

    vectors: list[jax.Array]
    results: dict[str, jax.Array]


def run_long(kernel_name: str, dtype: str, length: int) -> LongRow:
    """Runs both passes of a kernel, as a model on one rank calls them, on `length` random tokens
    with a window of LONG_WINDOW."""
    kernel = kernel_of(kernel_name)
    options = {"mask": Mask(window=LONG_WINDOW), "scale": LONG_HEAD_DIM**-0.5}
    shapes = [
        (1, length, heads, LONG_HEAD_DIM)
        for heads in (LONG_HEADS, LONG_KV_HEADS, LONG_KV_HEADS, LONG_HEADS)
    ]
    q, k, v, dout = vectors = [
        jax.random.normal(jax.random.key(seed), shape, dtype) for seed, shape in enumerate(shapes)
    ]
    coords = TokenCoords(
        jnp.arange(length, dtype=jnp.int32)[None], jnp.ones((1, length), jnp.int32)
    )
    blocks = Queries(q, coords), Keys(k, v, coords)
    out, lse = jax.jit(functools.partial(kernel.rounded_forward, **options))(*blocks)
    delta = jax.jit(
        lambda *pair: jnp.multiply(*(x.astype(jnp.float32) for x in pair)).sum(-1).swapaxes(1, 2)
    )(out, dout)
    gradients = jax.jit(functools.partial(kernel.backward, **options))(
        *blocks, BackwardInputs(dout, lse, delta)
    )
    return LongRow(
        vectors, dict(zip(RESULTS, (out, lse.swapaxes(1, 2)[..., None], *gradients), strict=True))
    )


def long_errors(kernel_name: str, dtype: str, length: int) -> dict[str, float]:
    """Returns the largest errors in a windowed row, over tokens at its start, middle and end."""
    row, group = run_long(kernel_name, dtype, length), LONG_HEADS // LONG_KV_HEADS
    worst = dict.fromkeys(RESULTS, 0.0)
    for start in (0, length // 2, length - LONG_PART):
        # All tokens within two windows: those that see the compared tokens, and what these see.
        near = slice(
            max(start - 2 * LONG_WINDOW, 0), min(start + LONG_PART + 2 * LONG_WINDOW, length)
        )
        compared = slice(start - near.start, start - near.start + LONG_PART)
        q, k, v, dout = (
            np.asarray(x[:, near, -heads:])
            for x, heads in zip(row.vectors, (group, 1, 1, group), strict=True)
        )
        index = np.arange(near.start, near.stop, dtype=np.int64)[None]
        ones = np.ones_like(index)
        expected = dense(q, k, v, dout, index, ones, Mask(window=LONG_WINDOW))
        expected["lse"] = expected["lse"].swapaxes(1, 2)[..., None]
        part = {
            name: np.asarray(
                x[:, start : start + LONG_PART, -expected[name].shape[2] :], np.float64
            )
            for name, x in row.results.items()
        }
        differences = errors(part, {name: x[:, compared] for name, x in expected.items()})
        worst = {name: max(worst[name], differences[name]) for name in RESULTS}
    return worst


def work(args: Options) -> None:
    """Compares, prints and writes the table."""
    output_files(args.output, {"kernel_exactness.json": b'"limits"'})
    device = jax.devices()[0].device_kind
    print(device, flush=True)
    rows = check(args)
    result = {"device": device, "jax": jax.__version__, "limits": LIMITS, "rows": rows}
    write_json(args.output / "kernel_exactness.json", result)
    print(f"{sum(row['held'] for row in rows)} of {len(rows)} cases within the limits")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    kernels: tuple[str, ...] = option(
        "kernel names; auto: the device's default; any_order: the same with that backward pass",
        ("auto",),
    )
    dtypes: tuple[str, ...] = option("dtypes of the operands", tuple(LIMITS), choices=LIMITS)
    head_dims: tuple[int, ...] = option("head sizes", HEAD_DIMS, choices=HEAD_DIMS)
    long: TokensOr0 = option("instead, one row of this length with a window", 0, metavar="TOKENS")
    output: Path = option("folder for results", Path("runs/kernel_exactness"))


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
