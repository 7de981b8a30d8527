"""Plans a training step on an absent pod: the real compiler compiles the step that train.py runs, and says what it takes.

    python -m scripts.plan --model llama-7b --topology v4:4x4x4 --context 1048576
    python -m scripts.plan --model llama-7b --topology v5e:16x16 --context 1048576 --search --output plan
    python -m scripts.plan --config configs/sharegpt_llama7b_1m.yaml --model llama-7b --topology v4:4x4x4

With --config a recipe is planned; options beside it take precedence. --search doubles the context until none of the memory
policies fits, tried from the fastest to the one that keeps least; --best tries meshes, schedules and policies in the order of
their estimated time, and takes the first that fits. Memory and collectives are the compiler's own figures; step time, MFU,
hours and money are estimates of the cost model.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import typing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.memory.options import MemoryConfig
from planning.memory_options import MEMORY_OPTIONS
from trainer.config.schema import AttentionConfig
from trainer.config.yaml_text import parse

if TYPE_CHECKING:
    from model.config import LlamaConfig
    from planning.plan import DoesNotFit, Job
    from trainer.config.schema import MeshConfig, RunConfig


def parser() -> argparse.ArgumentParser:
    """The command's options; those that are not given are the recipe's, or train.py's defaults."""
    options = argparse.ArgumentParser(prog="python -m scripts.plan", description=__doc__.splitlines()[0], allow_abbrev=False)
    options.add_argument("--config", help="a recipe")
    options.add_argument("--model", help="a preset such as llama-7b, or a model's folder (its config.json is enough); "
                         "the recipe's own unless given")
    options.add_argument("--topology", required=True, help="such as v4:4x4x4, 2xv5e:16x16 (2 slices), h100:8, "
                         "a100:4x8 (4 hosts of 8)")
    options.add_argument("--context", type=int, help="tokens in a row; with --search the first one tried")
    options.add_argument("--mesh", help="such as fsdp=8,sequence=8 or tensor=8,sequence_parallel=1; "
                         "all devices on sequence unless given")
    options.add_argument("--batch", type=int, help="rows (default 1)")
    options.add_argument("--schedule", type=partial(parse, source="--schedule"),
                         help="as a recipe's attention.schedule (default ring)")
    options.add_argument("--layout", choices=typing.get_args(typing.get_type_hints(AttentionConfig)["layout"]),
                         help="(default striped)")
    _add_memory_options(options)
    options.add_argument("--host-gib", type=float, help="each device's share of the host's memory in GiB; what needs more does "
                         "not fit (default: what such hosts have)")
    options.add_argument("--best", action="store_true", help="choose mesh, schedule and policy too: of those that fit, the "
                         "one that the cost model thinks fastest")
    options.add_argument("--search", action="store_true", help="find the longest context that fits, and the policy (with "
                         "--best also mesh and schedule) that holds it")
    options.add_argument("--tokens", type=float, help="tokens to train on: adds hours")
    options.add_argument("--price-per-device-hour", type=float, help="adds money to the hours")
    options.add_argument("--output", help="also write the plan to this JSON file; with --search to this folder, with a picture")
    return options


def _add_memory_options(options: argparse.ArgumentParser) -> None:
    """Adds a flag for each memory option that a plan varies, with the type and the text that MemoryConfig declares."""
    import docstring_parser

    types = typing.get_type_hints(MemoryConfig)
    fields = docstring_parser.parse_from_object(MemoryConfig).params
    documented = {field.arg_name: field.description or "" for field in fields}
    documented["attention_groups"] += " 0: a group for each key/value head of a device."
    for name in MEMORY_OPTIONS:
        flag, about = "--" + name.replace("_", "-"), documented[name].replace("%", "%%")
        if types[name] is bool:
            options.add_argument(flag, action="store_const", const=True, help=about)
        elif choices := typing.get_args(types[name]):
            options.add_argument(flag, choices=choices, help=f"{about} (default {getattr(MemoryConfig, name)})")
        else:
            options.add_argument(flag, type=types[name], help=f"{about} (default {getattr(MemoryConfig, name)})")


