"""The options of scripts.plan, and the jobs they describe."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from data.templates.built_in import NAMES
from data.untrusted_files import read_text
from model.attention.names import MESH_AXES
from model.memory.options import MemoryConfig
from model.memory.policies import POLICIES
from planning.machines import EXAMPLES, gpu_gib, is_gpu, topology_of
from planning.memory_options import MEMORY_OPTIONS
from trainer import arguments
from trainer.config.fields import AUTO
from trainer.config.schema import AttentionConfig
from trainer.config.yaml_text import MAX_BYTES, parse
from trainer.options import (
    AboveZero,
    AtLeastOne,
    NotNegative,
    Tokens,
    add_options,
    no_download,
    option,
)

if TYPE_CHECKING:
    from model.adapter import AdapterConfig
    from model.config import TransformerConfig
    from planning.plan import Job
    from trainer.config.schema import MeshConfig, RunConfig


def _checked(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns an argparse type that converts with `convert` and prints its ValueErrors
    unchanged."""

    def checked(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(
                str(error).removeprefix("--machine: ").removeprefix("--gpu-memory: ")
            ) from None

    return checked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options other than machine, mesh axes and memory."""

    config: str | None = option("a recipe", None)
    model: str | None = option(
        "a preset such as llama-7b, a model's folder (its config.json is enough), or org/name on "
        "the hub; by default the recipe's",
        None,
    )
    no_download: bool = no_download()
    gpu_memory: Annotated[float, _checked(gpu_gib)] | None = option(
        "memory per GPU, overriding the table; allows any GPU as the machine: gpu, 8xMI300X",
        None,
        metavar="GIB",
    )
    context: Tokens | None = option(
        "tokens per row, such as 64K or 1M; with --search the first context tried", None
    )
    mesh: str | None = option(
        "mesh, such as fsdp=8,sequence=8 or tensor=8,sequence_parallel=1", None
    )
    batch: AtLeastOne | None = option("rows per step (default 1)", None)
    accumulation: AtLeastOne | None = option(
        "parts of a batch, computed one after another (default 1); if the planner chooses mesh or "
        "memory, it takes more if fewer do not certainly fit",
        None,
    )
    schedule: Annotated[Any, partial(parse, source="--schedule")] | None = option(
        "schedule, as in a recipe's attention.schedule (default ring)", None
    )
    layout: str | None = option(
        "layout (default striped)",
        None,
        choices=typing.get_args(typing.get_type_hints(AttentionConfig)["layout"]),
    )
    lora: AtLeastOne | None = option(
        "plan low-rank adapters of this rank, such as 16, instead of a full fine-tune",
        None,
        metavar="RANK",
    )
    qlora: AtLeastOne | None = option("like --lora, with a base in NF4", None, metavar="RANK")
    host_gib: NotNegative | None = option(
        "host memory per device in GiB; plans that need more do not fit (default: what such hosts "
        "have)",
        None,
    )
    best: bool = option(
        "choose the fastest mesh and policy that fit, by the cost model; with --compile also the "
        "schedule"
    )
    search: bool = option(
        "find the longest context that fits, and the policy for it (with --best also mesh and "
        "schedule)"
    )
    compare: bool = option("print the estimated time of every schedule and layout")
    hardware: str | None = option(
        "compare on this machine of the cost model, such as v4 or a100-ethernet", None
    )
    tokens: Tokens | None = option("tokens to train on, such as 100M; prints hours", None)
    price_per_device_hour: AboveZero | None = option(
        "prints the cost of 1,000 steps, or of --tokens", None
    )
    compile: bool = option("also compile the step with the machine's compiler")
    write: str | None = option(
        "write the plan as a recipe, with the launcher's command", None, metavar="RECIPE.yaml"
    )
    template: str | None = option(
        "chat template of that recipe (default: the planned recipe's, or tokenizer: the model's)",
        None,
        choices=NAMES,
    )
    output: str | None = option(
        "also write the answer (with --compile, the compiler's plan) to this JSON file; with "
        "--search --compile, to this folder, with a picture",
        None,
    )


def parser() -> arguments.CommandParser:
    """Returns the command's parser; defaults come from the recipe or from train.py."""
    options = arguments.CommandParser(
        prog="python -m scripts.plan",
        allow_abbrev=False,
        description=(
            "Plans a training step for a machine you do not have: memory, time and price, and with "
            "--compile the compiler's plan."
        ),
    )
    options.add_argument(
        "--machine",
        "--topology",
        dest="topology",
        metavar="MACHINE",
        help=f"the machine, such as {EXAMPLES}",
    )
    add_options(options, Options)
    for axis in MESH_AXES:
        options.add_argument(
            f"--{axis}",
            type=arguments.at_least_one,
            help=f"devices along the axis {axis}, as in --mesh",
        )
    _add_memory_options(options)
    return options


def _add_memory_options(options: argparse.ArgumentParser) -> None:
    """Adds a flag for each memory option of plans, with MemoryConfig's type and documentation."""
    import docstring_parser

    types = typing.get_type_hints(MemoryConfig)
    fields = docstring_parser.parse_from_object(MemoryConfig).params
    documented = {field.arg_name: field.description or "" for field in fields}
    documented["attention_groups"] += " 0: one group per key/value head of a device."
    for name in MEMORY_OPTIONS:
        flag, about = "--" + name.replace("_", "-"), documented[name].replace("%", "%%")
        if types[name] is bool:
            options.add_argument(flag, action="store_const", const=True, help=about)
        elif choices := typing.get_args(types[name]):
            options.add_argument(
                flag, choices=choices, help=f"{about} (default {getattr(MemoryConfig, name)})"
            )
        else:
            options.add_argument(
                flag, type=types[name], help=f"{about} (default {getattr(MemoryConfig, name)})"
            )


def resolve_machine(args: argparse.Namespace) -> None:
    """Replaces the machine's name by its topology; with --gpu-memory, any GPU is known.

    Raises ValueError for an unknown machine.
    """
    if args.topology:
        args.topology = topology_of(args.topology, any_gpu=args.gpu_memory is not None)


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """Returns the options' job, or one job per stage of a recipe with stages.

    Raises:
      UserError, ValueError: an option or the recipe is invalid.
    """
    from data.errors import UserError
    from trainer.stages import stages_of

    if not args.topology:
        raise UserError(f"--machine: missing; pass {EXAMPLES}")
    resolve_machine(args)
    if args.gpu_memory is not None and not is_gpu(args.topology):
        raise UserError(
            f"--gpu-memory: {args.topology} has TPUs, whose memory is known; leave it out"
        )
    recipe = _recipe(args)
    model = _model(args, recipe)
    if not recipe.stages:
        return [_job(args, recipe, model)]
    for name in ("context", "batch", "accumulation", "write"):
        if getattr(args, name):
            raise UserError(f"--{name}: each of the recipe's stages sets it; leave it out")
    if not recipe.model.path and not recipe.model.preset and not recipe.model.overrides:
        recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, path="-"))
    if args.mesh or any(getattr(args, axis) for axis in MESH_AXES):
        recipe = dataclasses.replace(recipe, mesh=_mesh(args) or recipe.mesh)
    return [
        _job(
            args,
            stage,
            model.with_positions(**stage.model.overrides) if args.model else model,
            staged=True,
        )
        for stage in stages_of(recipe)
    ]


