"""Compares our ring attention with its authors' package, on two one-thread devices.

    pip install --no-deps ringattention==0.1.2; pip install einops
    python -m scripts.benchmarks.rings [--lengths 4096 8192 16384 32768]

They compute the same causal attention in float32 and take turns in one process; the median counts.
Memory is the compiler's temporaries per device. Writes docs/results/rings.json.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
import types
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from data.errors import UserError
from scripts.benchmarks.results import renew, row
from trainer.options import Tokens, command, option

if TYPE_CHECKING:
    import jax

RANKS, TILE = 2, 512
LAYOUTS = ("contiguous", "striped", "zigzag")
THEIRS = "ringattention 0.1.2"


def their_ring() -> Callable:
    """Returns the package's ring attention for CPUs.

    Raises:
      UserError: it is not installed.
    """
    import jax
    from jax.extend.backend import get_backend

    # The package queries the platform where only older versions of JAX answered.
    bridge = types.SimpleNamespace(get_backend=get_backend)
    setattr(jax.lib, "xla_bridge", bridge)  # noqa: B010 -- mypy knows of no such module
    try:
        from ringattention.ringattention_jax import ring_attention
    except ImportError as error:
        raise UserError(
            f"{error}; run pip install --no-deps ringattention==0.1.2 and pip install einops"
        ) from None
    options = {
        "causal_block_size": 1,
        "query_chunk_size": TILE,
        "key_chunk_size": TILE,
        "deterministic": True,
        "dropout_rng": None,
        "attn_pdrop": 0.0,
        "dtype": np.dtype("float32"),
        "precision": None,
        "policy": jax.checkpoint_policies.nothing_saveable,
        "prevent_cse": False,
    }
    return lambda q, k, v: ring_attention(q, k, v, None, None, None, "sequence", True, options)


def compiled_rings(
    length: int, heads: int, head_dim: int
) -> dict[str, tuple[jax.stages.Compiled, tuple]]:
    """Returns each ring's compiled attention with gradients, and its arguments in its token
    order."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from model.attention import TokenCoords, attention, get_kernel
    from model.attention.layout import permutation

    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("sequence",))
    spec = PartitionSpec(None, "sequence")
    sharding = NamedSharding(mesh, spec)
    arrays = [
        np.random.default_rng(seed).standard_normal((1, length, heads, head_dim), dtype=np.float32)
        for seed in range(4)
    ]

    def with_gradients(attend: Callable) -> Callable:
        def run(q, k, v, dout, *coords):
            out, backward = jax.vjp(lambda q, k, v: attend(q, k, v, *coords), q, k, v)
            return out, *backward(dout)

        return run

    def compiled(attend: Callable, order: np.ndarray, *coords) -> tuple[jax.stages.Compiled, tuple]:
        args = (*(jax.device_put(array[:, order], sharding) for array in arrays), *coords)
        return jax.jit(with_gradients(attend)).lower(*args).compile(), args

    theirs = jax.shard_map(
        their_ring(), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False
    )
    rings = {THEIRS: compiled(theirs, np.arange(length))}
    kernel = get_kernel("xla", query_tile=TILE, key_tile=TILE)
    for layout in LAYOUTS:
        order = permutation(length, RANKS, layout)
        index = order[None].astype(np.int32)
        coords = TokenCoords(
            jax.device_put(index, sharding), jax.device_put(np.ones_like(index), sharding)
        )

        def ours(q, k, v, coords, layout=layout):
            return attention(
                q, k, v, coords, mesh=mesh, layout=layout, schedule="ring", kernel=kernel
            )

        rings[f"ours, {layout}"] = compiled(ours, order, coords)
    return rings


def largest_difference(rings: dict[str, tuple], length: int) -> float:
    """Returns the largest difference from their results, relative to each result's largest
    value."""
    import jax

    from model.attention.layout import permutation

    run, args = rings[THEIRS]
    expected = jax.device_get(run(*args))
    largest = 0.0
    for layout in LAYOUTS:
        run, args = rings[f"ours, {layout}"]
        order = permutation(length, RANKS, layout)
        for value, truth in zip(jax.device_get(run(*args)), expected, strict=True):
            largest = max(
                largest, float(np.abs(value - truth[:, order]).max() / np.abs(truth).max())
            )
    return largest


def measure(length: int, repeats: int, heads: int, head_dim: int) -> tuple[list[dict], float]:
    """Returns a row for each ring (seconds, spread, MiB of a device) and `largest_difference`."""
    import jax

    rings = compiled_rings(length, heads, head_dim)
    difference = largest_difference(rings, length)  # runs each once
    seconds: dict[str, list[float]] = {name: [] for name in rings}
    for _ in range(repeats):
        for name, (run, args) in rings.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*args))
            seconds[name].append(time.perf_counter() - start)
    sizes = {name: rings[name][0].memory_analysis() for name in rings}
    rows = [
        {
            "ring": name,
            "length": length,
            "seconds": statistics.median(times),
            "fastest": min(times),
            "slowest": max(times),
            "mib": getattr(sizes[name], "temp_size_in_bytes", 0) / 2**20,
        }
        for name, times in seconds.items()
    ]
    return rows, difference


def work(args: Options) -> None:
    """Measures the rings at each length, prints and saves."""
    from trainer.mesh import simulate

    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"  # a thread each
    )
    simulate(RANKS)
    rows = {}
    for length in args.lengths:
        rings, difference = measure(length, args.repeats, args.heads, args.head_dim)
        theirs = rings[0]
        for ring in rings:
            ratio = theirs["seconds"] / ring["seconds"]
            print(
                f"{length:7,}  {ring['ring']:19}  {ring['seconds']:7.2f} s ({ring['fastest']:.2f} "
                f"to {ring['slowest']:.2f})  {ratio:5.2f}x  {ring['mib']:6.1f} MiB a device",
                flush=True,
            )
        faster = {
            ring["ring"].removeprefix("ours, "): theirs["seconds"] / ring["seconds"]
            for ring in rings[1:]
        }
        rows[f"speed_{length}"] = row(
            f"ring attention on {RANKS} CPU ranks, {length:,} tokens: speed relative to the "
            "authors' package",
            ", ".join(f"{layout} {ratio:.2f}" for layout, ratio in faster.items()),
            "above 1",
            min(faster.values()) > 1,
        )
        rows[f"same_{length}"] = row(
            f"ring attention on {RANKS} CPU ranks, {length:,} tokens: largest difference from the "
            "package's results, relative to the largest value",
            f"{difference:.1e}",
            "1e-5",
            difference <= 1e-5,
        )
    lengths = " ".join(map(str, args.lengths))
    options = f"--lengths {lengths} --heads {args.heads}"
    renew("rings", rows, command=f"python -m scripts.benchmarks.rings {options}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    lengths: tuple[Tokens, ...] = option("tokens over both devices", (4096, 8192, 16384, 32768))
    heads: int = option("number of heads", 4)
    head_dim: int = option("size of a head", 64)
    repeats: int = option("runs of each; the median counts", 5)


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
