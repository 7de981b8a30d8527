"""Plans a training step for a machine you do not have: memory, time and price.

    python -m scripts.plan --model llama-3.1-8b --machine 8xH100 --context 128K
    python -m scripts.plan --model llama-3.1-8b --machine v5p-32 --context 1M \\
        --price-per-device-hour 4.2 --write my_recipe.yaml
    python -m scripts.plan --config configs/sharegpt_llama7b_1m.yaml --model llama-7b \\
        --machine v4:4x4x4 --compile
    python -m scripts.plan --model llama-7b --machine v5e-256 --context 1M --search --compile \\
        --output plan

The answer is an estimate, and takes seconds. With --compile the machine's real compiler compiles
train.py's step and reports memory and communication. --config plans a recipe; other options take
precedence. Without a recipe, mesh, schedule or memory option, the planner chooses the combination
with the fastest estimate that fits, as train.py does; with a recipe, what it leaves to the planner
(mesh: auto). --best makes it choose in any case. --search doubles the context until nothing fits.
--compare prints every schedule and layout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import UserError
from data.outputs import PICTURE, PICTURE_METADATA, output_file, output_files, write_text
from data.untrusted_files import read_text
from scripts.compare_schedules import compare
from scripts.plan_options import free_sections, jobs_of, parser
from trainer import entry
from trainer.config.yaml_text import MAX_BYTES, parse

if TYPE_CHECKING:
    from planning.memory_estimate import MemoryEstimate
    from planning.plan import DoesNotFit, Job

PLAN = b'"topology"'  # in every JSON file that this command writes
RECIPE = b"python -m scripts.plan"  # in every recipe that this command writes


def estimates(plan: dict[str, Any], job: Job, args: argparse.Namespace) -> dict[str, float]:
    """Returns the cost model's estimates of a planned job; empty for unlisted hardware.

    `_low` and `_high` are the ends of ranges based on measured steps of other systems.
    """
    estimate, seconds = job.estimate(), job.time_range()
    if estimate is None or seconds is None:
        return {}
    tokens = estimate.tokens_per_second * estimate.seconds
    figures = {"estimated_exposed_seconds": estimate.step.exposed}
    for end, step in (("", estimate.seconds), ("_low", seconds.low), ("_high", seconds.high)):
        figures[f"estimated_step_seconds{end}"] = step
        if args.tokens:
            figures[f"estimated_hours{end}"] = hours = args.tokens / tokens * step / 3600
            if args.price_per_device_hour:
                figures[f"estimated_cost{end}"] = (
                    hours * plan["devices"] * args.price_per_device_hour
                )
    for end, step in (("", estimate.seconds), ("_low", seconds.high), ("_high", seconds.low)):
        figures[f"estimated_mfu{end}"] = estimate.mfu * estimate.seconds / step
        figures[f"estimated_tokens_per_second{end}"] = tokens / step
    return figures


def show(plan: dict[str, Any]) -> None:
    """Prints a compiled plan as a table: whether it fits, memory by component, and transfers."""
    device = f" of {plan['device_gib']:.2f}" if plan["device_gib"] else ""
    print(
        f"fits, by the compiler: {plan['peak_gib']:.2f}{device} GiB per device, "
        f"{plan['host_gib']:.2f} GiB of host memory per device"
    )
    mesh = (
        ", ".join(f"{name} {size}" for name, size in plan["mesh"].items() if size and size != 1)
        or "one device"
    )
    sent = {
        kind: (
            f"{figures['times']:,.0f} times, {figures['received_gib']:.3f} GiB received, "
            f"{figures['hidden']:.1%} hidden by compute"
        )
        for kind, figures in (plan["communication"] or {}).items()
    }
    made = ", ".join(
        f"{name} {version}" for name, version in plan.get("made_with", {}).items() if version
    )
    for name, value in {**plan, "made_with": made, "mesh": mesh, **sent}.items():
        if (
            name != "communication"
            and not name.startswith("estimated_")
            and not (name.startswith("of_it") and not value)
        ):
            print(f"{name:28} {value:,.3f}" if isinstance(value, float) else f"{name:28} {value}")


def draw(tries: list[dict[str, Any]], plan: dict[str, Any], path: Path) -> None:
    """Plots memory over context, a line per policy; hollow marks do not fit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for remat in dict.fromkeys(row["remat"] for row in tries):
        rows = [row for row in tries if row["remat"] == remat and row["gib"] == row["gib"]]
        (line,) = axes.plot(
            [row["context"] for row in rows], [row["gib"] for row in rows], label=remat
        )
        for row in rows:
            axes.plot(
                row["context"],
                row["gib"],
                "o",
                color=line.get_color(),
                fillstyle="full" if row["fits"] else "none",
            )
    if plan["device_gib"]:
        axes.axhline(
            plan["device_gib"], color="black", linestyle="--", linewidth=1, label="available"
        )
    axes.set_xscale("log", base=2)
    contexts = sorted({row["context"] for row in tries})
    labels = [f"{x / 2**20:.4g}M" if x >= 2**20 else f"{x / 2**10:.4g}K" for x in contexts]
    axes.set_xticks(contexts, labels, minor=False)
    axes.set(
        xlabel="tokens per row",
        ylabel="GiB per device",
        ylim=(0, None),
        title=f"{plan['model']} on {plan['topology']} (hollow: does not fit)",
    )
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150, metadata=PICTURE_METADATA)