def job_of(args: argparse.Namespace) -> Job:
    """The job that the options describe.

    Raises:
      UserError, ValueError: an option or the recipe is wrong.
    """
    from planning.plan import Job, changed
    from planning.topology import host_gib, topology_devices
    from trainer.config.schema import MeshConfig

    recipe = _recipe(args)
    memory = {name: getattr(args, name) for name in MEMORY_OPTIONS if getattr(args, name) is not None}
    group_per_key_head = memory.get("attention_groups") == 0
    if group_per_key_head:
        del memory["attention_groups"]
    own_mesh = dataclasses.replace(recipe.mesh, simulate=0) if args.config else None
    mesh = mesh_of(args.mesh) or own_mesh or MeshConfig(sequence=len(topology_devices(args.topology)))
    run = changed(
        recipe, mesh=mesh, memory=memory,
        data={} if args.context is None else {"context_length": args.context},
        train={} if args.batch is None else {"batch_size": args.batch},
        attention={name: getattr(args, name) for name in ("schedule", "layout") if getattr(args, name) is not None})
    return Job(run, _model(args, recipe), args.topology, args.model or recipe.model.path or recipe.model.preset or recipe.name,
               group_per_key_head, host_gib(args.topology) if args.host_gib is None else args.host_gib)


def _recipe(args: argparse.Namespace) -> RunConfig:
    """The recipe of --config, or one with all defaults. Raises UserError."""
    from data.errors import UserError
    from planning.plan import PLAIN
    from trainer.config.load import load

    if not args.config:
        for option in ("model", "context"):
            if getattr(args, option) is None:
                raise UserError(f"--{option}: missing; only a recipe (--config) goes without")
        return PLAIN
    try:
        if _learns_from_trajectories(args.config):
            return load(["--config", args.config])
        # A recipe may leave the data and the model to the command line, and a plan needs no data.
        return load(["--config", args.config, "--data.path", "any", *(["--model.path", "any"] if args.model else [])])
    except UserError as error:
        raise UserError(str(error).replace("--model.path HF_DIR", "--model with a preset or a model's folder")) from None


def _learns_from_trajectories(path: str) -> bool:
    """Whether the file is a recipe with a section `trajectories`; False also where it cannot be read, which `load` reports."""
    from data.errors import UserError

    try:
        recipe = parse(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, ValueError, UserError):
        return False
    return isinstance(recipe, dict) and "trajectories" in recipe


def _model(args: argparse.Namespace, recipe: RunConfig) -> LlamaConfig:
    """The shape of the model that --model or the recipe names. Raises UserError, ValueError."""
    from model.config import LlamaConfig
    from trainer.model_source import choose_model, open_model
    from trainer.trajectories import trajectory_model

    if recipe.trajectories.path:
        return trajectory_model(recipe)
    if args.model is None:
        return choose_model(recipe.model).config
    return open_model(args.model).config if Path(args.model).expanduser().is_dir() else LlamaConfig.preset(args.model)


def mesh_of(text: str | None) -> MeshConfig | None:
    """fsdp=8,sequence=8 -> MeshConfig, where dcn.data=2 is a factor of mesh.dcn; None for nothing. Raises ValueError."""
    from trainer.config.schema import MeshConfig

    try:
        sizes = dict(part.split("=") for part in (text or "").split(",") if part)
        dcn = {axis.removeprefix("dcn."): int(sizes.pop(axis)) for axis in list(sizes) if axis.startswith("dcn.")}
        axes: dict[str, Any] = {axis: int(size) for axis, size in sizes.items()}
        return MeshConfig(**axes, dcn=dcn) if axes else None
    except (TypeError, ValueError):
        raise ValueError(f"--mesh: found {text!r}; write axis=size,... with data, fsdp, tensor, sequence") from None


def estimates(plan: dict[str, Any], job: Job, args: argparse.Namespace) -> dict[str, float]:
    """The cost model's estimates of a planned job, and with `_low` and `_high` the ends of their ranges by the steps that
    others measured; empty for hardware that it does not list."""
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
                figures[f"estimated_cost{end}"] = hours * plan["devices"] * args.price_per_device_hour
    for end, step in (("", estimate.seconds), ("_low", seconds.high), ("_high", seconds.low)):
        figures[f"estimated_mfu{end}"] = estimate.mfu * estimate.seconds / step
        figures[f"estimated_tokens_per_second{end}"] = tokens / step
    return figures


