"""Attention kernels on this device against the peers installed here: one block, forward and forward + backward.

    python -m scripts.benchmarks.bench_kernels [--lengths 4096 16384] [--blocks diagonal full]
        [--peers ours torch-sdpa] [--output DIR]

Every figure comes from a process of its own (its memory is its own); peers take turns, and each keeps its best time.
Writes bench_kernels.json, .txt (the table) and .png. TFLOP/s count pairs of tokens that see each other, nothing else.
"""
from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

from data.errors import UserError
from data.paths import output_folder
from trainer import entry

from .kernel_peers import BLOCKS, ON_DEVICE, PEERS, Case

PASSES = {"forward": False, "forward+backward": True}


def in_own_process(case: Case) -> dict:
    """What scripts.benchmarks.kernel_case says of a case; a crash is a reason to leave it out."""
    command = [sys.executable, "-m", "scripts.benchmarks.kernel_case", json.dumps(dataclasses.asdict(case))]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"left_out": f"ended with {done.returncode}: {last[:200]}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def merge(a: dict | None, b: dict) -> dict:
    """Two measurements of one case: the better times, the larger peak of memory."""
    if a is None or "left_out" in b:
        return b
    return {name: (max if name == "peak_mib" else min)(a[name], b[name]) for name in b}


def measure_all(args: argparse.Namespace, peers: tuple[str, ...], matmul_flops: float) -> list[dict]:
    """A row for each length, block, pass and peer. Rounds are outside the peers: they alternate."""
    shape = {"heads": args.heads, "kv_heads": args.kv_heads or args.heads, "head_dim": args.head_dim, "dtype": args.dtype,
             "kernel": args.kernel, "tile": args.tile, "repeats": args.repeats}  # fmt: skip
    rows = []
    for length, block, name in itertools.product(args.lengths, args.blocks, PASSES):
        cases = {peer: Case(peer, block, length, PASSES[name], **shape) for peer in peers}
        found: dict[str, dict] = {}
        for _ in range(args.rounds):
            for peer, case in cases.items():
                if "left_out" not in found.get(peer, {}):
                    found[peer] = merge(found.get(peer), in_own_process(case))
        for peer, case in cases.items():
            row = {"length": length, "block": block, "pass": name, "peer": peer, **found[peer]}
            if "seconds" in row:
                row["tflops"] = case.flops() / row["seconds"] / 1e12
                row["share_of_matmul"] = case.flops() / row["seconds"] / matmul_flops
                if "seconds" in found["ours"]:
                    row["ours_is_faster"] = row["seconds"] / found["ours"]["seconds"]
            rows.append(row)
            print(line(row), flush=True)
    return rows


HEADER = (f"{'length':>7} {'block':8} {'pass':16} {'peer':13} {'ms':>9} {'cpu ms':>9} {'TFLOP/s':>8} {'of matmul':>9} "
          f"{'peak MiB':>9} {'ours is':>8}")  # fmt: skip


def line(row: dict) -> str:
    """One row of the table."""
    start = f"{row['length']:7d} {row['block']:8} {row['pass']:16} {row['peer']:13}"
    if "left_out" in row:
        return f"{start} {row['left_out']}"
    times = f"{row['ours_is_faster']:7.2f}x" if "ours_is_faster" in row else f"{'':8}"
    return (f"{start} {row['seconds'] * 1e3:9.1f} {row['cpu_seconds'] * 1e3:9.1f} {row['tflops']:8.3f} "
            f"{row['share_of_matmul']:9.0%} {row['peak_mib']:9.1f} {times}")


