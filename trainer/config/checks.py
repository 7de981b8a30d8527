"""Rules across the sections of a configuration; trainer.config.schema has those within one."""

import dataclasses
import math
import operator
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from data.clean import CleanConfig
from data.errors import UserError
from data.paths import refuse_store
from data.trajectories.options import TrajectoryConfig

from .data import DataConfig
from .numbers import refusal
from .optimizer import OptimizerConfig
from .preference import PreferenceConfig
from .require import require
from .schema import ModelConfig, RunConfig


def check(config: RunConfig, source: str = "configuration") -> RunConfig:
    """Returns `config` unchanged if its sections agree. Needs no device.

    Args:
      source: the recipe or command line of the configuration, which begins an error.

    Raises:
      UserError: one line that names the field, what was found and what would work.
    """
    if reason := refusal(config):
        raise UserError(f"{source}: {reason}")
    _check_stores(config, source)
    try:
        _check_name(config.name)
        if config.trajectories.path:
            _check_trajectories(config)
        else:
            _check_model(config.model)
            _check_data(config.data)
            _check_preference(config)
        _check_sequence(config)
        _check_batch(config)
        if config.train.epochs is None:
            check_profile(config)
        _check_stages(config)
        _check_optimizer(config)
        _check_adapter(config)
    except ValueError as error:
        raise UserError(f"{source}: {error}") from error
    return config


# Fields whose paths may be in a store, such as gs://, and texts that are not paths.
IN_STORES = (
    "data.path",
    "data.sources.path",
    "data.held_out_path",
    "data.prepared",
    "compile_cache",
    "run_dir",
    "model.path",
    "adapter.path",
)
TEXTS = ("samples.prompts", "planned")


def _check_stores(value: object, source: str, field: str = "") -> None:
    """Raises UserError if a field that must be a local path names a store."""
    if field in IN_STORES or field in TEXTS:
        return
    if isinstance(value, str):
        try:
            refuse_store(value)
        except UserError as error:
            raise UserError(f"{source}: {field}: {error}") from None
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _check_stores(entry, source, field)
    elif isinstance(value, dict) or dataclasses.is_dataclass(value):
        entries = value if isinstance(value, dict) else vars(value)
        for name, entry in entries.items():
            _check_stores(entry, source, f"{field}.{name}".lstrip("."))


class Switch(NamedTuple):
    """A field without which other fields have no effect.

    Attributes:
      field: its dotted name.
      is_on: whether its value, with the configuration, lets the others count.
      needs: what would switch it on.
      fields: the others, without effect unless it is on.
      others: further fields that can switch them on.
    """

    field: str
    is_on: Callable[[Any, RunConfig], bool]
    needs: str
    fields: tuple[str, ...]
    others: tuple[str, ...] = ()

    def counts(self, config: RunConfig) -> bool:
        """Whether the fields have an effect."""
        return self.is_on(operator.attrgetter(self.field)(config), config)


def _is_given(value: Any, _: RunConfig) -> bool:
    return bool(value)


def _of_section(section: str, config_class: type, *besides: str) -> tuple[str, ...]:
    """The dotted names of a section's fields, except those in `besides`."""
    names = (field.name for field in dataclasses.fields(config_class))
    return tuple(f"{section}.{name}" for name in names if name not in besides)


