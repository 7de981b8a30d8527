"""Describes a run without running it: rows, epochs, padding, memory, time, checkpoint disk.

`python train.py --config RECIPE.yaml --dry-run [MACHINE]` prints it. The data are prepared as for
the run, and kept for it; no device is used, nothing is compiled, and the run's folder is not
created.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from data import hub
from data.errors import UserError
from data.paths import expanded
from data.prepared import Prepared
from model.config import TransformerConfig
from trainer.best import BestCheckpoint
from trainer.build import run_notes
from trainer.config.checks import peak_warning
from trainer.config.schema import RunConfig
from trainer.devices import GPU_MEMORY_SHARE
from trainer.evaluation import held_out_names
from trainer.huggingface.hub_models import hub_has_weights, resolve_model_path
from trainer.mesh import abstract_mesh
from trainer.objective import Objective
from trainer.objectives import objective_class
from trainer.reporting.boards import import_wandb
from trainer.run.opening import check_run
from trainer.stages import stages_of
from trainer.step import StepBuilder
from trainer.text import TextObjective

from . import answer
from .auto import NothingFits, machine_named, planned_for_machine, planned_run
from .compiled import GIB
from .machines import ANY_GPU, device_count, gpu_gib, host_gib, hosts, topology_of
from .memory_estimate import estimate_memory
from .parts import checkpoint_bytes, local_checkpoint_bytes
from .plan import Job, check_dcn

# Minutes of steps a preemption may cost before clocked checkpoints are advised, and their interval.
LONG_SECONDS = 3600.0
ADVISED_MINUTES = 30

Prepare = Callable[[RunConfig, Objective, StepBuilder], dict[str, int]]
"""Prepares a run's evaluations; returns the names of their metrics besides held-out losses, and the
steps between measurements."""


def dry_run(
    config: RunConfig,
    machine: str = "",
    gpu_memory: str | None = None,
    prepare: Prepare = lambda *_: {},
) -> bool:
    """Prints what each stage of a run would do; returns whether all fit or may fit, or with `auto`
    whether anything that the planner may choose does.

    Args:
      machine: where it would run; "" omits what depends on the machine.
      gpu_memory: GiB per GPU as typed by the user, instead of the table's figure.
      prepare: prepares the recipe's evaluations, as training does before the first step.

    Raises:
      UserError, ValueError: the model or data cannot be used, or the machine lacks devices for the
        mesh.
    """
    # Tracing needs a backend, and another run may hold the accelerators.
    jax.config.update("jax_platforms", "cpu")
    topology = f"{ANY_GPU}:{config.mesh.devices}"
    if machine:
        try:
            topology = topology_of(machine, gpu_memory is not None)
        except ValueError as error:  # which names the flag of scripts.plan
            raise UserError(str(error).replace("--machine", "--dry-run", 1)) from error
    usable_gib = None if gpu_memory is None else GPU_MEMORY_SHARE * gpu_gib(gpu_memory)
    if "mesh" not in config.auto and device_count(topology) != config.mesh.devices:
        raise UserError(
            f"--dry-run: {machine} has {device_count(topology)} devices, the mesh has "
            f"{config.mesh.product}; python -m scripts.plan finds a mesh"
        )
    if (sections := planned_for_machine(config)) and not machine:
        raise UserError(
            f"--dry-run: {sections[0]}: auto needs a machine, found none; --dry-run 8xH100 would "
            "work"
        )
    target = _Target(topology, bool(machine), usable_gib)
    stages, fits = stages_of(config), True
    for number, stage in enumerate(stages, 1):
        if len(stages) > 1:
            print(f"stage {number} of {len(stages)}")
        try:
            fits &= _report_stage(config, stage, number == 1, target, prepare)
        except NothingFits as refusal:
            print(refusal)
            return False
    print("nothing was trained: without --dry-run the same command trains")
    return fits


@dataclasses.dataclass(frozen=True)
class _Target:
    """Where the run would train.

    Attributes:
      topology: as `planning.machines` names it.
      named: whether the user named the machine; else the topology is the mesh's devices.
      usable_gib: memory of each GPU as the user gives it; None for the table's.
    """

    topology: str
    named: bool
    usable_gib: float | None


def _report_stage(
    config: RunConfig, stage: RunConfig, is_first: bool, target: _Target, prepare: Prepare
) -> bool:
    """Prints what a stage would do; returns whether it fits or may fit.

    Args:
      config: the configuration of all stages.

    Raises:
      NothingFits: nothing that the planner may choose fits; or as `dry_run`.
    """
    if stage.logging.wandb:
        import_wandb()
    # A later stage begins with the previous one's model, which has the same shape as the first.
    continued = dataclasses.replace(
        stage,
        adapter=config.adapter,
        model=dataclasses.replace(
            config.model, overrides={**config.model.overrides, **stage.model.overrides}
        ),
    )
    if config.auto:
        machine = machine_named(target.topology, target.usable_gib)
        continued = planned_run(continued, machine, print)
    if target.named:
        check_dcn(continued.mesh, target.topology)
    # What a later stage adds to its positions depends on the previous one's model.
    if is_first:
        check_run(continued, steps_known=stage.train.epochs is None)
    elif "positions" not in config.auto:
        check_run(stage, steps_known=stage.train.epochs is None)
    return _report(_opened(continued, prepare), target)


def _report(objective: Objective, target: _Target) -> bool:
    """Prints what one run would do; returns whether it fits or may fit."""
    topology, named = target.topology, target.named
    config = objective.config
    if config.train.epochs is not None:  # now that its steps are known
        check_run(config)
    if isinstance(objective, TextObjective):
        for line in _weight_lines(objective, named):
            print(line)
        _describe_text(objective)
    else:
        print(
            f"data: rows of {config.data.context_length:,} tokens, each drawn from the episodes of "
            f"{config.trajectories.path}"
        )
    for warning in filter(None, (*objective.warnings, peak_warning(config))):
        print(f"warning: {warning}")
    model = dataclasses.replace(objective.model.config, adapter=None)
    mesh = dataclasses.replace(config.mesh, simulate=0)
    job = Job(
        dataclasses.replace(config, mesh=mesh),
        model,
        topology,
        config.name,
        host_gib=host_gib(topology),
        own_device_gib=target.usable_gib,
    )
    memory = estimate_memory(job)
    print(
        f"settings: {answer.settings(job)}",
        *run_notes(config, model),
        "",
        *answer.memory_lines(memory),
        "",
        sep="\n",
    )
    if named:
        tokens = config.train.steps * job.batch * job.context
        print(*answer.time_lines(job, tokens=tokens), "", answer.verdict(memory), sep="\n")
        if memory.fits == "no":
            print(*(f"  {line}" for line in answer.advice(job, answer.train_flags)), sep="\n")
    else:
        print("to see the time and whether it fits, name the machine, such as --dry-run 8xH100")
    print(
        *_preemption_lines(job) if named else (),
        *_disk_lines(config, model),
        *_local_lines(job, hosts(topology) if named else config.distributed.num_processes or 1),
        "",
        sep="\n",
    )
    return memory.fits != "no"


def _opened(config: RunConfig, prepare: Prepare) -> Objective:
    """Returns the run's objective as training opens it, without devices; its loss is traced once.

    Raises:
      UserError, ValueError: as training refuses the model, the data or the options.
    """
    objective = objective_class(config)(config, abstract_mesh(config.mesh))
    batch = objective.abstract_batch()
    builder = StepBuilder.of(
        objective.config, objective.model, objective.loss, batch, objective.totals
    )
    sums = builder.trace_evaluate().out_info
    measured = prepare(objective.config, objective, builder)
    held_out = dict.fromkeys(held_out_names(objective, sums), config.train.evaluate_every)
    best, steps = BestCheckpoint(config.checkpoint), objective.config.train.steps
    if warning := best.require({**held_out, **measured}, steps):
        print(f"warning: {warning}")
    return objective


def _weight_lines(objective: TextObjective, elsewhere: bool) -> Iterator[str]:
    """Yields lines on weights that are not on this machine, and that training would download or
    need.

    Args:
      elsewhere: whether the run is to train on another machine, which may have them.

    Raises:
      UserError, ValueError: as training would raise for them.
    """
    for path, source in objective.pretrained.items():
        if not source.lacks_weights:
            continue
        if not expanded(path).is_dir() and not hub.is_offline():
            if hub_has_weights(path) is False:
                raise hub.only_pickled(path.partition("@")[0])
            yield f"weights: {path} is not downloaded yet; training downloads it"
        elif elsewhere:
            yield f"weights: none in {path}; training needs them there"
        else:
            resolve_model_path(path)
            source.check_weights("none")


def _describe_text(objective: TextObjective) -> None:
    """Prints the rows, epochs and padding of the prepared data."""
    config, loader, prepared = objective.config, objective.loader, objective.prepared
    rows, train, length = len(loader), config.train, config.data.context_length
    seen, documents = objective.rows_taken(train.steps), prepared.train
    print(prepared.report.summary())
    if config.preference.loss is not None:
        print(*_pair_lines(config, prepared), sep="\n")
    print(
        f"data: {len(documents):,} documents of {int(documents.lengths.sum()):,} tokens, "
        f"{_share(documents)} of them in the loss; {len(prepared.held_out):,} documents held out"
    )
    print(f"rows: {rows:,} of {length:,} tokens in an epoch, {loader.padding_share:.1%} padding")
    print(
        f"steps: {train.steps:,} of {train.batch_size:,} rows: {seen:,} rows, {seen / rows:.2f} "
        f"epochs, {seen * length:,} tokens"
    )


def _pair_lines(config: RunConfig, prepared: Prepared) -> Iterator[str]:
    """Yields lines on the rows of completion pairs, and the reference's cost."""
    documents, options = prepared.train, config.preference
    first, second = documents.chosen, documents.lengths - documents.chosen
    names = ("matching", "other") if options.labelled else ("chosen", "rejected")
    kind = "labelled completions" if options.labelled else "pairs"
    labels = f", {int((documents.labels == 1).sum()):,} desirable" if options.labelled else ""
    yield (
        f"pairs: {len(documents):,} {kind}{labels}, of {int(documents.row_lengths.min()):,} to "
        f"{int(documents.row_lengths.max()):,} tokens in a row; with the prompt {names[0]} "
        f"completions have up to "
        f"{int(first.max()):,} tokens, {names[1]} ones up to {int(second.max()):,}"
    )
    saved, total = int(documents.shared.sum()), int(documents.lengths.sum())
    yield (
        f"prompts: once for both completions, which saves {saved:,} of {total:,} tokens "
        f"({saved / total:.1%})"
        if saved
        else "prompts: once for each completion"
    )
    split = [x for x in (documents, prepared.held_out) if len(x)]
    tokens = sum(int(x.row_lengths.sum()) for x in split)
    yield (
        f"reference: log-likelihoods of {sum(map(len, split)):,} {kind} once before the first "
        f"step, a forward pass over "
        f"{tokens:,} tokens; no second model in memory"
        if options.needs_reference
        else f"reference: none with preference.loss {options.loss}"
    )