def show(plan: dict[str, Any]) -> None:
    """Prints a plan as a table: that it fits, what its memory is made of, what is sent."""
    device = f" of {plan['device_gib']:.2f}" if plan["device_gib"] else ""
    if "estimated_step_seconds" in plan:
        print("times: from matrix products at full rate alone, to as slow as the slowest step that others measured on such "
              "machines")
    print(f"fits: {plan['peak_gib']:.2f}{device} GiB of each device, {plan['host_gib']:.2f} GiB of its host")
    mesh = ", ".join(f"{name} {size}" for name, size in plan["mesh"].items() if size and size != 1) or "one device"
    sent = {kind: f"{figures['times']:,.0f} times, {figures['received_gib']:.3f} GiB received, "
                  f"{figures['hidden']:.1%} of it beside compute" for kind, figures in (plan["communication"] or {}).items()}
    ends = ("_low", "_high")
    made = ", ".join(f"{name} {version}" for name, version in plan.get("made_with", {}).items() if version)
    for name, value in {**plan, "made_with": made, "mesh": mesh, **sent}.items():
        if f"{name}_low" in plan:
            low, high = (plan[name + end] for end in ends)
            print(f"{name:28} {low:,.3g} to {high:,.3g}")
        elif name != "communication" and not name.endswith(ends) and not (name.startswith("of_it") and not value):
            print(f"{name:28} {value:,.3f}" if isinstance(value, float) else f"{name:28} {value}")


def draw(tries: list[dict[str, Any]], plan: dict[str, Any], path: Path) -> None:
    """Draws memory against context, one line for each policy; the marks of what did not fit are hollow."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for remat in dict.fromkeys(row["remat"] for row in tries):
        rows = [row for row in tries if row["remat"] == remat and row["gib"] == row["gib"]]
        line, = axes.plot([row["context"] for row in rows], [row["gib"] for row in rows], label=remat)
        for row in rows:
            axes.plot(row["context"], row["gib"], "o", color=line.get_color(), fillstyle="full" if row["fits"] else "none")
    if plan["device_gib"]:
        axes.axhline(plan["device_gib"], color="black", linestyle="--", linewidth=1, label="a device has")
    axes.set_xscale("log", base=2)
    contexts = sorted({row["context"] for row in tries})
    axes.set_xticks(contexts, [f"{x >> 20}M" if x >= 1 << 20 else f"{x >> 10}K" for x in contexts], minor=False)
    axes.set(xlabel="tokens in a row", ylabel="GiB a device", ylim=(0, None), title=f"{plan['model']} on {plan['topology']} "
             "(hollow: does not fit)")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def run(args: argparse.Namespace) -> int:
    """Makes one plan, or searches for the best or the longest; returns the exit status."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from planning.plan import DoesNotFit, plan

    job = job_of(args)
    if args.output:  # an unusable folder is refused now, not after the compiler's minutes
        (Path(args.output) if args.search else Path(args.output).parent).mkdir(parents=True, exist_ok=True)
    print(f"compiling {job.name}, {job.context:,} tokens, {job.axes} of {job.topology} (minutes for a pod)", file=sys.stderr)
    try:
        job, result, rest = searched(job, args) if args.search or args.best else (job, plan(job), {})
    except DoesNotFit as error:
        print(f"does not fit: {error}", file=sys.stderr)
        return 1
    result |= estimates(result, job, args)
    show(result)
    if args.output and args.search:
        folder = Path(args.output)
        (folder / "plan.json").write_text(json.dumps({"longest": result, **rest}, indent=2) + "\n", encoding="utf-8")
        draw(rest["tries"], result, folder / "plan.png")
    elif args.output:
        Path(args.output).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def searched(job: Job, args: argparse.Namespace) -> tuple[Job, dict[str, Any], dict[str, Any]]:
    """The longest job that fits (with --best alone the best one of its context), its plan, and what was tried on the way.

    Raises:
      DoesNotFit: nothing fits; ValueError: no mesh suits the length.
    """
    from planning.plan import DoesNotFit
    from planning.search import policies, search, ways

    tries = []

    def on_try(job: Job, result: dict[str, Any] | DoesNotFit) -> None:
        fits, gib = (False, result.needs_gib) if isinstance(result, DoesNotFit) else (True, result["peak_gib"])
        schedule = str(job.run.attention.schedule)
        tries.append({"context": job.context, "mesh": job.axes, "schedule": schedule, "remat": job.policy,
                      "fits": fits, "gib": gib})
        print(f"{job.context:12,} tokens  {job.axes}  {schedule}  {job.policy:17} "
              f"{'fits' if fits else 'does not fit'}: {gib:.2f} GiB", flush=True)

    most = {} if args.search else {"most": job.context}
    longest, best, refusal = search(job, ways if args.best else policies, on_try, **most)
    if longest is None or best is None:
        raise refusal or ValueError("--best: no mesh of these devices suits this length")
    print()
    return longest, best, {"next": None if refusal is None else str(refusal), "tries": tries}


def main(argv=None) -> int:
    """Prints the plan as a table; returns 1 where the job does not fit, 2 where an option is wrong."""
    from data.errors import UserError

    try:
        return run(parser().parse_args(argv))
    except (ValueError, OSError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