SWITCHES = (
    Switch(
        "adapter.rank",
        _is_given,
        "at least 1",
        ("adapter.alpha", "adapter.targets", "adapter.use_rslora"),
    ),
    Switch(
        "preference.loss",
        _is_given,
        "a loss, such as sigmoid (DPO)",
        _of_section("preference", PreferenceConfig, "loss"),
    ),
    Switch(
        "preference.loss", lambda loss, _: loss == "simpo", "simpo", ("preference.simpo_gamma",)
    ),
    Switch(
        "trajectories.path",
        _is_given,
        "a folder of episodes",
        _of_section("trajectories", TrajectoryConfig, "path"),
    ),
    Switch("checkpoint.best", _is_given, "the name of a metric", ("checkpoint.best_is",)),
    Switch(
        "optimizer.schedule", lambda name, _: name == "wsd", "wsd", ("optimizer.decay_fraction",)
    ),
    Switch(
        "optimizer.schedule",
        lambda name, _: name != "constant",
        "cosine, linear or wsd",
        ("optimizer.final_fraction",),
    ),
    Switch(
        "optimizer.name",
        lambda name, _: name != "adafactor",
        "adamw, lion or muon",
        ("optimizer.beta1", "optimizer.beta2"),
    ),
    Switch(
        "optimizer.name",
        lambda name, _: name in ("adamw", "muon"),
        "adamw or muon",
        ("optimizer.epsilon",),
    ),
    Switch(
        "memory.remat",
        lambda _, config: config.memory.policy.every_k,
        "every_k or offload_every_k",
        ("memory.every_k",),
    ),
    Switch(
        "data.held_out_fraction",
        lambda share, config: bool(share or config.data.held_out_path),
        "a share above 0, or data.held_out_path",
        ("train.evaluate_every",),
        ("data.held_out_path",),
    ),
    Switch("samples.prompts", _is_given, "at least one prompt", ("samples.new_tokens",)),
    Switch("logging.profile_steps", _is_given, "[FIRST, LAST]", ("logging.profile_processes",)),
)
_DEFAULTS = RunConfig()
_READ_OF_EPISODES = ("context_length", "prepared", "held_out_fraction", "seed")
"""The fields of the section data that a run on trajectories reads."""
_EARLIER_DEFAULTS = {
    "data.template": "vicuna_v1.1",
    "data.clean.html": "detect",
    "data.clean.rate_limits": True,
}
"""Of fields that it does not read; a run that began with them keeps them."""


def without_effect(config: RunConfig) -> tuple[str, ...]:
    """Returns the fields whose values make no difference to a configuration."""
    return tuple(
        field for switch in SWITCHES if not switch.counts(config) for field in switch.fields
    )


def check_switches(config: RunConfig, source: str) -> None:
    """Refuses a field that has no effect, since whoever set it expects one.

    Args:
      source: as for `check`.

    Raises:
      UserError: names the field, and the one that would make it count.
    """
    for switch in SWITCHES:
        for field in () if switch.counts(config) else switch.fields:
            value = operator.attrgetter(field)
            if value(config) != value(_DEFAULTS):
                found = operator.attrgetter(switch.field)(config)
                raise UserError(
                    f"{source}: {switch.field}: found {found!r} with {field}; needs {switch.needs}"
                )


def _check_name(name: str) -> None:
    """A run's name is that of a folder in runs/."""
    inside = os.path.normpath(name)
    require(
        not name or not (os.path.isabs(name) or inside.split(os.sep)[0] in (os.curdir, os.pardir)),
        "name",
        name,
        "the name of a folder in runs/; --run_dir names any other folder",
    )


def _check_model(model: ModelConfig) -> None:
    """Requires a model and a tokenizer, which a section may lack until the run is complete."""
    if not (model.path or model.preset or model.overrides):
        raise ValueError(
            "model.path: no model; give --model.path HF_DIR, or for a model from scratch "
            "model.preset or model.overrides"
        )
    require(
        bool(model.path or model.tokenizer),
        "model.tokenizer",
        model.tokenizer,
        "a tokenizer's folder or hub name for a model from scratch",
    )


def _check_trajectories(config: RunConfig) -> None:
    """A trajectory model starts from scratch or from another one, and reads no text."""
    model = config.model
    require(
        bool(model.path or model.preset or model.overrides),
        "model.preset",
        model.preset,
        "a shape, here or as model.overrides, or in model.path a run on trajectories",
    )
    require(
        not config.data.sources,
        "data.sources",
        [source.path for source in config.data.sources],
        "to be left out with trajectories.path; keep one of them",
    )
    require(
        config.preference.loss is None,
        "preference.loss",
        config.preference.loss,
        "to be left out with trajectories.path, which has no pairs",
    )
    for field in (
        *_of_section("data", DataConfig, "sources", "clean", *_READ_OF_EPISODES),
        *_of_section("data.clean", CleanConfig),
    ):
        value, default = (operator.attrgetter(field)(each) for each in (config, _DEFAULTS))
        require(
            value in (default, _EARLIER_DEFAULTS.get(field, default)),
            field,
            value,
            "to be left out with trajectories.path, whose episodes have no texts",
        )
    require(
        config.data.seed >= 0, "data.seed", config.data.seed, "0 or more with trajectories.path"
    )