def _share(documents) -> str:
    total = int(documents.lengths.sum())
    return f"{int(documents.trained.sum()) / total:.1%}" if total else "none"


def _preemption_lines(job: Job) -> Iterator[str]:
    """Yields what a preemption costs at most, if the cost model lists the machine."""
    seconds, checkpoint = job.time_range(), job.run.checkpoint
    if seconds is None:
        return
    every = checkpoint.every or job.run.train.steps
    if checkpoint.local:
        local = _span(*(checkpoint.local_every * step for step in (seconds.low, seconds.high)))
        yield (
            f"with local checkpoints, a preemption loses at most {local} of training "
            f"(checkpoint.local_every {checkpoint.local_every}) if at most one host is lost; "
            "otherwise"
        )

    def lost(step: float, minutes: float) -> float:
        """Returns the seconds after the last checkpoint; a save by the clock is a step late."""
        return min(every * step, 60 * minutes + step) if minutes else every * step

    low, high = (lost(step, checkpoint.minutes) for step in (seconds.low, seconds.high))
    fields = f"checkpoint.every {checkpoint.every}"
    if checkpoint.minutes:
        fields += f", checkpoint.minutes {checkpoint.minutes:g}"
    yield (
        f"a preemption loses at most {_span(low, high)} of training ({fields}), plus the restart"
    )
    if not checkpoint.minutes and high > LONG_SECONDS:
        less = _span(*(lost(step, ADVISED_MINUTES) for step in (seconds.low, seconds.high)))
        yield f"with --checkpoint.minutes {ADVISED_MINUTES}, it loses at most {less}"


