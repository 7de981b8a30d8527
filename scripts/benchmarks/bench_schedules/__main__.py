"""Compares schedules: bytes received, balance (tiles and seconds), and transfers that are hidden.

python -m scripts.benchmarks.bench_schedules bytes [--ranks 4 16 64 256] [--output FILE.json]
python -m scripts.benchmarks.bench_schedules balance [--ranks 2 3 4 8]
python -m scripts.benchmarks.bench_schedules overlap [--schedules ring] [--topology v5e:2x4]
python -m scripts.benchmarks.bench_schedules time [--lengths 2048 ... 32768] [--tiles 16]
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from data.outputs import output_file
from scripts.benchmarks.bench_schedules import balance_time
from scripts.benchmarks.bench_schedules.balance import measure
from scripts.benchmarks.bench_schedules.compiled import CASES, PODS, bytes_table, overlap_table
from scripts.benchmarks.commands import write_json
from trainer import arguments, entry
from trainer.options import Tokens, add_options, option

BALANCE = [
    ("ring", "contiguous"),
    ("ring", "striped"),
    ("ring", "zigzag"),
    ("balanced", "contiguous"),
    ({"name": "balanced", "split": True}, "contiguous"),
    ("attention2d", "striped"),
    ("ulysses", "contiguous"),
]


def balance_table(ranks, tiles: int) -> list[dict]:
    """Prints and returns the imbalance of schedules and layouts (see `balance.imbalance`)."""
    jax.config.update("jax_num_cpu_devices", max(ranks))
    rows = []
    print(
        f"{tiles} tiles a side of a block\n{'schedule':40} {'layout':12} {'P':>3} {'forward':>8} "
        f"{'backward':>8}"
    )
    for size, (schedule, layout) in itertools.product(ranks, BALANCE):
        row = {"schedule": str(schedule), **measure(schedule, layout, size, tiles)}
        rows.append(row)
        columns = " ".join(
            f"{row[direction]['imbalance']:8.4f}" for direction in ("forward", "backward")
        )
        print(f"{row['schedule']:40} {layout:12} {size:3} {columns}", flush=True)
    return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """The option that all tables share."""

    output: Path | None = option("also write this JSON file", None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BytesOptions(Output):
    """Bytes received per device and layer, from compiled texts for TPU pods."""

    ranks: tuple[int, ...] = option("numbers of ranks", (4, 16, 64, 256), choices=PODS)
    schedules: tuple[str, ...] = option("schedules", tuple(CASES), choices=CASES)
    tokens: Tokens = option("tokens of a rank", 2048)
    topology: str = option(
        "another pod, such as v5e:16x16, with as many chips as ranks, or a multiple", ""
    )
    kernel: str = option(
        "has no effect on transfers; `reference` compiles fastest if tokens are few",
        "xla",
        choices=("xla", "reference"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BalanceOptions(Output):
    """Imbalance of each schedule, from the tiles that the running kernels count."""

    ranks: tuple[int, ...] = option("numbers of ranks", (2, 3, 4, 8))
    tiles: int = option("tiles on a side of each rank's block", 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlapOptions(Output):
    """Which transfers of a small model's training step a kernel hides."""

    topology: str = option("the slice; all its chips are on the sequence axis", "v5e:2x4")
    schedules: tuple[str, ...] = option("schedules", ("ring",), choices=CASES)
    tokens: Tokens = option("tokens of a rank", 2048)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeOptions(Output):
    """The seconds gained by balance, on two devices of one CPU thread each."""

    lengths: tuple[Tokens, ...] = option("total tokens", (2048, 4096, 8192, 16384, 32768))
    tiles: int = option("tiles on a side of each device's block", 16)
    repeats: int = option("runs of each case; the median counts", 5)
    heads: int = option("number of heads", 2)
    head_dim: int = option("head size", 64)


# Command -> its options, and the function that prints and returns its table.
TABLES: dict[str, tuple[type, Callable[..., list[dict]]]] = {
    "bytes": (BytesOptions, bytes_table),
    "balance": (BalanceOptions, balance_table),
    "overlap": (OverlapOptions, overlap_table),
    "time": (TimeOptions, balance_time.time_table),
}


def work(table: str, options: dict[str, Any], output: Path | None) -> None:
    """Makes one command's table, and writes it with --output."""
    if output:
        output_file(output, b'"schedule"')
    jax.config.update("jax_platforms", "cpu")
    rows = TABLES[table][1](**options)
    if output:
        write_json(output, rows)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = arguments.CommandParser(
        prog="python -m scripts.benchmarks.bench_schedules",
        description=__doc__.splitlines()[0],
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(help="what to measure", dest="table", required=True)
    for name, (options, _) in TABLES.items():
        about = options.__doc__
        add_options(
            commands.add_parser(name, help=about, description=about, allow_abbrev=False), options
        )
    options_of_table = vars(parser.parse_args(argv))
    table, output = options_of_table.pop("table"), options_of_table.pop("output")
    return entry.run(lambda: work(table, options_of_table, output))


if __name__ == "__main__":
    sys.exit(main())
