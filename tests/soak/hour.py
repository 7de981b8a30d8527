"""Trains for an hour with checkpoints and evaluation, and samples memory, threads and open files:
python -m tests.soak.hour.

The samples go to OUT/samples.jsonl as they are taken. `python -m tests.soak.hour --summarize OUT`
draws docs/hour.png and writes docs/results/hour.json from them.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import yaml

from scripts.benchmarks.results import ROOT, renew, row
from tests import small_run

PICTURE = ROOT / "docs" / "hour.png"
# Samples: name, and growth per hour that counts as flat.
FLAT = {"memory_mib": ("memory, MiB", 64), "threads": ("threads", 4), "files": ("open files", 4)}
# Fraction of the samples since the first step left out of the slope, while caches fill.
WARM_UP = 0.25


def sample(pid: int) -> dict[str, float]:
    """Returns the memory in MiB, the threads and the open files of a process, from /proc.

    Memory is what the process has allocated: anonymous pages, resident or swapped out. File-backed
    pages come and go.
    """
    status = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    anonymous = sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))
    return {
        "memory_mib": anonymous / 1024,
        "threads": int(fields["Threads"]),
        "files": len(os.listdir(f"/proc/{pid}/fd")),
    }


def write_recipe(out: pathlib.Path) -> pathlib.Path:
    """Writes the recipe of a small run that would train for days, with frequent checkpoints and
    evaluations."""
    path = small_run.recipe(out, ROOT)
    fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    fields["mesh"] = {"fsdp": 1, "sequence": 2, "simulate": 2}
    fields["train"].update(steps=5_000_000, evaluate_every=200)
    fields["checkpoint"] = {"every": 100, "keep": 2}
    path.write_text(yaml.safe_dump(fields, sort_keys=False), encoding="utf-8")
    return path


def train(out: pathlib.Path, minutes: float, every: float) -> None:
    """Trains for this many minutes with a sample every `every` seconds; ends the run with
    SIGTERM."""
    out.mkdir(parents=True, exist_ok=True)
    run = out / "run"
    process = small_run.start(ROOT, write_recipe(out), run)
    start, next_sample = time.monotonic(), 0.0
    try:
        with (out / "samples.jsonl").open("w", encoding="utf-8") as file:
            while (seconds := time.monotonic() - start) < 60 * minutes:
                if process.poll() is not None:
                    raise SystemExit(
                        f"the run ended after {seconds:.0f} s with {process.returncode}; see "
                        f"{run}.log"
                    )
                if seconds >= next_sample:
                    row = {
                        "seconds": round(seconds, 1),
                        "steps": small_run.steps_logged(run),
                        **sample(process.pid),
                    }
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                    next_sample += every
                time.sleep(0.2)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                print("the run ended with", process.wait(timeout=300))
            except subprocess.TimeoutExpired:
                process.kill()


def warmed_up(samples: list[dict]) -> list[dict]:
    """Returns the samples that can show growth: those since the first step, without the first
    WARM_UP."""
    training = [sample for sample in samples if sample["steps"]]
    return training[int(len(training) * WARM_UP) :]


def slope(samples: list[dict], name: str) -> float:
    """Returns how much `name` grew per hour, by least squares."""
    return float(
        np.polyfit(
            [sample["seconds"] / 3600 for sample in samples],
            [sample[name] for sample in samples],
            1,
        )[0]
    )


def summarize(out: pathlib.Path) -> None:
    """Draws the samples and writes the result file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    samples = [
        json.loads(line)
        for line in (out / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    rest = warmed_up(samples)
    minutes, steps = samples[-1]["seconds"] / 60, samples[-1]["steps"]
    figure, panels = plt.subplots(3, 1, figsize=(7, 6), sharex=True, layout="constrained")
    rows = {}
    for axes, (name, (label, limit)) in zip(panels, FLAT.items(), strict=True):
        axes.plot(
            [sample["seconds"] / 60 for sample in samples],
            [sample[name] for sample in samples],
            linewidth=1,
        )
        axes.set(ylabel=label, ylim=(0, None))
        values, growth = [sample[name] for sample in rest], slope(rest, name)
        rows[name] = row(
            f"{label}: growth per hour",
            f"{growth:+.1f} ({min(values):.0f} to {max(values):.0f})",
            f"at most {limit}",
            growth <= limit,
        )
    panels[-1].set_xlabel("minutes since the start")
    figure.suptitle(f"{minutes:.0f} minutes, {steps:,} steps", fontsize="medium")
    rows["length"] = row(
        "length of the run",
        f"{minutes:.0f} minutes, {steps:,} steps",
        "60 minutes",
        minutes >= 59.5,
    )
    renew("hour", rows, seconds=60 * minutes)
    figure.savefig(PICTURE, dpi=110)  # after the result, which records whether the tree had changes
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Trains, or draws and records; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.hour", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / ".cache" / "soak" / "hour")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=5, help="seconds between samples")
    parser.add_argument(
        "--summarize",
        type=pathlib.Path,
        metavar="OUT",
        help="draw and record the samples of this folder",
    )
    args = parser.parse_args(argv)
    if args.summarize:
        summarize(args.summarize)
    else:
        train(args.out, args.minutes, args.every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
