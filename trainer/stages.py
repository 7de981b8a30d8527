"""A curriculum: a recipe's stages as consecutive runs, each from the previous one's parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from data.errors import UserError
from model.attention.names import MESH_AXES
from model.config import POSITIONS

from .checkpoint.commit import CHECKPOINTS, located
from .config import load as configuration
from .config.checks import check
from .config.data import Today
from .config.preference import PreferenceConfig
from .config.schema import MeshConfig, RunConfig
from .mesh import start_devices
from .run.cluster import first_then_others, process
from .run.directory import EARLIER_STAGES, RunDirectory
from .run.identity import recorded, recorded_identity, saved_steps, stages_up_to
from .run.opening import check_run, has_begun


def stages_of(config: RunConfig) -> list[RunConfig]:
    """Returns the configuration of each stage; without stages only `config`.

    The last stage's folder is the run's, so its checkpoints, logs and evaluations are the run's;
    earlier stages are in RUN/stages/1, 2 and so on. Each stage is an ordinary run with its own
    warm-up, moments, decay and data order. The reference of a preference loss is the model of the
    first stage in all of them, under the RoPE of each.

    Raises:
      UserError: a stage contradicts the other sections, or stages differ in the number of devices.
    """
    if not config.stages:
        return [config]
    configs: list[RunConfig] = []
    for index, stage in enumerate(config.stages):
        field = f"stages[{index}]"
        if unknown := sorted(set(stage.mesh) - set(MESH_AXES)):
            raise UserError(
                f"{field}.mesh: found {unknown[0]!r}; the axes are {', '.join(MESH_AXES)}"
            )
        if stage.in_context and not config.trajectories.path:
            raise UserError(
                f"{field}.in_context: found {stage.in_context}, needs to be left out without "
                "trajectories.path"
            )
        try:
            axes: dict[str, Any] = dict(stage.mesh)
            mesh = dataclasses.replace(config.mesh, **axes)
        except ValueError as error:
            raise UserError(
                f"{field}: {error}; all stages need the number of devices in the section mesh"
            ) from None
        if mesh.devices != config.mesh.devices:
            raise UserError(
                f"{field}.mesh: found {mesh.product} devices, needs {config.mesh.devices} as in "
                "the section mesh; all stages run on the same devices"
            )
        configs.append(check(_staged(config, index, mesh, configs[-1] if configs else None), field))
    return configs


def _staged(
    config: RunConfig, index: int, mesh: MeshConfig, previous: RunConfig | None
) -> RunConfig:
    """Returns the configuration of a stage, which begins with the previous stage's result."""
    stage, last = config.stages[index], index == len(config.stages) - 1
    model, adapter = config.model, config.adapter
    # Checkpoints hold only the adapter: the base and its positions stay.
    if previous is not None and adapter.rank:
        model, adapter = previous.model, dataclasses.replace(adapter, path=previous.location)
    elif previous is not None:
        model = dataclasses.replace(
            model, path=previous.location, preset=None, tokenizer=None, overrides={}
        )
    train, optimizer = config.train, config.optimizer
    return dataclasses.replace(
        config,
        stages=(),
        mesh=mesh,
        adapter=adapter,
        model=dataclasses.replace(model, overrides={**model.overrides, **stage.rope}),
        preference=config.preference if previous is None else _with_first_reference(config, index),
        trajectories=dataclasses.replace(
            config.trajectories, in_context=stage.in_context or config.trajectories.in_context
        ),
        data=dataclasses.replace(
            config.data, context_length=stage.context_length, seed=config.data.seed + index
        ),
        train=dataclasses.replace(
            train,
            steps=stage.steps or train.steps,
            batch_size=stage.batch_size or train.batch_size,
            accumulation=stage.accumulation or train.accumulation,
        ),
        optimizer=dataclasses.replace(
            optimizer,
            learning_rate=stage.learning_rate or optimizer.learning_rate,
            warmup_steps=optimizer.warmup_steps
            if stage.warmup_steps is None
            else stage.warmup_steps,
            warmup_fraction=optimizer.warmup_fraction if stage.warmup_steps is None else 0.0,
        ),
        run_dir=config.location + ("" if last else f"/{EARLIER_STAGES}/{index + 1}"),
    )


