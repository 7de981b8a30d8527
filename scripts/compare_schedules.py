"""`scripts.plan --compare`: every schedule and layout, ranked by the cost model's step time."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from data.errors import UserError
from data.outputs import output_file, write_text
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


def cost_jobs(args: argparse.Namespace) -> tuple[list[tuple[str, Any]], list[str]]:
    """Returns the cost model's jobs by schedule name, of the selected ones or all, and the layouts
    left out, each with the reason.

    Raises:
      UserError, ValueError: an option is invalid; the message is one line.
    """
    from scripts.plan_options import resolve_machine

    _check_options(args)
    resolve_machine(args)
    job = _on_hardware(args) if args.hardware else _on_machine(args)
    if args.schedule == "local" and job.sequence > 1:
        raise UserError(f"--schedule: found local for --sequence {job.sequence}; it needs 1")
    layouts, left_out = _layouts(args.layout, job)
    jobs = [
        (name, dataclasses.replace(job, schedule=SCHEDULES[name], layout=layout))
        for name in ([args.schedule] if args.schedule else SCHEDULES)
        for layout in layouts
        if name != "local" or job.sequence == 1
    ]
    return jobs, left_out


def _check_options(args: argparse.Namespace) -> None:
    """Raises UserError for options that a comparison does not read, lacks, or does not know."""
    for option, value in vars(args).items():
        if option not in READ and value not in (None, False):
            raise UserError(
                f"--{option.replace('_', '-')}: has no effect on a comparison of schedules; "
                f"remove it, and pass axes as {', '.join(f'--{axis}' for axis in AXES)}"
            )
    for option in ("model", "context"):
        if getattr(args, option) is None:
            raise UserError(f"--{option}: missing; a comparison of schedules needs it")
    if args.schedule is not None and not (
        isinstance(args.schedule, str) and args.schedule in SCHEDULES
    ):
        raise UserError(
            f"--schedule: found {args.schedule!r}; expected one of {', '.join(SCHEDULES)}"
        )


def _layouts(chosen: str | None, job: Any) -> tuple[list[str], list[str]]:
    """Returns the layouts that the job's length allows, of the chosen one or all, and those left
    out, each with the reason.

    Raises:
      ValueError: none is allowed.
    """
    from model.attention.layout import LAYOUTS, check_length

    layouts, refusals = [], {}
    for layout in [chosen] if chosen else LAYOUTS:
        try:
            check_length(job.length, job.sequence, layout)
            layouts.append(layout)
        except ValueError as error:
            refusals[layout] = error
    if not layouts:
        raise next(iter(refusals.values()))
    return layouts, [f"{layout} ({error})" for layout, error in refusals.items()]


def _on_hardware(args: argparse.Namespace) -> Any:
    """Returns the cost model's step on the machine of --hardware."""
    from planning.costs import HARDWARE, Sizes, TrainingStep
    from planning.parts import computed_sizes
    from planning.plan import DEFAULT_RECIPE
    from scripts.plan_options import named_model
    from trainer.build import layer_masks

    if args.hardware not in HARDWARE:
        raise UserError(
            f"--hardware: found {args.hardware!r}; the cost model has {', '.join(HARDWARE)}"
        )
    model = named_model(args.model)
    axes: dict[str, Any] = {axis: getattr(args, axis) or 1 for axis in AXES}
    return TrainingStep(
        Sizes.of(computed_sizes(model, DEFAULT_RECIPE.adapter, axes["tensor"])),
        HARDWARE[args.hardware],
        args.context,
        batch=args.batch or 1,
        **axes,
        remat=args.remat or TrainingStep.remat,
        masks=layer_masks(DEFAULT_RECIPE, model),
        needed=Sizes.of(model),
    )


def _on_machine(args: argparse.Namespace) -> Any:
    """Returns the cost model's step on all devices of --machine; without axes, all of them are on
    the sequence."""
    from planning.costs import HARDWARE, TrainingStep
    from planning.machines import device_count
    from planning.plan import Job, across_slices, check_dcn
    from scripts.plan_options import named_model
    from trainer.config.schema import MeshConfig

    if not args.topology:
        raise UserError(f"--compare: needs a --machine, or --hardware: {', '.join(HARDWARE)}")
    devices = device_count(args.topology)
    axes = {axis: getattr(args, axis) for axis in AXES if getattr(args, axis)}
    mesh = across_slices(MeshConfig(**(axes or {"sequence": devices})), args.topology)
    if mesh.devices != devices:
        raise UserError(
            f"mesh: {mesh.product} devices, but {args.topology} has {devices}; change an axis so "
            f"that the product is {devices}"
        )
    check_dcn(mesh, args.topology)
    job = Job.of(
        named_model(args.model),
        args.topology,
        args.context,
        batch=args.batch or 1,
        mesh=mesh,
        memory={"remat": args.remat or TrainingStep.remat},
    )
    step = job.training_step()
    if step is None:
        raise UserError(
            f"--compare: no time of {args.topology} is estimated: {job.untimed}; --hardware "
            f"compares on {', '.join(HARDWARE)}"
        )
    return step


def compare(args: argparse.Namespace) -> int:
    """Prints schedules and layouts, fastest first, and the rounds if there is only one; returns
    0."""
    if args.output:
        output_file(args.output, b'"exposed_seconds')
    jobs, left_out = cost_jobs(args)
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
    if left_out:
        print(f"left out: {', '.join(left_out)}")
    if any(mask.window for mask in job.masks):
        print("note: counts only what the model's windows leave visible")
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
        write_text(args.output, json.dumps({"estimates": rows, "rounds": rounds}, indent=2))
    return 0
