"""`scripts.plan --compare`: every schedule and layout, ranked by the cost model's step time."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from data.errors import UserError
from data.outputs import output_file
from model.attention.names import MESH_AXES
from model.attention.names import SCHEDULES as NAMES

SCHEDULES: dict[str, str | dict[str, Any]] = {
    **{name: name for name in NAMES},
    "ring_bidirectional": {"name": "ring", "bidirectional": True},
    "balanced_split": {"name": "balanced", "split": True},
    "attention2d_overlap": {"name": "attention2d", "overlap": True},
}
AXES = tuple(axis for axis in MESH_AXES if axis != "expert")
"""The axes that a comparison supports: the exchange of experts' tokens is not compared."""
# The options that a comparison reads.
READ = (
    "model",
    "topology",
    "hardware",
    "compare",
    "context",
    "batch",
    "schedule",
    "layout",
    "remat",
    "output",
    "no_download",
    *AXES,
)


def estimate_row(name: str, job: Any) -> dict[str, Any]:
    """Returns a job's estimate for the schedule `name`, as a flat dictionary."""
    from planning.costs import estimate, time_range

    result, seconds = estimate(job), time_range(job)
    return {
        "schedule": name,
        "layout": job.layout,
        "step_seconds": result.seconds,
        "step_seconds_low": seconds.low,
        "step_seconds_high": seconds.high,
        "exposed_seconds": result.step.exposed,
        "mfu": result.mfu,
        "tokens_per_second": result.tokens_per_second,
        "layer_forward_seconds": result.layer_forward.seconds,
        "layer_backward_seconds": result.layer_backward.seconds,
        "attention_forward_seconds": result.attention_forward.seconds,
        "attention_backward_seconds": result.attention_backward.seconds,
    }


def round_rows(job: Any) -> list[dict[str, Any]]:
    """Returns the rounds of one layer's attention, forward pass first."""
    from planning.costs import estimate

    result = estimate(job)
    return [
        {
            "pass": name,
            "round": number,
            "seconds": duration.seconds,
            "compute_seconds": duration.compute,
        }
        for name, durations in (
            ("forward", result.forward_rounds),
            ("backward", result.backward_rounds),
        )
        for number, duration in enumerate(durations)
    ]


def cost_jobs(args: argparse.Namespace) -> list[tuple[str, Any]]:
    """Returns the cost model's jobs by schedule name: the selected ones, or all.

    Raises:
      UserError, ValueError: an option is invalid; the message is one line.
    """
    from model.attention.layout import LAYOUTS
    from planning.costs import HARDWARE, Sizes, TrainingStep
    from planning.machines import device_count
    from planning.plan import Job
    from scripts.plan_options import named_model, resolve_machine

    for option, value in vars(args).items():
        if option not in READ and value not in (None, False):
            raise UserError(
                f"--{option.replace('_', '-')}: has no effect on a comparison of schedules; "
                f"remove it, and pass axes as {', '.join(f'--{axis}' for axis in AXES)}"
            )
    for option in ("model", "context"):
        if getattr(args, option) is None:
            raise UserError(f"--{option}: missing; a comparison of schedules needs it")
    resolve_machine(args)
    model = named_model(args.model)
    axes: dict[str, Any] = {axis: getattr(args, axis) or 1 for axis in AXES}
    if args.hardware:
        if args.hardware not in HARDWARE:
            raise UserError(
                f"--hardware: found {args.hardware!r}; the cost model has {', '.join(HARDWARE)}"
            )
        hardware = HARDWARE[args.hardware]
    else:
        planned = Job.of(model, args.topology or "", args.context) if args.topology else None
        if planned is None or planned.hardware is None:
            raise UserError(
                "--compare: needs a --machine that the cost model knows, or --hardware: "
                f"{', '.join(HARDWARE)}"
            )
        hardware = planned.hardware
        if not any(getattr(args, axis) for axis in AXES):
            axes["sequence"] = device_count(args.topology)
    job = TrainingStep(
        Sizes.of(model),
        hardware,
        args.context,
        args.batch or 1,
        **axes,
        remat=args.remat or "save_attention",
    )
    if args.schedule is not None and not (
        isinstance(args.schedule, str) and args.schedule in SCHEDULES
    ):
        raise UserError(
            f"--schedule: found {args.schedule!r}; expected one of {', '.join(SCHEDULES)}"
        )
    return [
        (name, dataclasses.replace(job, schedule=SCHEDULES[name], layout=layout))
        for name in ([args.schedule] if args.schedule else SCHEDULES)
        for layout in ([args.layout] if args.layout else LAYOUTS)
        if name != "local" or job.sequence == 1
    ]


def compare(args: argparse.Namespace) -> int:
    """Prints schedules and layouts, fastest first, and the rounds if there is only one; returns
    0."""
    if args.output:
        output_file(args.output, b'"exposed_seconds')
    jobs = cost_jobs(args)
    job = jobs[0][1]
    rows = sorted(
        (estimate_row(*named_job) for named_job in jobs), key=lambda row: row["step_seconds_high"]
    )
    print(
        f"training step of {args.model} on {args.hardware or args.topology}, fastest first; ranges "
        "go from the highest MFU measured on such machines to the slowest step measured on them; "
        "exposed: waiting for transfers"
    )
    print(f"{'schedule':20} {'layout':10} {'step, s':>18} {'exposed, s':>10} {'MFU, 0..1':>17}")
    for row in rows:
        low, high = (row["step_seconds"] / row[f"step_seconds_{end}"] for end in ("high", "low"))
        step = f"{row['step_seconds_low']:.4g} to {row['step_seconds_high']:.4g}"
        mfu = f"{low * row['mfu']:.2f} to {high * row['mfu']:.2f}"
        print(
            f"{row['schedule']:20} {row['layout']:10} {step:>18} {row['exposed_seconds']:10.3f} "
            f"{mfu:>17}"
        )
    heads = -(-job.sizes.query_heads // job.tensor)
    if heads % job.sequence and any(row["schedule"] == "ulysses" for row in rows):
        print(
            f"note: ulysses' {job.sequence} ranks share {heads} heads, padded to "
            f"{-(-heads // job.sequence) * job.sequence}, so its work grows in proportion (a "
            "smaller degree in USP avoids this)"
        )
    rounds = round_rows(job) if len(jobs) == 1 else []
    for row in rounds:
        print(
            f"{row['pass']:8} round {row['round']:3}  {1e3 * row['seconds']:10.3f} ms, of which "
            f"compute {1e3 * row['compute_seconds']:10.3f}"
        )
    if args.output:
        with open(args.output, "w", encoding="utf-8") as file:
            json.dump({"estimates": rows, "rounds": rounds}, file, indent=2)
    return 0
