"""Writes a planned job as a recipe for train.py, with its launch command in the header."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import yaml

from data.conversation import DEFAULT_TEMPLATE
from model.adapter import AdapterConfig
from model.attention.names import MESH_AXES
from model.config import ADJUSTABLE, POSITIONS
from model.lengths import extended_positions, supported_length
from trainer.config.fields import AUTO
from trainer.config.load import EPOCHS, WARMUP_FRACTION
from trainer.config.optimizer import ADAPTERS_LEARNING_RATE, LEARNING_RATE
from trainer.config.schema import VERSION, MemoryConfig, RunConfig
from trainer.devices import GPU_MEMORY_SHARE, TPUS

from .answer import heading, number, settings, time_figures
from .machines import accelerator_type, gpus_per_host, hosts, split_topology
from .memory_estimate import estimate_memory
from .plan import Job

# The Cloud TPU API's runtime versions (cloud.google.com/tpu/docs/runtimes).
_RUNTIMES = {
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}


def launcher(job: Job, options: str) -> str:
    """Returns the shell command that trains on the job's machine.

    If each host has to run it, a comment says so.

    Args:
      options: those of train.py.
    """
    slices, generation, shape = split_topology(job.topology)
    if generation in TPUS:
        kind = accelerator_type(job.topology)
        runtime = _RUNTIMES.get(generation)
        if hosts(job.topology) == 1 or slices > 1 or kind is None:
            each = (
                "" if hosts(job.topology) == 1 else f"# on each of {hosts(job.topology)} hosts:\n"
            )
            return f'{each}eval "$(python -m trainer.xla_flags tpu)" && python train.py {options}'
        slice_ = f"--type {kind} --version {runtime}"
        if runtime is None:  # the Cloud TPU API has no such chip
            slice_ = f"--machine-type {generation}-standard-4t --topology {shape}"
        return f"scripts/launch_tpu.sh run NAME --zone ZONE {slice_} -- {options}"
    if "x" in shape:
        return (
            f"sbatch --nodes {hosts(job.topology)} --gpus-per-node {gpus_per_host(job.topology)} "
            f"scripts/launch_slurm.sbatch {options}"
        )
    return f'eval "$(python -m trainer.xla_flags gpu)" && python train.py {options}'


def recipe_of(
    job: Job, base: Mapping[str, Any], model_path: str | None, template: str | None = None
) -> dict[str, Any]:
    """Returns a recipe, as a mapping of sections, that runs the planned job.

    The data are not known yet, so the recipe trains for epochs, not steps, and warms up over a
    share of them.

    Args:
      job: the plan's model, mesh, memory options, context and batch.
      base: the planned recipe; {} if there was none.
      model_path: the model's folder or hub name to write; None leaves it to the command line.
      template: the chat template; None for the base's, or else the default.
    """
    run, default = job.run, RunConfig()
    mesh = {axis: getattr(run.mesh, axis) for axis in MESH_AXES if getattr(run.mesh, axis) > 1}
    mesh |= {
        name: getattr(run.mesh, name)
        for name in ("sequence_parallel", "dcn")
        if getattr(run.mesh, name)
    }
    mesh |= {"order": list(run.mesh.order)} if run.mesh.order else {}
    memory = {
        field.name: getattr(job.memory, field.name)
        for field in dataclasses.fields(MemoryConfig)
        if field.name == "remat" or getattr(job.memory, field.name) != field.default
    }
    recipe = {"config_version": VERSION, **_without_auto(base)}
    recipe["mesh"] = mesh or {"sequence": 1}
    recipe["attention"] = {
        **base.get("attention", {}),
        "schedule": run.attention.schedule,
        "layout": run.attention.layout,
    }
    recipe["memory"] = memory
    if job.run.adapter.rank:
        recipe["adapter"] = _adapter(job.run.adapter)
    # Episodes are drawn endlessly, and their models train from scratch.
    if "trajectories" in base:
        recipe["data"] = {**base.get("data", {}), "context_length": job.context}
        recipe["train"] = {"steps": default.train.steps, **_train(job, base)}
        return recipe
    recipe["data"] = {
        "template": run.data.template,
        **base.get("data", {}),
        **({"template": template} if template else {}),
        "context_length": job.context,
    }
    length = {} if {"steps", "epochs"} & base.get("train", {}).keys() else {"epochs": EPOCHS}
    recipe["train"] = {**length, **_train(job, base)}
    recipe["optimizer"] = _optimizer(job, base.get("optimizer", {}))
    model = {**base.get("model", {}), **({"path": model_path} if model_path else {})}
    from_scratch = names_model({"model": model}) and not model.get("path")
    if not from_scratch and (positions := _positions(job, model.get("overrides", {}))):
        model["overrides"] = {**model.get("overrides", {}), **positions}
    return {**recipe, "model": model} if model else recipe


def _without_auto(base: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recipe that no longer leaves mesh and memory to the planner."""
    auto = [section for section in base.get("auto") or () if section not in AUTO]
    kept = {name: value for name, value in base.items() if name not in ("auto", "planned")}
    return {**kept, **({"auto": auto} if auto else {})}


