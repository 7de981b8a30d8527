"""Says what a training step takes on a machine that is not here: memory, time and price at once, then the compiler's own plan.

    python -m scripts.plan --model llama-3.1-8b --machine 8xH100 --context 128K
    python -m scripts.plan --model llama-3.1-8b --machine v5p-32 --context 1M --price-per-device-hour 4.2 --write my_recipe.yaml
    python -m scripts.plan --config configs/sharegpt_llama7b_1m.yaml --model llama-7b --machine v4:4x4x4 --compile
    python -m scripts.plan --model llama-7b --machine v5e-256 --context 1M --search --compile --output plan

The answer is an estimate, and comes in seconds. --compile lets the machine's real compiler compile the step that train.py runs:
memory and communication are then its own figures. With --config a recipe is planned; options beside it take precedence. Without
a recipe, mesh, schedule or memory option the fastest way that fits is chosen, by the estimates. --best chooses in any case.
--search doubles the context until nothing fits. --compare prints every schedule and layout.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import typing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.memory.options import MemoryConfig
from planning.machines import EXAMPLES, topology_of
from planning.memory_options import MEMORY_OPTIONS
from scripts.compare_schedules import compare
from trainer import entry
from trainer.config.schema import MESH_AXES, AttentionConfig
from trainer.config.yaml_text import parse

if TYPE_CHECKING:
    from model.config import LlamaConfig
    from planning.plan import DoesNotFit, Job
    from trainer.config.schema import MeshConfig, RunConfig


def parser() -> entry.CommandParser:
    """The command's options; those that are not given are the recipe's, or train.py's defaults."""
    options = entry.CommandParser(prog="python -m scripts.plan", description=__doc__.splitlines()[0], allow_abbrev=False)
    options.add_argument("--config", help="a recipe")
    options.add_argument("--model", help="a preset such as llama-7b, a model's folder (its config.json is enough), or "
                         "org/name in the Hugging Face cache; the recipe's own unless given")
    options.add_argument("--machine", "--topology", dest="topology", type=_checked(topology_of), metavar="MACHINE",
                         help=f"such as {EXAMPLES}")
    options.add_argument("--gpu-memory", type=float, metavar="GIB", help="memory of a GPU, in place of the table's; with "
                         "--machine gpu, 4xgpu of any GPU")
    options.add_argument("--context", type=_checked(tokens_of), help="tokens in a row, such as 64K or 1M; with --search the "
                         "first one tried")
    options.add_argument("--mesh", help="such as fsdp=8,sequence=8 or tensor=8,sequence_parallel=1")
    for axis in MESH_AXES:
        options.add_argument(f"--{axis}", type=entry.at_least_one, help=f"devices along the axis {axis}, as in --mesh")
    options.add_argument("--batch", type=entry.at_least_one, help="rows (default 1)")
    options.add_argument("--schedule", type=partial(parse, source="--schedule"),
                         help="as a recipe's attention.schedule (default ring)")
    options.add_argument("--layout", choices=typing.get_args(typing.get_type_hints(AttentionConfig)["layout"]),
                         help="(default striped)")
    _add_memory_options(options)
    options.add_argument("--host-gib", type=float, help="each device's share of the host's memory in GiB; what needs more does "
                         "not fit (default: what such hosts have)")
    options.add_argument("--best", action="store_true", help="choose mesh and policy, with --compile also the schedule: of "
                         "those that fit, the one that the cost model thinks fastest")
    options.add_argument("--search", action="store_true", help="find the longest context that fits, and the policy (with "
                         "--best also mesh and schedule) that holds it")
    options.add_argument("--compare", action="store_true", help="print the time of every schedule and layout")
    options.add_argument("--hardware", help="compares them on this machine of the cost model, such as v4 or a100-ethernet")
    options.add_argument("--tokens", type=_checked(tokens_of), help="tokens to train on, such as 100M: adds hours")
    options.add_argument("--price-per-device-hour", type=float, help="adds money")
    options.add_argument("--compile", action="store_true", help="also let the machine's compiler say what the step takes")
    options.add_argument("--write", metavar="RECIPE.yaml", help="write the plan as a recipe, with the launcher's command")
    options.add_argument("--output", help="also write what is printed to this JSON file, with --compile the compiler's plan; "
                         "with --search --compile to this folder, with a picture")
    return options


