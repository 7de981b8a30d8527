"""Times balance: striped and balanced attention over the contiguous ring, forward and backward, on two single-threaded devices.

    python -m scripts.bench_balance [--lengths 2048 ... 32768] [--tiles 16] [--output DIR]

Each device is one CPU thread, so a rank that waits for the other shows in time (Striped Attention, Figure 5). All cases of a
length are timed in turn, in one process, and the median counts; beside each stands the bound that counting tiles gives. On a
busy machine the figures mean nothing: the spread that is printed tells.
"""
from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

CASES = {  # schedule, layout; the first is what the others are compared with
    "contiguous ring": ("ring", "contiguous"),
    "striped ring": ("ring", "striped"),
    "zigzag ring": ("ring", "zigzag"),
    "balanced, split": ({"name": "balanced", "split": True}, "contiguous"),
}
COLOURS = {"striped ring": "#4477aa", "zigzag ring": "#228833", "balanced, split": "#cc6677"}
RANKS = 2


def bound(name: str, tiles: int) -> float:
    """How much faster than the contiguous ring, if time were tiles: `tiles` on a side of each of two blocks.

    The contiguous ring takes a diagonal block, then a whole one; the others two diagonal ones, or a diagonal and half a one.
    """
    diagonal, whole = tiles * (tiles + 1) / 2, tiles * tiles
    taken = {"contiguous ring": diagonal + whole, "striped ring": 2 * diagonal, "zigzag ring": diagonal + whole / 2,
             "balanced, split": diagonal + whole / 2}
    return taken["contiguous ring"] / taken[name]


def compiled_cases(length: int, tiles: int, heads: int, head_dim: int) -> dict:
    """name -> a call without arguments that runs attention and its gradients once, to the end."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from model.attention import TokenCoords, attention, get_kernel
    from model.attention.layout import permutation

    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("sequence",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    tile = length // RANKS // tiles
    rng = np.random.default_rng(0)
    arrays = [jax.device_put(rng.standard_normal((1, length, heads, head_dim), dtype=np.float32), sharding) for _ in range(4)]

    def case(schedule, layout):
        @jax.jit
        def run(q, k, v, dout, coords):
            def out(q, k, v):
                return attention(q, k, v, coords, mesh=mesh, layout=layout, schedule=schedule,
                                 kernel=get_kernel("xla", query_tile=tile, key_tile=tile))

            out, pull = jax.vjp(out, q, k, v)
            return out, *pull(dout)

        index = permutation(length, RANKS, layout)[None].astype(np.int32)
        coords = TokenCoords(jax.device_put(index, sharding), jax.device_put(jnp.ones_like(index), sharding))
        return lambda: jax.block_until_ready(run(*arrays, coords))

    return {name: case(*CASES[name]) for name in CASES}


def measure(length: int, tiles: int, repeats: int, heads: int, head_dim: int) -> list[dict]:
    """One row for each case: median and all seconds, speed-up over the contiguous ring, and the bound."""
    cases = compiled_cases(length, tiles, heads, head_dim)
    for run in cases.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    first = statistics.median(next(iter(seconds.values())))
    return [{"case": name, "length": length, "tiles": tiles, "tile": length // RANKS // tiles, "heads": heads,
             "head_dim": head_dim, "seconds": statistics.median(took), "all_seconds": took,
             "speedup": first / statistics.median(took), "bound": bound(name, tiles)} for name, took in seconds.items()]


def draw(rows: list[dict], path: pathlib.Path) -> None:
    """Speed-up over the contiguous ring against length, measured and bound (as Striped Attention's Figure 5)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, colour in COLOURS.items():
        mine = [row for row in rows if row["case"] == name]
        lengths = [row["length"] for row in mine]
        axes.plot(lengths, [row["speedup"] for row in mine], "o-", color=colour, label=name)
        axes.plot(lengths, [row["bound"] for row in mine], ":", color=colour, label=f"{name}: bound by tiles")
    axes.axhline(1, color="#999999", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row["length"] for row in rows}))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}K")
    axes.set(xlabel="tokens", ylabel="speed-up over the contiguous ring", ylim=(0.9, 1.65))
    axes.set_title(f"attention, forward + backward, {RANKS} one-thread devices, {rows[0]['tiles']} tiles a block", fontsize=10)
    axes.legend(fontsize=8, frameon=False, ncols=2)
    figure.savefig(path, dpi=120)


def main(argv=None) -> int:
    """Prints a table; writes balance_time.json and balance_time.png into --output."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench_balance", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768], help="tokens in all")
    parser.add_argument("--tiles", type=int, default=16, help="on a side of each device's block (default 16)")
    parser.add_argument("--repeats", type=int, default=5, help="times each case is run; the median counts (default 5)")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/bench"), help="folder")
    args = parser.parse_args(argv)
    for length in args.lengths:
        if length % (RANKS * args.tiles * 2):
            parser.error(f"--lengths: {length} is not divisible by {RANKS} ranks x {args.tiles} tiles x 2 (zigzag)")
    # Before JAX starts: two devices, and no matrix product on more than its device's own thread.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", RANKS)
    print(f"{'tokens':>7} {'case':18} {'tile':>5} {'seconds':>9} {'slowest / fastest':>18} {'speed-up':>9} {'bound':>6}")
    rows = []
    for length in args.lengths:
        for row in measure(length, args.tiles, args.repeats, args.heads, args.head_dim):
            rows.append(row)
            spread = max(row["all_seconds"]) / min(row["all_seconds"])
            print(f"{length:7} {row['case']:18} {row['tile']:5} {row['seconds']:9.3f} {spread:18.2f} {row['speedup']:9.3f} "
                  f"{row['bound']:6.3f}", flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "balance_time.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    draw(rows, args.output / "balance_time.png")
    print(args.output / "balance_time.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