def _with_first_reference(config: RunConfig, index: int) -> PreferenceConfig:
    """Returns the section `preference` of a later stage, whose reference is the first one's.

    Raises:
      UserError: that model cannot be opened again without the run's first stage.
    """
    preference, model, adapter = config.preference, config.model, config.adapter
    if not preference.needs_reference or preference.ref_model or preference.ref_without_adapter:
        return preference
    if adapter.rank and not adapter.path:
        return dataclasses.replace(preference, ref_without_adapter=True)
    reasons = {
        "adapter.path": adapter.path,
        "model.preset": model.preset,
        "model.overrides": None if model.path else model.overrides,
    }
    for field, found in reasons.items():
        if found:
            raise UserError(
                f"{field}: found {found} with stages and preference.loss {preference.loss}, needs "
                f"preference.ref_model{' or ref_without_adapter' * bool(adapter.path)} to set the "
                "reference of all stages"
            )
    ropes = [model.overrides, *(stage.rope for stage in config.stages[: index + 1])]
    positions = {name: value for rope in ropes for name, value in rope.items() if name in POSITIONS}
    return dataclasses.replace(
        preference,
        ref_model=model.path,
        ref_tokenizer=model.tokenizer,
        ref_overrides=positions,
    )


def choose_stage(config: RunConfig, number: int | None = None) -> RunConfig:
    """Returns the configuration that reads a stage's data; without stages `config`.

    It keeps the recipe's model and adapter: those of earlier stages may not exist, or are not asked
    for.

    Args:
      number: of the stage, from 1; the last one by default.

    Raises:
      UserError: there is no such stage; or as `stages_of`.
    """
    stages = stages_of(config)
    if number is not None and not 1 <= number <= len(stages):
        raise UserError(f"--stage: found {number}; the recipe has {len(stages)}, counted from 1")
    if config.stages:
        _announce(stages, (number or len(stages)) - 1)
    stage = stages[(number or len(stages)) - 1]
    overrides = {**config.model.overrides, **stage.model.overrides}
    model = dataclasses.replace(config.model, overrides=overrides)
    return dataclasses.replace(stage, model=model, adapter=config.adapter)


def stages_to_train(config: RunConfig) -> Iterator[tuple[RunConfig, bool]]:
    """Starts the devices, and yields each stage that is not finished, in order, with whether
    another one follows; it must be trained before the next is asked for.

    Raises:
      UserError: as `stages_of` and `_first_unfinished`.
    """
    stages_of(config)  # finds errors before it waits for other processes
    start_devices(config)
    stages = stages_of(_on_one_day(config))
    # One process checks for all: they would find each other's locks, or folders not visible to
    # others yet.
    first = first_then_others(
        lambda index: _first_unfinished(stages, config) if index is None else int(index), str
    )
    if first == len(stages):
        location = stages[-1].location
        path = located(location) / CHECKPOINTS / str(saved_steps(location)[-1])
        _say(f"stage {first} of {first} is finished: {path}")
    for index, stage in enumerate(stages[first:], first):
        if len(stages) > 1:
            _announce(stages, index)
        yield stage, index < len(stages) - 1


def _on_one_day(config: RunConfig) -> RunConfig:
    """Returns the configuration in which `today` is process 0's day in all processes."""

    def with_day(day: str | None) -> RunConfig:
        if day is None or not isinstance(config.data.template_date, Today):
            return config
        return dataclasses.replace(config, data=dataclasses.replace(config.data, template_date=day))

    return first_then_others(with_day, lambda config: str(config.data.template_date))