def _checked(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """The argparse type of a function whose ValueErrors are to be printed as they are."""
    def checked(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix("--machine: ")) from None
    return checked


def tokens_of(text: str) -> int:
    """Returns a number of tokens: 4096, 64K, 1M, 1_048_576. K and M are powers of two where the number before them is whole.

    Raises:
      ValueError: no number of at least 1.
    """
    number = text.strip().replace(",", "").replace("_", "").lower()
    factor = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "b": 1 << 30}.get(number[-1:], 1)
    try:
        value = float(number[:-1] if factor > 1 else number) * factor
    except ValueError:
        value = 0.0
    if value < 1 or value != int(value):
        raise ValueError(f"found {text}; write a number of tokens such as 4096, 64K or 1M")
    return int(value)


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


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """The jobs that the options describe: one, or one for each stage of a recipe with stages.

    Raises:
      UserError, ValueError: an option or the recipe is wrong.
    """
    from data.errors import UserError
    from trainer.stages import stages_of

    if not args.topology:
        raise UserError(f"--machine: missing; write {EXAMPLES}")
    recipe = _recipe(args)
    model = _model(args, recipe)
    if not recipe.stages:
        return [_job(args, recipe, model)]
    for option in ("context", "batch", "write"):
        if getattr(args, option):
            raise UserError(f"--{option}: the recipe has stages, of which each says its own; leave it out")
    if not recipe.model.path and not recipe.model.preset and not recipe.model.overrides:
        recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, path="-"))
    if args.mesh or any(getattr(args, axis) for axis in MESH_AXES):
        recipe = dataclasses.replace(recipe, mesh=_mesh(args) or recipe.mesh)
    return [_job(args, stage, model.with_positions(**stage.model.overrides) if args.model else model, staged=True)
            for stage in stages_of(recipe)]


def job_of(args: argparse.Namespace) -> Job:
    """The job that the options describe, of a recipe with stages that of its longest rows; raises as `jobs_of`."""
    return max(jobs_of(args), key=lambda job: job.context)


def _job(args: argparse.Namespace, recipe: RunConfig, model: LlamaConfig, staged: bool = False) -> Job:
    """A recipe as a job on the machine, with the options that take precedence."""
    from planning.machines import device_count, host_gib
    from planning.plan import Job, changed
    from trainer.config.checks import check
    from trainer.config.schema import MeshConfig
    from trainer.devices import GPU_MEMORY_SHARE

    memory = {name: getattr(args, name) for name in MEMORY_OPTIONS if getattr(args, name) is not None}
    group_per_key_head = memory.get("attention_groups") == 0
    if group_per_key_head:
        del memory["attention_groups"]
    own_mesh = dataclasses.replace(recipe.mesh, simulate=0) if args.config else None
    mesh = own_mesh if staged and own_mesh else _mesh(args) or own_mesh or MeshConfig(sequence=device_count(args.topology))
    run = changed(
        recipe, mesh=mesh, memory=memory,
        data={} if args.context is None else {"context_length": args.context},
        train={} if args.batch is None else {"batch_size": args.batch},
        attention={name: getattr(args, name) for name in ("schedule", "layout") if getattr(args, name) is not None})
    name = args.model or recipe.model.path or recipe.model.preset or recipe.name
    return Job(check(run, "plan"), model, args.topology, name, group_per_key_head,
               host_gib(args.topology) if args.host_gib is None else args.host_gib,
               args.gpu_memory and GPU_MEMORY_SHARE * args.gpu_memory)