def job_of(args: argparse.Namespace) -> Job:
    """Returns the options' job, or the stage with the longest rows; raises like `jobs_of`."""
    return max(jobs_of(args), key=lambda job: job.context)


def _job(
    args: argparse.Namespace, recipe: RunConfig, model: TransformerConfig, staged: bool = False
) -> Job:
    """Returns a recipe as a job on the machine; options take precedence over the recipe."""
    from planning.auto import require_text
    from planning.machines import host_gib
    from planning.plan import Job, changed
    from trainer.devices import GPU_MEMORY_SHARE

    memory = {
        name: getattr(args, name) for name in MEMORY_OPTIONS if getattr(args, name) is not None
    }
    if "remat" in memory and not POLICIES[memory["remat"]].every_k:  # it reads no such interval
        memory = {"every_k": MemoryConfig.every_k, **memory}
    group_per_key_head = memory.get("attention_groups") == 0
    if group_per_key_head:
        del memory["attention_groups"]
    named = _mesh(args)
    # An option takes its section back from the planner.
    given = {"mesh": named, "memory": memory or group_per_key_head}
    auto = tuple(section for section in recipe.auto if not given.get(section))
    if {"mesh", "memory"} & {*auto}:
        require_text(recipe)
    has_mesh = args.config and "mesh" not in auto
    own_mesh = dataclasses.replace(recipe.mesh, simulate=0) if has_mesh else None
    mesh = own_mesh if staged and own_mesh else named or own_mesh
    counts = {"batch_size": args.batch, "accumulation": args.accumulation}
    run = changed(
        recipe,
        auto=auto,
        **({} if mesh is None else {"mesh": mesh}),
        memory=memory,
        adapter=_adapter(args, recipe.adapter),
        data={} if args.context is None else {"context_length": args.context},
        train={name: count for name, count in counts.items() if count is not None},
        attention={
            name: getattr(args, name)
            for name in ("schedule", "layout")
            if getattr(args, name) is not None
        },
    )
    name = args.model or recipe.model.path or recipe.model.preset or recipe.name
    job = Job(
        run,
        model,
        args.topology,
        name,
        group_per_key_head,
        host_gib(args.topology) if args.host_gib is None else args.host_gib,
        None if args.gpu_memory is None else GPU_MEMORY_SHARE * args.gpu_memory,
    )
    return _on_some_mesh(job) if mesh is None else _checked_job(job)


