"""Estimates a training step on absent machines: time, exposed communication and model FLOPs utilisation.

    python -m scripts.costs --model llama-7b --hardware v4 --context 1048576 --sequence 64 [--schedule ring --layout striped]

Without --schedule it compares all schedules and layouts; with it and --layout, it also shows the rounds of one layer's
attention. On TPUs the ranks are taken for a ring, so that the time of a schedule whose transfers pass over neighbours
(`balanced`, a short ring within `ulysses`) is an upper bound.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from data.paths import output_file
from model.attention.layout import LAYOUTS
from model.attention.schedules import SCHEDULES as NAMES
from model.config import LlamaConfig
from planning.costs import HARDWARE, Job, Sizes, estimate, time_range
from planning.costs.step import REMAT
from trainer import entry

SCHEDULES: dict[str, str | dict[str, Any]] = {
    **{name: name for name in NAMES}, "ring_bidirectional": {"name": "ring", "bidirectional": True},
    "balanced_split": {"name": "balanced", "split": True}, "attention2d_overlap": {"name": "attention2d", "overlap": True},
}


def estimate_row(name: str, job: Job) -> dict[str, Any]:
    """Returns the estimate of a job, whose schedule is called `name`, as a flat dictionary."""
    result, seconds = estimate(job), time_range(job)
    return {"schedule": name, "layout": job.layout, "step_seconds": result.seconds,
            "step_seconds_low": seconds.low, "step_seconds_high": seconds.high,
            "exposed_seconds": result.step.exposed, "mfu": result.mfu, "tokens_per_second": result.tokens_per_second,
            "layer_forward_seconds": result.layer_forward.seconds, "layer_backward_seconds": result.layer_backward.seconds,
            "attention_forward_seconds": result.attention_forward.seconds,
            "attention_backward_seconds": result.attention_backward.seconds}


def round_rows(job: Job) -> list[dict[str, Any]]:
    """Returns the rounds of one layer's attention, those of the forward pass first."""
    result = estimate(job)
    return [{"pass": name, "round": number, "seconds": duration.seconds, "compute_seconds": duration.compute}
            for name, durations in (("forward", result.forward_rounds), ("backward", result.backward_rounds))
            for number, duration in enumerate(durations)]


def main(argv: list[str] | None = None) -> int:
    """Prints a table of schedules and layouts, the fastest first; with --output also writes it as JSON."""
    parser = argparse.ArgumentParser(prog="python -m scripts.costs", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", required=True, help="a preset, such as llama-7b")
    parser.add_argument("--hardware", required=True, choices=HARDWARE)
    parser.add_argument("--context", type=entry.at_least_one, required=True, help="tokens in a row")
    parser.add_argument("--batch", type=entry.at_least_one, default=1, help="rows (default 1)")
    for axis in ("data", "fsdp", "tensor", "sequence"):
        parser.add_argument(f"--{axis}", type=entry.at_least_one, default=1,
                            help="devices along this axis of the mesh (default 1)")
    parser.add_argument("--schedule", choices=SCHEDULES, help="all of them unless given")
    parser.add_argument("--layout", choices=LAYOUTS, help="all of them unless given")
    parser.add_argument("--remat", default="save_attention", choices=REMAT, help="default save_attention")
    parser.add_argument("--output", help="also write what is printed to this JSON file")
    args = parser.parse_args(argv)
    return entry.run(lambda: work(args))


def work(args: argparse.Namespace) -> None:
    """Prints the estimates, and the rounds if a single schedule and layout is requested."""
    if args.output:
        output_file(args.output)
    job = Job(Sizes.of(LlamaConfig.preset(args.model)), HARDWARE[args.hardware], args.context, args.batch, args.data,
              args.fsdp, args.tensor, args.sequence, remat=args.remat)
    jobs = [(name, dataclasses.replace(job, schedule=SCHEDULES[name], layout=layout))
            for name in ([args.schedule] if args.schedule else SCHEDULES)
            for layout in ([args.layout] if args.layout else LAYOUTS) if name != "local" or args.sequence == 1]
    rows = sorted((estimate_row(*named_job) for named_job in jobs), key=lambda row: row["step_seconds_high"])
    print(f"{args.model} on {args.hardware}, a training step, the fastest first; from matrix products at full rate alone to as "
          "slow as the slowest step that others measured on such machines; exposed: waiting for transfers alone")
    print(f"{'schedule':20} {'layout':10} {'step, s':>18} {'exposed, s':>10} {'MFU, 0..1':>17}")
    for row in rows:
        low, high = (row["step_seconds"] / row[f"step_seconds_{end}"] for end in ("high", "low"))
        step = f"{row['step_seconds_low']:.4g} to {row['step_seconds_high']:.4g}"
        mfu = f"{low * row['mfu']:.2f} to {high * row['mfu']:.2f}"
        print(f"{row['schedule']:20} {row['layout']:10} {step:>18} {row['exposed_seconds']:10.3f} {mfu:>17}")
    heads = -(-job.sizes.query_heads // args.tensor)
    if heads % args.sequence and any(row["schedule"] == "ulysses" for row in rows):
        print(f"note: ulysses' {args.sequence} ranks share {heads} heads, which are padded to "
              f"{-(-heads // args.sequence) * args.sequence}: its work grows as much (a smaller degree in USP avoids it)")
    rounds = round_rows(jobs[0][1]) if len(jobs) == 1 else []
    for row in rounds:
        print(f"{row['pass']:8} round {row['round']:3}  {1e3 * row['seconds']:10.3f} ms, of it computing "
              f"{1e3 * row['compute_seconds']:10.3f}")
    if args.output:
        with open(args.output, "w", encoding="utf-8") as file:
            json.dump({"estimates": rows, "rounds": rounds}, file, indent=2)


if __name__ == "__main__":
    sys.exit(main())