def _mesh(args: argparse.Namespace) -> MeshConfig | None:
    """The mesh of --mesh and of the axes' own flags; None without them. Raises ValueError."""
    axes = [f"{axis}={getattr(args, axis)}" for axis in MESH_AXES if getattr(args, axis)]
    return mesh_of(",".join([*axes, *([args.mesh] if args.mesh else [])]))


def _chooses(args: argparse.Namespace) -> bool:
    """Whether the planner may choose mesh and policy: it is asked to, or no option and no recipe says them."""
    names = ("config", "mesh", "schedule", "layout", *MESH_AXES, *MEMORY_OPTIONS)
    return args.best or all(getattr(args, name) is None for name in names)


def _recipe(args: argparse.Namespace) -> RunConfig:
    """The recipe of --config, or one with all defaults. Raises UserError."""
    from data.errors import UserError
    from planning.plan import PLAIN
    from trainer.config.load import load

    if not args.config:
        for option, example in (("model", "llama-3.1-8b"), ("context", "128K")):
            if getattr(args, option) is None and not (option == "context" and args.search):
                raise UserError(f"--{option}: missing, such as --{option} {example}; only a recipe (--config) goes without")
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
    from trainer.model_source import choose_model
    from trainer.trajectories import trajectory_model

    if recipe.trajectories.path:
        return trajectory_model(recipe)
    return choose_model(recipe.model).config if args.model is None else named_model(args.model)


