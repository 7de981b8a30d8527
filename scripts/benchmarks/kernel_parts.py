"""Times the Mosaic kernels for Hopper GPUs separately: forward, dq, dk with dv, and all in one.

    python -m scripts.benchmarks.kernel_parts [--length 32768] [--head-dims 64 128] [--output DIR]

bench_kernels' times include the work around a kernel, such as rounding and the search for
intervals; these times include only the search. Prints a line for each kernel and writes
kernel_parts.json. TFLOP/s count the kernel's products over visible pairs: two forward, three for
dq, four for dk and dv, five in the combined kernel (`attention.backward: any_order`), whose dq
starts from zeros written before it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from data.errors import UserError
from data.outputs import output_files
from model.attention import Mask, TokenCoords
from model.attention.blocks import BackwardInputs
from model.attention.choice import HOPPER
from model.attention.kernels import mosaic_backward, mosaic_forward, mosaic_one_pass
from model.attention.kernels.intervals import intervals
from scripts.benchmarks.bench_kernels.case import best_of
from scripts.benchmarks.commands import write_json
from trainer.options import Tokens, command, option

HEADS, KV_HEADS = 32, 8  # those of LLaMA-3.1-8B
PRODUCTS = {"forward": 2, "dq": 3, "dkv": 4, "backward": 5}
REPEATS = 5


def run_kernel(kernel: str, q, k, v, saved: BackwardInputs, coords: TokenCoords):
    """Returns the result of one kernel; `forward` does not use `saved`."""
    options = {"scale": q.shape[-1] ** -0.5, "interpret": None}
    seen = intervals(coords, coords, Mask(), transpose=kernel in ("dkv", "backward"))
    if kernel == "forward":
        return mosaic_forward.forward(None, q, (k, v), seen, rounded=True, **options)
    if kernel == "dq":
        return mosaic_backward.dq_pass(None, q, (k, v), saved, seen, **options)
    if kernel == "backward":
        return mosaic_one_pass.gradients(None, q, (k, v), saved, seen, **options)
    return mosaic_backward.dkv_pass(q, (k, v), saved, seen, **options)


def measure(kernel: str, head_dim: int, length: int) -> dict:
    """Prints and returns the fastest of REPEATS runs after a warm-up, in seconds and TFLOP/s."""
    shapes = [(1, length, heads, head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, dout = (
        jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        for seed, shape in enumerate(shapes)
    )
    saved = BackwardInputs(
        dout, lse=jnp.full((1, HEADS, length), 10.0), delta=jnp.zeros((1, HEADS, length))
    )
    coords = TokenCoords(
        jnp.arange(length, dtype=jnp.int32)[None], jnp.ones((1, length), jnp.int32)
    )
    arguments = (q, k, v, saved, coords)
    compiled = jax.jit(functools.partial(run_kernel, kernel)).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    seconds, _ = best_of(lambda: jax.block_until_ready(compiled(*arguments)), REPEATS)
    tflops = PRODUCTS[kernel] * 2 * head_dim * HEADS * (length * (length + 1) / 2) / seconds / 1e12
    print(f"{head_dim:4} {kernel:8} {seconds * 1e3:8.2f} ms {tflops:6.0f} TFLOP/s", flush=True)
    return {
        "kernel": kernel,
        "head_dim": head_dim,
        "length": length,
        "seconds": seconds,
        "tflops": tflops,
    }


def work(args: Options) -> None:
    """Measures and writes the table."""
    output_files(args.output, {"kernel_parts.json": b'"tflops"'})
    device = jax.devices()[0].device_kind
    if not any(name in device for name in HOPPER):
        raise UserError(
            f"kernel_parts: found {device}; these kernels run on Hopper GPUs ({', '.join(HOPPER)})"
        )
    rows = [
        measure(kernel, head_dim, args.length)
        for head_dim in args.head_dims
        for kernel in PRODUCTS
        if kernel != "backward" or head_dim in mosaic_one_pass.HEAD_DIMS
    ]
    write_json(
        args.output / "kernel_parts.json", {"device": device, "jax": jax.__version__, "rows": rows}
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    length: Tokens = option("tokens", 32768)
    head_dims: tuple[int, ...] = option("head sizes", (64, 128, 256), choices=(64, 128, 256))
    output: Path = option("folder for results", Path("runs/kernel_parts"))


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