def run(args: argparse.Namespace) -> int:
    """Prints the answer, and with --compile also the compiler's plan; returns the exit status."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    if args.hardware or args.compare:
        return compare(args)
    if args.write:
        output_file(args.write, RECIPE)
    elif args.template:
        raise UserError("--template: is for the recipe of --write; with both it would work")
    jobs, status = jobs_of(args), 0
    if args.output:  # refuses an unusable path now, not after minutes of compiling
        check_outputs(args, len(jobs))
    for number, (job, suffix) in enumerate(zip(jobs, _suffixes(len(jobs)), strict=True), 1):
        if len(jobs) > 1:
            print(f"stage {number} of {len(jobs)}")
        status = max(status, run_job(job, args, suffix))
    return status


def run_job(job: Job, args: argparse.Namespace, suffix: str = "") -> int:
    """Prints the answer for one job; returns 1 if it does not fit, else 0.

    Args:
      suffix: appended to the output file's stem, for a recipe with stages.
    """
    from planning.memory_estimate import estimate_memory

    job = chosen_job(job, args)
    memory = estimate_memory(job)
    times = {"tokens": args.tokens, "price": args.price_per_device_hour}
    print_answer(job, memory, times)
    if args.compile:
        compiled = compile_job(job, args, suffix)
        if compiled is not None and args.write:
            write(compiled, args)
        return int(compiled is None)
    if args.write:
        write(job, args)
    print("this is an estimate; --compile uses the machine's compiler")
    if args.output:
        _write_json(_with_suffix(args.output, suffix), answer_as_json(job, memory, times))
    return int(memory.fits == "no")


def chosen_job(job: Job, args: argparse.Namespace) -> Job:
    """Returns the job with what the planner chooses for it, as `train.py` would; the job itself if
    nothing fits or nothing is to be chosen.

    Raises:
      UserError, ValueError: training would refuse the job.
    """
    from planning import answer
    from planning.machines import device_count
    from planning.plan import changed, check_dcn
    from planning.search import best_job
    from trainer.build import build_language_model
    from trainer.mesh import abstract_mesh

    free = free_sections(args, job)
    mesh, devices = job.run.mesh, device_count(job.topology)
    if mesh.devices != devices and "mesh" not in free:
        raise ValueError(
            f"mesh: {mesh.product} devices, but {job.topology} has {devices}; pass --mesh, or "
            "--best"
        )
    if args.search and not args.compile:
        job = answer.longest(job, {*free, "memory"}) or job
    elif free:
        job = best_job(job, free).job or job
    check_dcn(job.run.mesh, job.topology)
    run = changed(job.run, memory=job.memory)
    build_language_model(run, job.model, abstract_mesh(job.run.mesh))
    return job


def print_answer(job: Job, memory: MemoryEstimate, times: Mapping[str, Any]) -> None:
    """Prints the job, its memory and time, whether it fits, and if not, what would.

    Args:
      times: the options of `answer.time_figures`.
    """
    from planning import answer
    from trainer.build import run_notes

    print(answer.heading(job), answer.settings(job), *run_notes(job.run, job.model), "", sep="\n")
    lines = (*answer.memory_lines(memory), "", *answer.time_lines(job, **times), "")
    print(*lines, answer.verdict(memory), sep="\n")
    if memory.fits == "no":
        print(*(f"  {line}" for line in answer.advice(job, answer.plan_flags)), sep="\n")
    print(flush=True)


def answer_as_json(job: Job, memory: MemoryEstimate, times: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `print_answer` prints, for --output."""
    from planning import answer

    return {
        "model": job.name,
        "topology": job.topology,
        "context": job.context,
        "batch": job.batch,
        "fits": memory.fits,
        "settings": answer.settings(job),
        "estimated_gib": memory.total,
        "estimated_parts_gib": memory.parts,
        "estimated_host_gib": memory.on_host,
        **answer.time_figures(job, **times),
    }


def write(job: Job, args: argparse.Namespace) -> None:
    """Writes the job as a recipe, and checks that train.py accepts it."""
    from planning.recipe import names_model, recipe_of, recipe_text
    from trainer.config.load import load

    base = parse(read_text(args.config, most=MAX_BYTES), args.config) if args.config else {}
    is_path = args.model and ("/" in args.model or Path(args.model).is_dir())
    recipe = recipe_of(job, base, args.model if is_path else None, args.template)
    _require_template(recipe)
    write_text(args.write, recipe_text(job, recipe, args.write, args.model))
    data, words = recipe.get("data", {}), [] if names_model(recipe) else ["--model.path", "any"]
    words += (
        []
        if data.get("path") or data.get("sources") or "trajectories" in recipe
        else ["--data.path", "any"]
    )
    load(["--config", args.write, *words])
    print(f"wrote {args.write}; its first lines give the commands", "", sep="\n")