def named_model(name: str) -> LlamaConfig:
    """Returns the shape of a preset, of a model's folder, or of org/name in the Hugging Face cache.

    Raises:
      UserError, ValueError: there is none of this name; names the presets.
    """
    from data.errors import UserError
    from model.config import LlamaConfig
    from model.families import FAMILIES
    from trainer.config.fields import suggestion
    from trainer.model_source import open_model

    presets = [preset for family in FAMILIES.values() for preset in family.presets]
    if name in presets:
        return LlamaConfig.preset(name)
    if Path(name).expanduser().is_dir() or ("/" in name and not name.startswith((".", "/", "~"))):
        return open_model(name).config
    raise UserError(f"--model: found {name!r}; neither a folder, nor org/name in the Hugging Face cache, nor a "
                    f"preset{suggestion(name.lower(), presets)}; presets are {', '.join(presets)}")


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
    """Prints a compiled plan as a table: that it fits, what its memory is made of, what is sent. Times were printed before."""
    device = f" of {plan['device_gib']:.2f}" if plan["device_gib"] else ""
    print(f"fits, says the compiler: {plan['peak_gib']:.2f}{device} GiB of each device, {plan['host_gib']:.2f} GiB of its host")
    mesh = ", ".join(f"{name} {size}" for name, size in plan["mesh"].items() if size and size != 1) or "one device"
    sent = {kind: f"{figures['times']:,.0f} times, {figures['received_gib']:.3f} GiB received, "
                  f"{figures['hidden']:.1%} of it beside compute" for kind, figures in (plan["communication"] or {}).items()}
    made = ", ".join(f"{name} {version}" for name, version in plan.get("made_with", {}).items() if version)
    for name, value in {**plan, "made_with": made, "mesh": mesh, **sent}.items():
        if name != "communication" and not name.startswith("estimated_") and not (name.startswith("of_it") and not value):
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
    """Answers, and with --compile makes the compiler's plan too; returns the exit status."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    if args.hardware or args.compare:
        return compare(args)
    jobs, status = jobs_of(args), 0
    if args.output:  # an unusable folder is refused now, not after the compiler's minutes
        (Path(args.output) if args.search and args.compile else Path(args.output).parent).mkdir(parents=True, exist_ok=True)
    for number, job in enumerate(jobs, 1):
        if len(jobs) > 1:
            print(f"stage {number} of {len(jobs)}")
        status = max(status, run_job(job, args, f"_{number}" if len(jobs) > 1 else ""))
    return status


def run_job(job: Job, args: argparse.Namespace, suffix: str = "") -> int:
    """Answers about one job; returns 1 where it does not fit, else 0.

    Args:
      suffix: of the output file's name, where a recipe has several stages.
    """
    from planning import answer
    from planning.machines import device_count
    from planning.memory_estimate import estimate_memory
    from trainer.build import window_notes

    mesh, devices = job.run.mesh, device_count(job.topology)
    if mesh.devices != devices and not args.best:
        raise ValueError(f"mesh: {mesh.product} devices, but {job.topology} has {devices}; give --mesh, or --best")
    if args.search and not args.compile:
        job = answer.longest(job, choose_mesh=_chooses(args)) or job
    elif _chooses(args):
        job = answer.choose(job) or job
    memory = estimate_memory(job)
    times = {"tokens": args.tokens, "price": args.price_per_device_hour}
    print(answer.heading(job), answer.settings(job), *window_notes(job.run, job.model), "", sep="\n")
    print(*answer.memory_lines(memory), "", *answer.time_lines(job, **times), "", answer.verdict(memory), sep="\n")
    if memory.fits == "no":
        print(*(f"  {line}" for line in answer.advice(job)), sep="\n")
    print(flush=True)
    if args.write:
        write(job, args)
    if args.compile:
        return prove(job, args, suffix)
    print("this is an estimate; --compile asks the machine's compiler")
    if args.output:
        _write_json(_with_suffix(args.output, suffix), {
            "model": job.name, "topology": job.topology, "context": job.context, "batch": job.batch, "fits": memory.fits,
            "settings": answer.settings(job), "estimated_gib": memory.total, "estimated_parts_gib": memory.parts,
            "estimated_host_gib": memory.on_host, **answer.time_figures(job, **times)})
    return int(memory.fits == "no")


def write(job: Job, args: argparse.Namespace) -> None:
    """Writes the job as a recipe, and checks that train.py would take it."""
    from planning.recipe import recipe_of, recipe_text
    from trainer.config.load import load

    base = parse(Path(args.config).read_text(encoding="utf-8"), args.config) if args.config else {}
    named = args.model if args.model and "/" in args.model else None
    recipe = recipe_of(job, base, named)
    Path(args.write).write_text(recipe_text(job, recipe, args.write, args.model), encoding="utf-8")
    section, data = recipe.get("model", {}), recipe.get("data", {})
    words = [] if section.get("path") or section.get("preset") or section.get("overrides") else ["--model.path", "any"]
    words += [] if data.get("path") or data.get("sources") or "trajectories" in recipe else ["--data.path", "any"]
    load(["--config", args.write, *words])
    print(f"wrote {args.write}, whose head has the commands", "", sep="\n")


def prove(job: Job, args: argparse.Namespace, suffix: str) -> int:
    """Lets the compiler say what the job takes, prints and writes its plan; returns 1 where it refuses the job."""
    from planning.plan import DoesNotFit, plan
    from planning.topology import compiling

    print(f"compiling {job.name}, {job.context:,} tokens, {job.axes} of {job.topology} (minutes for a pod)", file=sys.stderr)
    try:
        with compiling():
            job, result, rest = searched(job, args) if args.search or args.best else (job, plan(job), {})
    except DoesNotFit as error:
        print(f"does not fit, says the compiler: {error}", file=sys.stderr)
        return 1
    result |= estimates(result, job, args)
    show(result)
    if args.output and args.search:
        folder = Path(_with_suffix(args.output, suffix))
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / "plan.json", {"longest": result, **rest})
        draw(rest["tries"], result, folder / "plan.png")
    elif args.output:
        _write_json(_with_suffix(args.output, suffix), result)
    return 0


def _with_suffix(path: str, suffix: str) -> Path:
    """plan.json, _2 -> plan_2.json"""
    file = Path(path)
    return file.with_name(f"{file.stem}{suffix}{file.suffix}")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


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
    """Prints the answer; returns 0 where the job fits or perhaps fits, 1 where it does not, 2 where an option is wrong."""
    status = 0

    def work() -> None:
        nonlocal status
        status = run(parser().parse_args(argv))

    return entry.run(work) or status


if __name__ == "__main__":
    sys.exit(main())
