"""Measures memory of a training step against length, planned and resident, and how far both are from a straight line.

    python -m scripts.benchmarks.bench_memory [--lengths 2048 4096 ...] [--output DIR]

Each length runs in a process of its own, on one CPU device. Its row is packed with documents of 2048 tokens: memory depends on
the row's shape alone, while the time of one long document would be quadratic. Writes memory.json and memory.png.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import pathlib
import sys

import numpy as np

from data.paths import output_folder
from scripts.benchmarks.commands import add_output_folder, in_own_process, make_parser, write_json
from trainer import entry

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
DOCUMENT = 2048
CURVES = {
    "planned_mib": "by the compiler's plan",
    "measured_mib": "measured: resident memory that one step adds",
}


def fit(lengths, values) -> dict[str, float]:
    """Returns the least-squares line through values in MiB: its slope in bytes a token, its MiB at length 0, and the largest
    residual as a share of the largest value."""
    slope, start = np.polyfit(lengths, values, 1)
    residual = np.abs(np.polyval((slope, start), lengths) - values).max() / np.max(values)
    return {"bytes_per_token": slope * 2**20, "mib_at_0": start, "worst_residual": residual}


def measure(length: int, remat: str) -> dict[str, float]:
    """Runs one step of the preset `tiny` on this process's first CPU device and returns its planned and measured MiB."""
    import jax

    from model.config import TransformerConfig
    from model.language_model import LanguageModel
    from model.memory.options import MemoryConfig
    from planning.compiled import memory
    from trainer.config.schema import MeshConfig
    from trainer.mesh import make_mesh, place_batch
    from trainer.step import StepBuilder
    from trainer.text import text_batch

    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    model = LanguageModel(
        TransformerConfig.preset("tiny"), mesh, schedule="local", memory=MemoryConfig(remat)
    )
    builder = StepBuilder(model, model.loss, text_batch(1, length, mesh))
    compiled = builder.lower_train().compile()
    planned = memory(compiled)["peak"] * 1024
    params = model.init(0)
    state = builder.init_optimizer(params)
    index = np.arange(length, dtype=np.int32)[None]
    batch = {
        "tokens": index % model.config.vocab_size,
        "targets": (index + 1) % model.config.vocab_size,
        "index": index,
        "segment_ids": index // DOCUMENT + 1,
        "positions": index % DOCUMENT,
        "loss_weights": np.ones((1, length), np.float32),
    }
    before = _fresh_peak()
    jax.block_until_ready(compiled(params, {}, state, place_batch(batch, mesh), np.int32(0)))
    return {"length": length, "planned_mib": planned, "measured_mib": (_peak() - before) / 2**20}


def _fresh_peak() -> int:
    """Resets the peak of resident memory that Linux keeps, after memory freed by compiling is returned; gives bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """Returns the largest resident memory of this process since `_fresh_peak`, in bytes."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def draw(rows: list[dict], fits: dict, path: pathlib.Path) -> None:
    """Draws the points of both curves and their lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    lengths = np.array([row["length"] for row in rows])
    for name, label in CURVES.items():
        line = fits[name]
        ends = np.array([0, lengths.max()])
        drawn = axes.plot(ends, line["mib_at_0"] + line["bytes_per_token"] * ends / 2**20)[0]
        slope = f"{line['bytes_per_token']:,.0f} bytes a token, off by {100 * line['worst_residual']:.1f}% at most"
        axes.plot(
            lengths,
            [row[name] for row in rows],
            "o",
            color=drawn.get_color(),
            label=f"{label}:\n{slope}",
        )
    step = lengths.max() // 8
    axes.set_xticks(
        range(0, lengths.max() + 1, step),
        [f"{length / 1024:g}K" if length else "0" for length in range(0, lengths.max() + 1, step)],
    )
    axes.set(
        xlabel="tokens in the row",
        ylabel="memory of the step, MiB",
        xlim=0,
        ylim=(0, axes.get_ylim()[1] * 1.2),
    )
    axes.set_title(
        "Memory of a training step grows with the length: model `tiny`, one device", fontsize=11
    )
    axes.legend(frameon=False, loc="upper left", fontsize=9, labelspacing=0.8)
    figure.savefig(path, dpi=120)


def work(args: argparse.Namespace) -> None:
    """Measures each length, prints a table, and writes OUTPUT/memory.json and memory.png."""
    output_folder(args.output)
    rows = []
    print("tokens   planned MiB   measured MiB")
    for length in args.lengths:
        rows.append(
            in_own_process(
                "bench_memory",
                "--one",
                "--lengths",
                str(length),
                "--remat",
                args.remat,
                environment={"JAX_PLATFORMS": "cpu"},
            )
        )
        print(
            f"{length:6}   {rows[-1]['planned_mib']:11.1f}   {rows[-1]['measured_mib']:12.1f}",
            flush=True,
        )
    fits = {name: fit(args.lengths, [row[name] for row in rows]) for name in CURVES}
    for name, line in fits.items():
        print(
            f"{name:12} {line['mib_at_0']:.1f} MiB + {line['bytes_per_token']:,.0f} bytes a token; the worst point is off by "
            f"{100 * line['worst_residual']:.1f}% of the largest"
        )
    write_json(args.output / "memory.json", {"remat": args.remat, "rows": rows, "lines": fits})
    draw(rows, fits, args.output / "memory.png")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser("bench_memory", __doc__)
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=LENGTHS,
        help="tokens in the row (default 2K ... 64K)",
    )
    parser.add_argument(
        "--remat", default="save_attention", help="what layers keep (default save_attention)"
    )
    add_output_folder(parser, "runs/bench_memory")
    parser.add_argument(
        "--one",
        action="store_true",
        help="measure the one length in this process, and print it as JSON",
    )
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measure(args.lengths[0], args.remat)))
        return 0
    return entry.run(lambda: work(args))


if __name__ == "__main__":
    sys.exit(main())
