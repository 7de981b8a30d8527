"""Memory of a training step against length: what the compiler plans and what a run takes, and how far both are from a line.

    python -m scripts.benchmarks.bench_memory [--lengths 2048 4096 ...] [--output DIR]

Each length is a process of its own, on one CPU device. Its row is packed with documents of 2048 tokens: memory depends on the
row's shape alone, and time would be quadratic. Writes memory.json and memory.png.
"""
from __future__ import annotations

import argparse
import ctypes
import json
import os
import pathlib
import subprocess
import sys

import numpy as np

from data.paths import output_folder
from trainer import entry

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
DOCUMENT = 2048
CURVES = {"planned_mib": "by the compiler's plan", "measured_mib": "measured: resident memory that one step adds"}


def fit(lengths, values) -> dict[str, float]:
    """The least-squares line through values in MiB: bytes a token, MiB at length 0, worst miss as a share of the largest."""
    slope, start = np.polyfit(lengths, values, 1)
    miss = np.abs(np.polyval((slope, start), lengths) - values).max() / np.max(values)
    return {"bytes_per_token": slope * 2**20, "mib_at_0": start, "worst_residual": miss}


def measure(length: int, remat: str) -> dict[str, float]:
    """One step of the preset `tiny` on this process's first CPU device."""
    import jax

    from model.config import LlamaConfig
    from model.llama import Llama
    from model.memory.options import MemoryConfig
    from planning.compiled import memory
    from trainer.config.schema import MeshConfig, OptimizerConfig
    from trainer.mesh import make_mesh, place_batch
    from trainer.step import StepBuilder, text_batch

    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    model = Llama(LlamaConfig.preset("tiny"), mesh, schedule="local", memory=MemoryConfig(remat))
    builder = StepBuilder(model, model.loss, tuple(model.parameters), text_batch(1, length, mesh), OptimizerConfig(), 10)
    compiled = builder.lower_train().compile()
    planned = memory(compiled)["peak"] * 1024
    params = model.init(0)
    state = builder.init_optimizer(params)
    place = np.arange(length, dtype=np.int32)[None]
    batch = {"tokens": place % model.config.vocab_size, "targets": (place + 1) % model.config.vocab_size, "index": place,
             "segment_ids": place // DOCUMENT + 1, "positions": place % DOCUMENT,
             "loss_weights": np.ones((1, length), np.float32)}
    before = _fresh_peak()
    jax.block_until_ready(compiled(params, {}, state, place_batch(batch, mesh), np.int32(0)))
    return {"length": length, "planned_mib": planned, "measured_mib": (_peak() - before) / 2**20}


def _fresh_peak() -> int:
    """Bytes resident now; the peak that Linux keeps is counted from here on, and memory that compiling freed is given back."""
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """Largest resident memory of this process since `_fresh_peak`, in bytes."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def draw(rows: list[dict], fits: dict, path: pathlib.Path) -> None:
    """The points of both curves and their lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    lengths = np.array([row["length"] for row in rows])
    for name, label in CURVES.items():
        line = fits[name]
        points = axes.plot(lengths, [row[name] for row in rows], "o", label=label)[0]
        axes.plot(lengths, line["mib_at_0"] + line["bytes_per_token"] * lengths / 2**20, color=points.get_color(),
                  label=f"{line['bytes_per_token']:,.0f} bytes a token, off by {100 * line['worst_residual']:.1f}% at most")
    shown = lengths[lengths >= lengths.max() / 8]
    axes.set_xticks(shown, [f"{length / 1024:g}K" for length in shown])
    axes.set(xlabel="tokens in the row", ylabel="memory of the step, MiB", xlim=0, ylim=(0, axes.get_ylim()[1] * 1.3))
    axes.set_title("A training step of the model `tiny`, one device", fontsize=11)
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    figure.savefig(path, dpi=120)


def main(argv=None) -> int:
    """Measures, prints a table, and writes OUTPUT/memory.json and memory.png."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.bench_memory", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens in the row (default 2K ... 64K)")
    parser.add_argument("--remat", default="save_attention", help="what layers keep (default save_attention)")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/bench_memory"),
                        help="folder for results (default runs/bench_memory)")
    parser.add_argument("--one", action="store_true", help="measure the one length in this process, and print it as JSON")
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measure(args.lengths[0], args.remat)))
        return 0
    return entry.run(lambda: work(args))


def work(args) -> None:
    """Each length in a process of its own, so that each has its own peak."""
    output_folder(args.output)
    rows = []
    print("tokens   planned MiB   measured MiB")
    for length in args.lengths:
        command = [sys.executable, "-m", "scripts.benchmarks.bench_memory", "--one", "--lengths", str(length),
                   "--remat", args.remat]
        cpu = {**os.environ, "JAX_PLATFORMS": "cpu"}
        told = subprocess.run(command, env=cpu, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(told.stdout.splitlines()[-1]))
        print(f"{length:6}   {rows[-1]['planned_mib']:11.1f}   {rows[-1]['measured_mib']:12.1f}", flush=True)
    fits = {name: fit(args.lengths, [row[name] for row in rows]) for name in CURVES}
    for name, line in fits.items():
        print(f"{name:12} {line['mib_at_0']:.1f} MiB + {line['bytes_per_token']:,.0f} bytes a token; the worst point is off by "
              f"{100 * line['worst_residual']:.1f}% of the largest")
    (args.output / "memory.json").write_text(json.dumps({"remat": args.remat, "rows": rows, "lines": fits}, indent=2) + "\n")
    draw(rows, fits, args.output / "memory.png")


if __name__ == "__main__":
    sys.exit(main())