def _check_preference(config: RunConfig) -> None:
    """Preferences are learned only from pairs."""
    loss, formats = config.preference.loss, [source.format for source in config.data.sources]
    pairs = [source_format == "preference" for source_format in formats]
    require(
        loss is not None or not any(pairs),
        "preference.loss",
        loss,
        "a loss, such as sigmoid (DPO) or kto, for sources of format preference",
    )
    require(
        loss is None or all(pairs),
        "data.sources.format",
        formats,
        "format: preference in every source with preference.loss, such as --data.sources "
        "'[{path: pairs.jsonl, format: preference}]'; train on other data in a separate run",
    )
    require(
        loss is None or config.data.train_on == "all",
        "data.train_on",
        config.data.train_on,
        "all with preference.loss, which compares everything after the prompt"
        + "; prompts that hold all turns but the last would work"
        * (config.data.train_on == "last"),
    )
    require(
        not config.preference.ref_without_adapter or config.adapter.rank > 0,
        "preference.ref_without_adapter",
        True,
        "an adapter: adapter.rank of at least 1",
    )


def _check_adapter(config: RunConfig) -> None:
    """Adapters need a pretrained language model, and choose what is trained."""
    if config.adapter.rank:
        require(
            not config.trajectories.path,
            "adapter.rank",
            config.adapter.rank,
            "0 with trajectories: their model starts from scratch",
        )
        require(
            config.model.trainable == ".*",
            "model.trainable",
            config.model.trainable,
            "to be left out with adapters; adapter.train names more modules to train",
        )


def _check_optimizer(config: RunConfig) -> None:
    """Updates that stream through the device layer by layer must be elementwise."""
    on_host = next(
        (
            name
            for name in ("moments_on_host", "parameters_on_host")
            if getattr(config.memory, name)
        ),
        None,
    )
    require(
        on_host is None or config.optimizer.name in ("adamw", "lion"),
        "optimizer.name",
        config.optimizer.name,
        f"adamw or lion with memory.{on_host}",
    )
    # Their random bits depend on an element's index in the whole array, not in its layer.
    rounded = next(
        (
            f"optimizer.{name} {getattr(config.optimizer, name)}"
            for name, value in (("moment_dtype", "8bit"), ("weight_dtype", "bfloat16"))
            if getattr(config.optimizer, name) == value
        ),
        None,
    )
    require(
        rounded is None or on_host is None,
        f"memory.{on_host}",
        True,
        f"to be left out with {rounded}, whose rounding needs whole arrays on the device",
    )
    if config.optimizer.weight_dtype == "bfloat16":
        require(
            not config.memory.prefetch,
            "memory.prefetch",
            True,
            "to be left out with optimizer.weight_dtype bfloat16",
        )
        require(
            not config.adapter.rank,
            "optimizer.weight_dtype",
            "bfloat16",
            "float32 with adapters, whose base is in model.compute_dtype already",
        )


def _check_data(data: DataConfig) -> None:
    if not data.sources:
        raise ValueError("data.sources: no data; give --data.path FILE, or sources in the recipe")


def _check_sequence(config: RunConfig) -> None:
    """The context length must divide over the devices and chunks that share it."""
    mesh, attention, length = config.mesh, config.attention, config.data.context_length
    require(
        attention.schedule_name != "local" or mesh.sequence == 1,
        "attention.schedule",
        attention.schedule,
        f"to attend across mesh.sequence = {mesh.sequence} shards, as local cannot; use ring or "
        "all_gather",
    )
    zigzag = attention.layout == "zigzag"  # each device has two pieces of the sequence
    pieces = mesh.sequence * (2 if zigzag else 1)
    shorter, longer = length // pieces * pieces, -(-length // pieces) * pieces
    require(
        length % pieces == 0,
        "data.context_length",
        length,
        f"a multiple of {'2 * ' if zigzag else ''}mesh.sequence = "
        f"{pieces}{' (zigzag)' if zigzag else ''}; the next good length is "
        f"{longer}{f' (or {shorter})' if shorter else ''}",
    )
    local_tokens = length // mesh.sequence
    require(
        local_tokens % config.memory.query_chunks == 0,
        "memory.query_chunks",
        config.memory.query_chunks,
        f"a divisor of a device's {local_tokens} tokens",
    )
    shards = mesh.sequence * mesh.tensor
    require(
        not mesh.sequence_parallel or length % shards == 0,
        "data.context_length",
        length,
        f"a multiple of mesh.sequence * mesh.tensor = {shards} with mesh.sequence_parallel",
    )


