"""Compares our attention kernel with installed peers on this device, forward and with gradients.

    python -m scripts.benchmarks.bench_kernels [--lengths 4096 16384] [--blocks diagonal full]
        [--peers ours torch-sdpa] [--output DIR]

On a CPU every measurement runs in a separate process, to measure its peak memory. On an
accelerator, where starting a process takes longer than most measurements, a peer's cases share a
process, the smallest first; a peak is then reported only if it exceeds those of earlier cases.
Peers take turns, and the best time of each counts. Writes bench_kernels.json and .txt (the table).
TFLOP/s count only visible pairs of tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from data.errors import UserError
from data.outputs import output_files
from scripts.benchmarks.bench_kernels.block import BLOCKS, Case
from scripts.benchmarks.bench_kernels.peers import ON_DEVICE, PEERS
from scripts.benchmarks.commands import (
    ProcessFailed,
    in_own_process,
    write_json,
)
from trainer.options import Tokens, TokensOr0, command, option

PASSES = {"forward": False, "forward+backward": True}


class Row(NamedTuple):
    """A row of the table, which identifies its `Case`."""

    length: int
    block: str
    name: str
    peer: str


def measure(cases: list[Case]) -> list[dict]:
    """Measures cases in one process; if it crashes, each measurement is the reason."""
    try:
        return in_own_process(
            "bench_kernels.case",
            json.dumps([dataclasses.asdict(case) for case in cases]),
            environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        )
    except ProcessFailed as error:
        return [{"left_out": error.reason}] * len(cases)


def best(first: dict | None, second: dict) -> dict:
    """Merges two measurements of one case: the better times, the larger peak memory."""
    if first is None or "left_out" in second:
        return second
    times = {name: min(first[name], second[name]) for name in ("seconds", "cpu_seconds")}
    peaks = (result["peak_mib"] for result in (first, second) if result["peak_mib"] is not None)
    return {**times, "peak_mib": max(peaks, default=None)}


def measure_all(args: Options, peers: tuple[str, ...], device: dict) -> list[dict]:
    """Prints and returns a row for each length, pass, block and peer; peers alternate."""
    shape: dict[str, Any] = {
        "heads": args.heads,
        "kv_heads": args.kv_heads or args.heads,
        "head_dim": args.head_dim,
        "dtype": args.dtype,
        "kernel": args.kernel,
        "tile": args.tile,
        "repeats": args.repeats,
    }
    cases = {
        Row(length, block, name, peer): Case(peer, block, length, PASSES[name], **shape)
        for length, name, block, peer in itertools.product(args.lengths, PASSES, args.blocks, peers)
    }
    # The rows measured and printed together: all of them, or those that differ only in the peer.
    groups = (
        [list(cases)]
        if device["platform"] != "cpu"
        else [list(rows) for _, rows in itertools.groupby(cases, key=lambda row: row[:3])]
    )
    table = []
    for group in groups:
        measured: dict[Row, dict] = {}
        for _, peer in itertools.product(range(args.rounds), peers):
            rows = [
                row for row in group if row.peer == peer and "left_out" not in measured.get(row, {})
            ]
            for row, result in zip(
                rows, measure([cases[row] for row in rows]) if rows else [], strict=True
            ):
                measured[row] = best(measured.get(row), result)
        for row in group:
            table.append(
                figures(
                    cases[row],
                    row,
                    measured[row],
                    measured.get(row._replace(peer="ours"), {}),
                    device,
                )
            )
            print(line(table[-1]), flush=True)
    return table


def figures(case: Case, row: Row, measured: dict, ours: dict, device: dict) -> dict:
    """Returns a row's measurement with its rates and our speed relative to it."""
    result = {
        "length": row.length,
        "block": row.block,
        "pass": row.name,
        "peer": row.peer,
        **measured,
    }
    if "seconds" in measured:
        result["tflops"] = case.flops() / measured["seconds"] / 1e12
        result["share_of_matmul"] = case.flops() / measured["seconds"] / device["matmul_flops"]
        if "seconds" in ours:
            result["ours_is_faster"] = measured["seconds"] / ours["seconds"]
    return result


HEADER = (
    f"{'length':>7} {'block':8} {'pass':16} {'peer':13} {'ms':>9} {'cpu ms':>9} {'TFLOP/s':>8} "
    f"{'of matmul':>9} {'peak MiB':>9} {'ours is':>8}"
)


def line(row: dict) -> str:
    """Returns one row of the table as text."""
    start = f"{row['length']:7d} {row['block']:8} {row['pass']:16} {row['peer']:13}"
    if "left_out" in row:
        return f"{start} {row['left_out']}"
    times = f"{row['ours_is_faster']:7.2f}x" if "ours_is_faster" in row else f"{'':8}"
    peak = "-" if row["peak_mib"] is None else f"{row['peak_mib']:.1f}"
    return (
        f"{start} {row['seconds'] * 1e3:9.1f} {row['cpu_seconds'] * 1e3:9.1f} {row['tflops']:8.3f} "
        f"{row['share_of_matmul']:9.0%} {peak:>9} {times}"
    )


def work(args: Options) -> None:
    """Measures, prints the table and writes it as JSON and text."""
    output_files(
        args.output,
        {"bench_kernels.json": b'"settings"', "bench_kernels.txt": HEADER.encode()},
    )
    (device,) = measure([Case("matmul", "full", 1, False, dtype=args.dtype)])
    if "left_out" in device:
        raise UserError(f"the device cannot be measured: {device['left_out']}")
    peers = tuple(args.peers or ON_DEVICE[device["platform"]])
    kv_heads = f" ({args.kv_heads} of keys)" if args.kv_heads else ""
    title = (
        f"{device['device']}: batch 1, {args.heads} heads of {args.head_dim}{kv_heads}, "
        f"{args.dtype}; matrix products {device['matmul_flops'] / 1e12:.3f} TFLOP/s"
    )
    print(title, HEADER, sep="\n", flush=True)
    rows = measure_all(args, peers, device)
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    write_json(
        args.output / "bench_kernels.json", {"device": device, "settings": settings, "rows": rows}
    )
    (args.output / "bench_kernels.txt").write_text(
        "\n".join([title, HEADER, *map(line, rows)]) + "\n", encoding="utf-8"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    lengths: tuple[Tokens, ...] = option("tokens of a block", (4096, 8192, 16384))
    blocks: tuple[str, ...] = option("kinds of block", BLOCKS, choices=BLOCKS)
    peers: tuple[str, ...] | None = option(
        "kernels to compare (default: all that this kind of device can run)", None, choices=PEERS
    )
    heads: int = option("query heads", 8)
    kv_heads: int | None = option("key and value heads (default: as many as query heads)", None)
    head_dim: int = option("head size", 64)
    dtype: str = option("dtype of the operands", "float32", choices=("float32", "bfloat16"))
    kernel: str = option("our kernel", "auto")
    tile: TokensOr0 = option("our tile length (default: the kernel's choice, as in training)", 0)
    repeats: int = option("runs in each process", 3)
    rounds: int = option("processes for each peer, taking turns", 2)
    output: Path = option("folder for results", Path("runs/bench_kernels"))


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