def _train(job: Job, base: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the base's section `train` with the job's batch and its parts."""
    train, parts = dict(base.get("train", {})), job.run.train.accumulation
    if train.get("epochs") is not None:
        train.pop("steps", None)  # a run's record has both
    accumulation = {"accumulation": parts} if parts > 1 or "accumulation" in train else {}
    return {**train, "batch_size": job.batch, **accumulation}


def _adapter(adapter: AdapterConfig) -> dict[str, Any]:
    """Returns the section `adapter`: rank, alpha, targets, and non-default fields."""
    fields = {field.name: field.default for field in dataclasses.fields(AdapterConfig)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name in fields
        if (value := getattr(adapter, name)) != fields[name] or name in ("alpha", "targets")
    }


def names_model(recipe: Mapping[str, Any]) -> bool:
    """Returns whether a recipe names its model, by path or shape; else the command line must."""
    section = recipe.get("model", {})
    return bool(
        section.get("path")
        or section.get("preset")
        or set(section.get("overrides", {})) - set(ADJUSTABLE)
    )


def _positions(job: Job, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the POSITIONS that a pretrained model still needs for the job's context."""
    if "rope_theta" in overrides:  # the recipe sets the length
        return {}
    own = {name: overrides[name] for name in POSITIONS if name in overrides}
    return extended_positions(job.model.with_positions(**own) if own else job.model, job.context)


def _optimizer(job: Job, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a planned recipe's `optimizer`, with a default rate and warm-up."""
    rate = ADAPTERS_LEARNING_RATE if job.run.adapter.rank else LEARNING_RATE
    warmup = (
        {}
        if {"warmup_steps", "warmup_fraction"} & given.keys()
        else {"warmup_fraction": WARMUP_FRACTION}
    )
    return {"learning_rate": rate, **warmup, **given}


def _template_lines(recipe: Mapping[str, Any]) -> list[str]:
    """Returns the header's line about the chat template `tokenizer`, if the recipe has it."""
    if recipe.get("data", {}).get("template") != DEFAULT_TEMPLATE:
        return []
    return [
        "Template  the model's own; a base model has none: data.template vicuna_v1.1, chatml, "
        "..., by docs/templates.md"
    ]


def _length_lines(job: Job, recipe: Mapping[str, Any]) -> list[str]:
    """Returns the header's line about rows longer than the model is trained for: how far the recipe
    stretches RoPE, or that it cannot."""
    trained, overrides = supported_length(job.model), recipe.get("model", {}).get("overrides", {})
    if trained is None or job.context <= trained:
        return []
    if overrides.get("max_position_embeddings") == job.context:
        return [
            f"Length    model.overrides stretches RoPE to {job.context:,} tokens; leave it out if "
            f"no document is longer than {trained:,}"
        ]
    if job.model.rope.rule != "longrope" or set(overrides) & set(POSITIONS):
        return []
    return [
        f"Length    the factors of this model's longrope are fitted to {trained:,} tokens: "
        "longer documents need your own factors in model.overrides.rope_scaling"
    ]


def _shared_folders(job: Job, recipe: Mapping[str, Any]) -> str:
    """Returns flags for the folders that all hosts must share, unless the recipe names them.

    The hosts of a TPU slice have no common disk; those of Slurm do.
    """
    if split_topology(job.topology)[1] not in TPUS or hosts(job.topology) == 1:
        return ""
    run = "" if recipe.get("run_dir") else " --run_dir gs://BUCKET/run"
    prepared = recipe.get("data", {}).get("prepared")
    return run + ("" if prepared else " --data.prepared gs://BUCKET/prepared")


def recipe_text(job: Job, recipe: Mapping[str, Any], path: str, model: str | None) -> str:
    """Returns a header with the job, its commands and estimates, then the recipe as YAML.

    Args:
      path: of the recipe's file, for the commands; model: --model of the planning command, None if
        the recipe names it.
    """
    options = f"--config {path}" + ("" if names_model(recipe) else " --model.path HF_DIR")
    data = recipe.get("data", {})
    options += (
        ""
        if data.get("path") or data.get("sources") or "trajectories" in recipe
        else " --data.path FILE.json"
    )
    memory, figures = estimate_memory(job), time_figures(job)
    usable = "" if memory.device_gib is None else f" of {memory.device_gib:.1f}"
    seconds = (
        "{} to {} s per step, estimated".format(*map(number, figures["seconds of a step"]))
        if figures
        else f"not estimated; {job.untimed}"
    )
    plan = f"python -m scripts.plan --config {path}" + (f" --model {model}" if model else "")
    own = (
        ""
        if job.own_device_gib is None
        else f" --gpu-memory {job.own_device_gib / GPU_MEMORY_SHARE:.4g}"
    )
    command = launcher(job, options + _shared_folders(job, recipe)).replace("\n", "\n          ")
    head = [
        heading(job),
        "",
        *f"Command   {command}".splitlines(),
        f"Check     python train.py {options} --dry-run {job.topology}{own}",
        f"Settings  {settings(job)}",
        f"Memory    {memory.low:.1f} to {memory.high:.1f}{usable} GiB of each device, estimated",
        f"Time      {seconds}",
        *_template_lines(recipe),
        *_length_lines(job, recipe),
        f"Plan      {plan} --machine {job.topology}{own} --compile",
    ]
    return (
        "\n".join(f"# {line}".rstrip() for line in head)
        + "\n\n"
        + yaml.safe_dump(dict(recipe), sort_keys=False)
    )