def _check_batch(config: RunConfig) -> None:
    """A batch must divide over the devices and microbatches that share it."""
    mesh, batch_size = config.mesh, config.train.batch_size
    rows = mesh.rows * config.train.accumulation
    axes = "mesh.data * mesh.fsdp" + " * mesh.expert" * (mesh.expert > 1)
    require(
        batch_size % rows == 0,
        "train.batch_size",
        batch_size,
        f"a multiple of {axes} * train.accumulation = {rows}; the next good size is "
        f"{-(-batch_size // rows) * rows}",
    )


def _check_stages(config: RunConfig) -> None:
    """The fields of each stage are checked with it, in trainer.stages."""
    require(
        config.train.epochs is None or not config.stages,
        "train.epochs",
        config.train.epochs,
        "to be left out with stages, each of which has its steps",
    )


def peak_warning(config: RunConfig) -> str | None:
    """Returns a warning if the learning rate never reaches its peak.

    Args:
      config: of a run whose steps are known; train.epochs have become steps.
    """
    optimizer, steps = config.optimizer, config.train.steps
    if warning := _early_decay_warning(optimizer, steps):
        return warning
    warmup, decays = optimizer.first_steps(steps), optimizer.schedule == "wsd"
    stable = steps - optimizer.decay_steps(steps) if decays else steps
    if warmup <= stable:
        return None

    def share(step: int) -> float:
        """The share of the peak at a step from 1."""
        lost = (1 - optimizer.final_fraction) * max(step - stable, 0) / max(steps - stable, 1)
        return min(step / warmup, 1.0) * (1 - lost)

    highest = max(share(step) for step in range(max(stable, 1), steps + 1))
    field = "warmup_fraction" if optimizer.warmup_fraction else "warmup_steps"
    ends = f"decays after step {stable} of" if decays else "has"
    shorter = f"optimizer.warmup_steps {stable} or less"
    if 0.03 * steps <= stable:
        shorter += ", or optimizer.warmup_fraction 0.03,"
    return (
        f"optimizer.{field}: found {getattr(optimizer, field)}, a warm-up of {warmup} steps, but "
        f"the run {ends} {steps}: the learning rate rises to only {highest:.1%} of its peak; "
        f"{shorter} would work"
    )


def _early_decay_warning(optimizer: OptimizerConfig, steps: int) -> str | None:
    """Returns a warning if the rate decays from the first step, and that is at most half the
    peak: a run of one or two steps."""
    if optimizer.schedule not in ("cosine", "linear") or optimizer.first_steps(steps):
        return None
    is_linear = optimizer.schedule == "linear"
    left = 1 - 1 / steps if is_linear else (1 + math.cos(math.pi / steps)) / 2
    highest = optimizer.final_fraction + (1 - optimizer.final_fraction) * left
    if highest > 0.5 + 1e-9:
        return None
    return (
        f"optimizer.schedule: found {optimizer.schedule!r} in a run of {steps} "
        f"step{'s' * (steps > 1)} without warm-up: the learning rate is at most {highest:.1%} of "
        "its peak; optimizer.warmup_steps 1, or optimizer.schedule constant, would work"
    )


def check_profile(config: RunConfig) -> None:
    """Raises ValueError unless a profile ends before the run, whose steps are known, does."""
    steps = config.logging.profile_steps
    require(
        not steps or steps[1] <= config.train.steps,
        "logging.profile_steps",
        steps,
        f"a last step of at most train.steps = {config.train.steps}",
    )