def _checked_job(job: Job) -> Job:
    """Returns the job with its run checked. Raises UserError if training would refuse it."""
    from trainer.config.checks import check

    return dataclasses.replace(job, run=check(job.run, "plan"))


def _on_some_mesh(job: Job) -> Job:
    """Returns the job on the first mesh on which it could run: that of all devices on the sequence
    axis, else one of those that the planner chooses from.

    Raises:
      UserError: no mesh suits the job.
    """
    from data.errors import UserError
    from planning.machines import device_count
    from planning.plan import across_slices
    from planning.search import meshes, no_mesh
    from trainer.config.schema import MeshConfig

    possible = meshes(job)
    refusal = UserError(no_mesh(job, job.topology))
    on_sequence = MeshConfig(sequence=device_count(job.topology))
    for mesh in (across_slices(on_sequence, job.topology), *possible):
        try:
            return _checked_job(job.changed(mesh=mesh))
        except UserError as error:
            refusal = error if possible else refusal
    raise refusal


def _adapter(args: argparse.Namespace, from_recipe: AdapterConfig) -> AdapterConfig:
    """Returns the adapters of --lora or --qlora, else the recipe's. Raises UserError for both."""
    from data.errors import UserError

    if args.lora and args.qlora:
        raise UserError("--lora: found together with --qlora; keep one of them")
    if not (args.lora or args.qlora):
        return from_recipe
    return from_recipe.with_rank(args.lora or args.qlora, "nf4" if args.qlora else "none")


def _mesh(args: argparse.Namespace) -> MeshConfig | None:
    """Returns the mesh of --mesh and the axis flags; None without any. Raises ValueError."""
    axes = [f"{axis}={getattr(args, axis)}" for axis in MESH_AXES if getattr(args, axis)]
    return mesh_of(",".join([*axes, *([args.mesh] if args.mesh else [])]))