def _first_unfinished(stages: list[RunConfig], recipe: RunConfig) -> int:
    """Returns the index of the first stage after which no other has begun; the number of stages if
    the last has ended and nothing is left to continue from.

    Args:
      recipe: with the stages.

    Raises:
      UserError: the run was begun with more or fewer stages; an earlier stage's folder holds
        another run, or a longer or shorter one; or the checkpoint with which a stage began is gone.
    """
    _require_as_many(stages, len(recipe.stages))
    begun = max((i for i, stage in enumerate(stages) if has_begun(stage)), default=0)
    for index, stage in enumerate(stages[:begun]):
        if has_begun(stage):
            _require_ended(stage, index)
    if begun == 0 or saved_steps(stages[begun - 1].location):
        return begun
    check_run(_with_chosen_positions(stages[begun]))
    finished = max(saved_steps(stages[begun].location), default=0)
    if begun == len(stages) - 1 and finished >= stages[begun].train.steps:
        return len(stages)
    raise UserError(
        f"stage {begun + 1} needs the checkpoint in {stages[begun - 1].location}, which is gone; "
        "restore that folder, or start again with another --run_dir"
    )


def _require_as_many(stages: list[RunConfig], given: int) -> None:
    """Raises UserError if the run in the folder was begun with more or fewer stages.

    Args:
      given: the number of stages in the recipe.
    """
    last = stages[-1]
    count = stages_up_to(configuration.resolved(last))
    more = f"{last.location}/{EARLIER_STAGES}/{count}"
    if has_begun(dataclasses.replace(last, run_dir=more)):
        begun = f"{count + 1} or more"
    elif has_begun(last):
        then = stages_up_to(recorded(_with_recorded(last)))
        # A run without stages may have begun from a stage of another run, which has moved since.
        if then == count or _is_same_run(last):
            return
        begun = str(then) if then > 1 else "one or none"
    else:
        return
    remedy = "give as many, or another --run_dir"
    if saved_steps(last.location):
        kind = "adapter" if last.adapter.rank else "model"
        remedy += f"; --{kind}.path {last.location} --run_dir NEW goes on from its weights"
    raise UserError(
        f"stages: found {given or 'none'}, but the run in {last.location} was begun with {begun}; "
        f"{remedy}"
    )


def _is_same_run(begun: RunConfig) -> bool:
    """Returns whether the folder of a begun stage holds its run, of any length."""
    try:
        check_run(_with_chosen_positions(begun), process_zero=False, steps_known=False)
    except UserError:
        return False
    return True


def _require_ended(stage: RunConfig, index: int) -> None:
    """Raises UserError if the folder of a stage, from which the next one has begun, holds another
    run, or one of another length: it would not be trained any further."""
    run = check_run(_with_chosen_positions(stage), steps_known=False)
    trained = recorded_identity(run)["train.steps"]
    if trained != stage.train.steps:
        raise UserError(
            f"stages[{index}].steps: found {stage.train.steps}, but stage {index + 1} has ended "
            f"after {trained} steps, and stage {index + 2} has begun from it; {trained} would "
            "work, or another --run_dir"
        )


def _with_chosen_positions(stage: RunConfig) -> RunConfig:
    """Returns a stage that has begun with the POSITIONS that `auto` chose for it then, which are
    part of its run's identity."""
    if "positions" not in stage.auto:
        return stage
    began = recorded_identity(_with_recorded(stage))

    def completed(given: dict[str, Any], field: str) -> dict[str, Any]:
        chosen = {name: value for name, value in began[field].items() if name in POSITIONS}
        return {**chosen, **given}

    model, preference = stage.model, stage.preference
    if preference.ref_model and not preference.ref_overrides:
        overrides = completed({}, "preference.ref_overrides")
        preference = dataclasses.replace(preference, ref_overrides=overrides)
    model = dataclasses.replace(model, overrides=completed(model.overrides, "model.overrides"))
    return dataclasses.replace(stage, model=model, preference=preference)


def _with_recorded(stage: RunConfig) -> RunDirectory:
    """Returns a begun stage's folder with the configuration that it has recorded, also of one in a
    bucket."""
    run = RunDirectory.of(stage)
    if run.mirror is not None:
        run.mirror.pull(run.config.name)
    return run


def _announce(stages: list[RunConfig], index: int) -> None:
    stage = stages[index]
    _say(
        f"stage {index + 1} of {len(stages)}: {stage.data.context_length:,} tokens, "
        f"{stage.train.steps} steps"
    )


def _say(line: str) -> None:
    """Prints a line in process 0."""
    if process() == 0:
        print(line, flush=True)
