"""Compares the cost model with measured steps, from other projects and from one H200.

    python -m scripts.benchmarks.measured_steps [--output runs/measured_steps]

Our estimates use the schedule and remat policy closest to theirs. The table of 8B models has our
range at 32K, 128K and 1M tokens, one row, on 8 H100 and on 64 v5p chips, and others' measurements
at about that size.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from data.outputs import output_files
from model.config import TransformerConfig
from planning.costs import HARDWARE, Sizes, TrainingStep, estimate, time_range
from planning.costs.measured import (
    MILLION,
    THOUSAND,
    compared_steps,
    full_rate,
    measured_steps,
    over_upper_end,
    slowest,
)
from scripts.benchmarks.commands import write_json
from trainer.options import command, option

LENGTHS = (32 * THOUSAND, 128 * THOUSAND, MILLION)
# Machine -> number of devices, its name in the cost model, and length -> a remat policy that fits.
MACHINES = {
    "8 x H100": (8, "h100-infiniband", {MILLION: "offload_save_attention"}),
    "64 v5p": (64, "v5p", {}),
}


def measured_rows() -> list[dict[str, Any]]:
    """Returns the measured steps, each with our estimate, its relative error and our range."""
    rows = []
    for step in (*measured_steps(), *compared_steps()):
        seconds = time_range(step.job)
        ours = estimate(step.job).seconds
        rows.append(
            {
                "label": step.label,
                "source": step.source,
                "measured": step.seconds,
                "estimated": ours,
                "error": ours / step.seconds - 1,
                "low": seconds.low,
                "high": seconds.high,
                "over_full_rate": step.seconds / full_rate(step.job).seconds,
            }
        )
    return rows


def held_out_rows() -> list[dict[str, Any]]:
    """Returns each system's steps compared with ranges set by the other systems' steps."""
    rows = []
    for system in dict.fromkeys(step.system for step in measured_steps()):
        over = over_upper_end(system)
        rows.append(
            {
                "system": system,
                "steps": len(over),
                "within": sum(ratio <= 1 for ratio in over),
                "largest_over_high_end": max(over),
            }
        )
    return rows


def our_rows() -> list[dict[str, Any]]:
    """Returns our range for LLaMA-3.1-8B by machine and length, with others' measured 8B steps."""
    sizes = Sizes.of(TransformerConfig.preset("llama-3.1-8b"))
    rows = []
    for machine, (devices, hardware, policies) in MACHINES.items():
        for length in LENGTHS:
            job = TrainingStep(
                sizes,
                HARDWARE[hardware],
                length,
                sequence=devices,
                remat=policies.get(length, "save_attention"),
            )
            peers: dict[str, list[float]] = {}
            for step in measured_steps():
                program, model, *_ = step.label.split(", ")
                theirs = step.job
                if (theirs.length, theirs.devices, theirs.batch, model[-2:].lower()) == (
                    length,
                    devices,
                    1,
                    "8b",
                ) and (theirs.hardware is job.hardware):
                    peers.setdefault(program, []).append(step.seconds)
            seconds = time_range(job)
            rows.append(
                {
                    "machine": machine,
                    "length": length,
                    "remat": job.remat,
                    "low": seconds.low,
                    "high": seconds.high,
                    "peers": [
                        f"{program}: {min(times):g} to {max(times):g}"
                        for program, times in peers.items()
                    ],
                }
            )
    return rows


def work(args: Options) -> None:
    """Prints both tables, and writes OUTPUT/measured_steps.json."""
    output_files(args.output, {"measured_steps.json": b'"measured"'})
    rows, held_out, ours = measured_rows(), held_out_rows(), our_rows()
    print(f"{'step':52} {'measured':>9} {'estimated':>9} {'error':>6} {'our range, s':>18}  source")
    for row in rows:
        span = f"{row['low']:.3g} to {row['high']:.3g}"
        print(
            f"{row['label']:52} {row['measured']:9.2f} {row['estimated']:9.2f} "
            f"{row['error']:+6.0%} {span:>18}  {row['source']}"
        )
    worst = {
        machines: {"factor": slowest(machines)[0], "step": slowest(machines)[1].label}
        for machines in ("TPU", "GPU")
    }
    for machines, content in worst.items():
        print(
            f"{machines}: at most {content['factor']:.2f} times the step's time at full rate "
            f"({content['step']})"
        )
    for row in held_out:
        print(
            f"{row['system']}: {row['within']} of {row['steps']} steps within ranges set by other "
            f"systems' steps, the slowest {row['largest_over_high_end']:.2f} times the upper end"
        )
    for row in ours:
        print(
            f"{row['machine']:9} {row['length']:9,} tokens, {row['remat']}: {row['low']:.3g} to "
            f"{row['high']:.3g} s; measured: {', '.join(row['peers']) or 'nothing'}"
        )
    write_json(
        args.output / "measured_steps.json",
        {"measured": rows, "held_out": held_out, "ours": ours, "slowest": worst},
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    output: Path = option("folder for results", Path("runs/measured_steps"))


main = command(Options, work, output="output")


if __name__ == "__main__":
    sys.exit(main())
