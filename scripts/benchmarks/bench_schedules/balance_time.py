"""Times balanced attention against the contiguous ring on two one-thread devices, both passes.

Each device is one CPU thread, so a rank that waits for the other costs time (Striped Attention,
Figure 5). All cases of a length alternate in one process, and the median counts. It is compared
with the bound from counting tiles. On a busy machine the figures are meaningless, which the printed
spread shows.
"""

from __future__ import annotations

import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data.errors import UserError
from model.attention import TokenCoords, attention, get_kernel
from model.attention.layout import permutation

CASES = {  # schedule and layout; the first is the baseline
    "contiguous ring": ("ring", "contiguous"),
    "striped ring": ("ring", "striped"),
    "zigzag ring": ("ring", "zigzag"),
    "balanced, split": ({"name": "balanced", "split": True}, "contiguous"),
}
RANKS = 2


def bound(name: str, tiles: int) -> float:
    """Returns the speed-up of a case over the contiguous ring if time were proportional to tiles.

    Args:
      name: a key of CASES.
      tiles: tiles on a side of each of the two ranks' blocks.
    """
    # What the busiest rank of each round computes: in the contiguous ring a diagonal block and then
    # a full one; in the striped ring two diagonal blocks; in the others a diagonal block and half a
    # block.
    diagonal, whole = tiles * (tiles + 1) / 2, tiles * tiles
    busiest = {
        "contiguous ring": diagonal + whole,
        "striped ring": 2 * diagonal,
        "zigzag ring": diagonal + whole / 2,
        "balanced, split": diagonal + whole / 2,
    }
    return busiest["contiguous ring"] / busiest[name]


def compiled_cases(length: int, tiles: int, heads: int, head_dim: int) -> dict:
    """Returns a function for each of CASES that runs attention with its gradients and waits."""
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("sequence",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    tile = length // RANKS // tiles
    rng = np.random.default_rng(0)
    arrays = [
        jax.device_put(
            rng.standard_normal((1, length, heads, head_dim), dtype=np.float32), sharding
        )
        for _ in range(4)
    ]

    def case(schedule, layout):
        kernel = get_kernel("xla", query_tile=tile, key_tile=tile)

        @jax.jit
        def run(q, k, v, dout, coords):
            out, backward = jax.vjp(
                lambda q, k, v: attention(
                    q, k, v, coords, mesh=mesh, layout=layout, schedule=schedule, kernel=kernel
                ),
                q,
                k,
                v,
            )
            return out, *backward(dout)

        index = permutation(length, RANKS, layout)[None].astype(np.int32)
        coords = TokenCoords(
            jax.device_put(index, sharding), jax.device_put(jnp.ones_like(index), sharding)
        )
        return lambda: jax.block_until_ready(run(*arrays, coords))

    return {name: case(*CASES[name]) for name in CASES}


def measure(length: int, tiles: int, repeats: int, heads: int, head_dim: int) -> list[dict]:
    """Returns a row per case: median and all seconds, speed-up, and its bound."""
    cases = compiled_cases(length, tiles, heads, head_dim)
    for run in cases.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    baseline = next(iter(medians.values()))
    return [
        {
            "case": name,
            "length": length,
            "tiles": tiles,
            "tile": length // RANKS // tiles,
            "heads": heads,
            "head_dim": head_dim,
            "seconds": medians[name],
            "all_seconds": times,
            "speedup": baseline / medians[name],
            "bound": bound(name, tiles),
        }
        for name, times in seconds.items()
    ]


def time_table(lengths, tiles: int, repeats: int, heads: int, head_dim: int) -> list[dict]:
    """Prints and returns the rows of every case and length; call it before JAX starts its devices.

    Raises:
      UserError: a length cannot be divided into the tiles.
    """
    for length in lengths:
        if length % (RANKS * tiles * 2):
            raise UserError(
                f"--lengths: {length} is not divisible by {RANKS} ranks x {tiles} tiles x 2 "
                "(zigzag)"
            )
    # Each matrix product uses only its device's thread.
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    )
    jax.config.update("jax_num_cpu_devices", RANKS)
    print(
        f"{'tokens':>7} {'case':18} {'tile':>5} {'seconds':>9} {'slowest / fastest':>18} "
        f"{'speed-up':>9} {'bound':>6}"
    )
    rows = []
    for length in lengths:
        for row in measure(length, tiles, repeats, heads, head_dim):
            rows.append(row)
            spread = max(row["all_seconds"]) / min(row["all_seconds"])
            print(
                f"{length:7} {row['case']:18} {row['tile']:5} {row['seconds']:9.3f} {spread:18.2f} "
                f"{row['speedup']:9.3f} {row['bound']:6.3f}",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    raise SystemExit(
        "no command; python -m scripts.benchmarks.bench_schedules time prints what this measures"
    )