def _require_template(recipe: Mapping[str, Any]) -> None:
    """Raises UserError if the recipe uses the model's own chat template but the model has none.

    For a preset or a folder without a tokenizer this is unknown; the recipe's first lines then say
    what a base model needs.
    """
    from data.conversation import DEFAULT_TEMPLATE
    from data.sources import TURN_FORMATS
    from data.templates import jinja_template
    from trainer.model_source import open_model

    data, path = recipe.get("data", {}), recipe.get("model", {}).get("path")
    templates = [
        source.get("template") or data.get("template")
        for source in data.get("sources") or [{}]
        if source.get("format", "sharegpt") in TURN_FORMATS
    ]
    if not path or "trajectories" in recipe or DEFAULT_TEMPLATE not in templates:
        return
    try:
        tokenizer = open_model(path, weights=False).tokenizer()
    except (OSError, UserError, ValueError):  # no tokenizer here
        return
    try:
        jinja_template(DEFAULT_TEMPLATE, tokenizer)
    except UserError as error:
        raise UserError(str(error).replace("--data.template", "--template")) from None


def compile_job(job: Job, args: argparse.Namespace, suffix: str) -> Job | None:
    """Compiles the job, prints its plan and writes it to --output.

    Returns:
      The compiled job (with --search or --best, the chosen one); None if nothing fits.
    """
    from planning.plan import DoesNotFit, plan
    from planning.topology import compiling

    print(
        f"compiling {job.name}, {job.context:,} tokens, {job.axes} of {job.topology} (minutes for "
        "a pod)",
        file=sys.stderr,
    )
    try:
        with compiling():
            job, result, rest = (
                search_compiled(job, args) if args.search or args.best else (job, plan(job), {})
            )
    except DoesNotFit as error:
        print(f"does not fit, by {error.by}: {error}", file=sys.stderr)
        return None
    result |= estimates(result, job, args)
    show(result)
    if args.output and args.search:
        folder = Path(_with_suffix(args.output, suffix))
        _write_json(folder / "plan.json", {"longest": result, **rest})
        draw(rest["tries"], result, folder / "plan.png")
    elif args.output:
        _write_json(_with_suffix(args.output, suffix), result)
    return job


def check_outputs(args: argparse.Namespace, jobs: int) -> None:
    """Creates the folders of --output. Raises UserError if another program wrote a file there."""
    for suffix in _suffixes(jobs):
        path = _with_suffix(args.output, suffix)
        if args.search and args.compile:
            output_files(path, {"plan.json": PLAN, "plan.png": PICTURE})
        else:
            output_file(path, PLAN)


def _suffixes(jobs: int) -> list[str]:
    """Returns the suffixes of the jobs' outputs: one per stage, or none for a single job."""
    return [f"_{number}" for number in range(1, jobs + 1)] if jobs > 1 else [""]


def _with_suffix(path: str, suffix: str) -> Path:
    """Returns a path with a suffix before its extension: plan.json, _2 -> plan_2.json."""
    file = Path(path)
    return file.with_name(f"{file.stem}{suffix}{file.suffix}")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def search_compiled(
    job: Job, args: argparse.Namespace
) -> tuple[Job, dict[str, Any], dict[str, Any]]:
    """Returns the longest job that fits (with only --best, the best), its plan, and all attempts.

    Raises:
      DoesNotFit: nothing fits.
      ValueError: train.py refuses every choice.
    """
    from planning.plan import DoesNotFit
    from planning.search import (
        allowed_policies,
        candidates,
        every_choice,
        no_candidate,
        policies,
        search,
    )

    tries = []

    def on_try(job: Job, result: dict[str, Any] | DoesNotFit) -> None:
        fits, gib = (
            (False, result.needs_gib)
            if isinstance(result, DoesNotFit)
            else (True, result["peak_gib"])
        )
        schedule = str(job.run.attention.schedule)
        tries.append(
            {
                "context": job.context,
                "mesh": job.axes,
                "schedule": schedule,
                "remat": job.policy,
                "fits": fits,
                "gib": gib,
            }
        )
        print(
            f"{job.context:12,} tokens  {job.axes}  {schedule}  {job.policy:17} "
            f"{'fits' if fits else 'does not fit'}: {gib:.2f} GiB",
            flush=True,
        )

    most = {} if args.search else {"most": job.context}
    make = candidates if args.best else allowed_policies
    longest, best, refusal = search(job, make, on_try, **most)
    if longest is None or best is None:
        choices = (each for _, each in every_choice(job)) if args.best else policies(job)
        raise refusal or no_candidate(job, choices)
    print()
    return longest, best, {"next": None if refusal is None else str(refusal), "tries": tries}


def main(argv=None) -> int:
    """Returns 0 if the job fits or may fit, 1 if it does not, 2 if an option is invalid."""
    return entry.run(lambda: run(parser().parse_args(argv)))


if __name__ == "__main__":
    entry.leave(main())