def free_sections(args: argparse.Namespace, job: Job) -> tuple[str, ...]:
    """Returns the sections that the planner chooses, as for `best_job`.

    They are mesh and memory with --best, or if no option sets them; with a recipe, those that it
    leaves to the planner.
    """
    names = ("config", "mesh", "schedule", "layout", *MESH_AXES, *MEMORY_OPTIONS)
    if args.best or all(getattr(args, name) is None for name in names):
        return AUTO
    return tuple(section for section in job.run.auto if section in AUTO)


def _recipe(args: argparse.Namespace) -> RunConfig:
    """Returns the recipe of --config, or one with all defaults. Raises UserError."""
    from data.errors import UserError
    from planning.plan import DEFAULT_RECIPE
    from trainer.config.load import load

    if not args.config:
        for name, example in (("model", "llama-3.1-8b"), ("context", "128K")):
            if getattr(args, name) is None and not (name == "context" and args.search):
                raise UserError(
                    f"--{name}: missing, such as --{name} {example}; it is only optional with a "
                    "recipe (--config)"
                )
        return DEFAULT_RECIPE
    try:
        if _learns_from_trajectories(args.config):
            return load(["--config", args.config])
        # A recipe may leave data and model to the command line, and a plan needs no data.
        return load(
            [
                "--config",
                args.config,
                "--data.path",
                "any",
                *(["--model.path", "any"] if args.model else []),
            ]
        )
    except UserError as error:
        raise UserError(
            str(error).replace("--model.path HF_DIR", "--model with a preset or a model's folder")
        ) from None


def _learns_from_trajectories(path: str) -> bool:
    """Whether a recipe has a section `trajectories`; False if unreadable, which `load` reports."""
    from data.errors import UserError

    try:
        recipe = parse(read_text(path, most=MAX_BYTES), path)
    except (OSError, ValueError, UserError):
        return False
    return isinstance(recipe, dict) and "trajectories" in recipe


def _model(args: argparse.Namespace, recipe: RunConfig) -> TransformerConfig:
    """Returns the configuration of --model's model, or the recipe's. Raises UserError,
    ValueError."""
    from trainer.model_source import choose_model
    from trainer.trajectories import trajectory_model

    if recipe.trajectories.path:
        return trajectory_model(recipe)
    return (
        choose_model(recipe.model, weights=False).config
        if args.model is None
        else named_model(args.model)
    )


def named_model(name: str) -> TransformerConfig:
    """Returns the configuration of a preset, a model's folder, or org/name on the hub.

    Raises:
      UserError, ValueError: the model is unknown; the message lists the presets.
    """
    from data.errors import UserError
    from model.config import TransformerConfig
    from model.families import FAMILIES
    from trainer.config.fields import suggestion
    from trainer.model_source import open_model

    presets = [preset for family in FAMILIES.values() for preset in family.presets]
    if name in presets:
        return TransformerConfig.preset(name)
    if Path(name).is_dir() or ("/" in name and not name.startswith((".", "/", "~"))):
        return open_model(name, weights=False).config
    raise UserError(
        f"--model: found {name!r}; neither a folder, nor org/name on the hub, nor a "
        f"preset{suggestion(name.lower(), presets)}; presets are {', '.join(presets)}"
    )


def mesh_of(text: str | None) -> MeshConfig | None:
    """Returns the MeshConfig for a text such as fsdp=8,sequence=8; None without a text.

    dcn.data=2 sets a factor of mesh.dcn. Raises ValueError.
    """
    from trainer.config.schema import MeshConfig

    try:
        sizes = dict(part.split("=") for part in (text or "").split(",") if part)
        dcn = {
            axis.removeprefix("dcn."): int(sizes.pop(axis))
            for axis in list(sizes)
            if axis.startswith("dcn.")
        }
        axes: dict[str, Any] = {axis: int(size) for axis, size in sizes.items()}
        if not axes.keys() <= {*MESH_AXES, "sequence_parallel"}:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--mesh: found {text!r}; write axis=size,... with {', '.join(MESH_AXES)}"
        ) from None
    return MeshConfig(**axes, dcn=dcn) if axes or dcn else None