def plot(rows: list[dict], path: Path, title: str) -> None:
    """Rate and memory against length on the first block; the time of each kind of block at the longest length."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [row for row in rows if "seconds" in row and row["pass"] == "forward+backward"]
    if not rows:
        return
    peers, blocks = (list(dict.fromkeys(row[what] for row in rows)) for what in ("peer", "block"))
    longest = max(row["length"] for row in rows)
    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    rate, memory, kinds = figure.subplots(1, 3)
    for number, peer in enumerate(peers):
        curve = sorted((row["length"], row["tflops"], row["peak_mib"]) for row in rows
                       if row["peer"] == peer and row["block"] == blocks[0])  # fmt: skip
        if curve:
            lengths, rates, peaks = zip(*curve, strict=True)
            rate.plot(lengths, rates, marker="o", color=f"C{number}")
            memory.plot(lengths, peaks, marker="o", color=f"C{number}")
        bars = {row["block"]: row["seconds"] * 1e3 for row in rows if row["peer"] == peer and row["length"] == longest}
        width = 0.8 / len(peers)
        kinds.bar([blocks.index(block) + (number - (len(peers) - 1) / 2) * width for block in bars], bars.values(), width,
                  color=f"C{number}")  # fmt: skip
    lengths = sorted({row["length"] for row in rows})
    for axis, label, scale in ((rate, "TFLOP/s", "linear"), (memory, "peak MiB", "log")):
        axis.set(xlabel="tokens", ylabel=f"{label}, {blocks[0]} block", xscale="log", yscale=scale)
        axis.set_xticks(lengths, [f"{length / 1024:g}K" for length in lengths])
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axis.grid(alpha=0.3)
    rate.set_ylim(bottom=0)
    memory.set_ylim(bottom=1)
    kinds.set(ylabel=f"ms, {longest / 1024:g}K tokens", yscale="log")
    kinds.set_xticks(range(len(blocks)), blocks)
    kinds.set_ylim(bottom=1)
    figure.legend([Patch(color=f"C{number}") for number in range(len(peers))], peers, loc="outside lower center",
                  ncols=len(peers), fontsize="small")  # fmt: skip
    figure.suptitle(f"forward + backward on {title}", fontsize="medium")
    figure.savefig(path, dpi=120)


def work(args: argparse.Namespace) -> None:
    output_folder(args.output)
    device = in_own_process(Case("matmul", "full", 1, False, dtype=args.dtype))
    if "left_out" in device:
        raise UserError(f"the device cannot be measured: {device['left_out']}")
    peers = tuple(args.peers or ON_DEVICE[device["platform"]])
    title = (f"{device['device']}: batch 1, {args.heads} heads of {args.head_dim}"
             + (f" ({args.kv_heads} of keys)" if args.kv_heads else "") + f", {args.dtype}; matrix products "
             + f"{device['matmul_flops'] / 1e12:.3f} TFLOP/s")  # fmt: skip
    print(title, HEADER, sep="\n", flush=True)
    rows = measure_all(args, peers, device["matmul_flops"])
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    result = {"device": device, "settings": settings, "rows": rows}
    (args.output / "bench_kernels.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (args.output / "bench_kernels.txt").write_text("\n".join([title, HEADER, *map(line, rows)]) + "\n", encoding="utf-8")
    plot(rows, args.output / "bench_kernels.png", title)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.bench_kernels", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)  # fmt: skip
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384], help="tokens of a block (4096..131072)")
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=list(BLOCKS), help="kinds of block (default: all)")
    parser.add_argument("--peers", nargs="+", choices=PEERS, help="default: all that this kind of device can run")
    parser.add_argument("--heads", type=int, default=8, help="query heads (default 8)")
    parser.add_argument("--kv_heads", type=int, help="key and value heads (default: as many as query heads)")
    parser.add_argument("--head_dim", type=int, default=64, help="(default 64)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default float32)")
    parser.add_argument("--kernel", default="auto", help="our kernel (default auto)")
    parser.add_argument("--tile", type=int, default=512, help="our tiles' length (default 512)")
    parser.add_argument("--repeats", type=int, default=3, help="runs in each process (default 3)")
    parser.add_argument("--rounds", type=int, default=2, help="processes for each peer, taking turns (default 2)")
    parser.add_argument("--output", type=Path, default=Path("runs/bench_kernels"), help="(default runs/bench_kernels)")
    args = parser.parse_args(argv)
    return entry.run(lambda: work(args))


if __name__ == "__main__":
    sys.exit(main())