def _span(low: float, high: float) -> str:
    """Returns a range of seconds as text; in minutes, unless it begins below two."""
    size, unit = (1, "seconds") if low < 120 else (60, "minutes")
    return f"{low / size:,.0f} to {high / size:,.0f} {unit}"


def _disk_lines(config: RunConfig, model: TransformerConfig) -> Iterator[str]:
    """Yields the size of a checkpoint, of all the run's checkpoints, and the free disk space."""
    parameters, moments = checkpoint_bytes(config, model)
    every, steps = config.checkpoint.every or config.train.steps, config.train.steps
    saved = math.ceil(steps / every)
    # A new checkpoint is complete before the oldest one is deleted, and the best one stays.
    most = min(saved, config.checkpoint.keep + 1 + bool(config.checkpoint.best))
    total = most * (parameters + moments)
    yield (
        f"disk: {'1 checkpoint' if saved == 1 else f'{saved:,} checkpoints'} of "
        f"{_size(parameters + moments)} (parameters {_size(parameters)}, moments "
        f"{_size(moments)}), at most {most} at a time: {_size(total)} in {config.location}"
    )
    if config.in_bucket:
        return
    parent = next(
        folder
        for folder in (Path(config.folder), *Path(config.folder).absolute().parents)
        if folder.is_dir()
    )
    if (free := shutil.disk_usage(parent).free) < total:
        yield (
            f"disk: only {_size(free)} are free there; checkpoint.keep, checkpoint.every or "
            "another --run_dir would help"
        )


def _local_lines(job: Job, count: int) -> Iterator[str]:
    """Yields the space of local checkpoints on each of `count` hosts, if the run has any."""
    checkpoint = job.run.checkpoint
    if not checkpoint.local:
        return
    share = local_checkpoint_bytes(job.run, job.model, count)
    parts = "its part and another host's" if count > 1 else "its part, without a copy"
    total = 2 * (share if count == 1 else 2 * share)
    yield (
        f"local checkpoints: {_size(share)} per host, {parts}, two steps: {_size(total)} in "
        f"{checkpoint.local} on each of {count} host{'s' * (count > 1)}, and {_size(share)} of "
        "memory during a save"
    )


def _size(count: float) -> str:
    """Returns a number of bytes in GiB, or in MiB below one GiB."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{1024 * count / GIB:,.1f} MiB"
