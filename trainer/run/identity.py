"""What identifies a run, and the rule for continuing it.

The identity of a run is its resolved configuration without the fields that cannot change its
result: logging, the frequency of saves and evaluations, the locations of files, and the placement
on hardware (see PLACEMENT). So a run may continue on another mesh or with other tiles, and after
its files have moved, since checkpoints hold fingerprints of their contents. Any other configuration
is refused in a run's folder.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

from data.errors import UserError
from data.within import read_text
from trainer.checkpoint.commit import located, steps_in
from trainer.config import load as configuration
from trainer.config.data import SourceConfig
from trainer.config.fields import SECTIONS
from trainer.config.schema import RunConfig
from trainer.config.yaml_text import MAX_BYTES, InvalidYAML, parse
from trainer.run.directory import RunDirectory

# Sections and fields that may change when a run continues.
PLACEMENT = (
    "name",
    "run_dir",
    "data.prepared",
    "data.cache_gib",
    "compile_cache",  # locations
    # locations of files that have fingerprints
    "model.path",
    "model.tokenizer",
    "adapter.path",
    "data.sources.path",
    "data.held_out_path",
    "logging",
    "checkpoint",
    "evaluations",
    "samples",
    "train.log_every",
    "train.evaluate_every",
    "train.accumulation",
    "train.epochs",  # the steps define the length of a run
    "train.non_finite",  # a stopped run may continue with another choice
    "mesh",
    "auto",
    "planned",
    "distributed",
    "memory",
    "attention.kernel",
    "attention.backward",
    "attention.query_tile",
    "attention.key_tile",
)

_NOTHING = "(nothing)"


def identity(config: RunConfig) -> dict[str, Any]:
    """The fields that identify a run: `section.field` -> value, without PLACEMENT."""
    return _identity(configuration.resolved(config))


def shared_fields(config: RunConfig) -> dict[str, Any]:
    """The fields that a run's processes must share: its identity, and collective settings."""
    written = configuration.resolved(config)
    # Hosts may have their disks at different places.
    written["checkpoint"]["local"] = "given" if config.checkpoint.local else "not given"
    together = ("mesh", "attention", "memory", "train", "checkpoint")
    return identity(config) | {
        f"{section}.{name}": value
        for section in together
        for name, value in written[section].items()
    }


def require_same(run: RunDirectory, config: RunConfig, steps_known: bool) -> None:
    """Raises UserError with the first difference unless the folder's run is that of `config`."""
    try:
        written = parse(read_text(run.config, run.folder, MAX_BYTES), str(run.config))
        configuration.check_version(written, str(run.config))
        old_fields = _identity(_with_defaults(written, configuration.resolved(RunConfig())))
    except (OSError, InvalidYAML, AttributeError, TypeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{run.config}: cannot be read as a run's configuration ({error}); give another "
            f"--run_dir, or delete {run}"
        ) from error
    new_fields = identity(config)
    if not steps_known:
        old_fields["train.steps"] = new_fields["train.steps"]
    if _is_longer(run, config, old_fields, new_fields):
        return
    for name in {**new_fields, **old_fields}:
        old, new = old_fields.get(name, _NOTHING), new_fields.get(name, _NOTHING)
        if old != new:
            difference = _first_difference(_Difference(name, old, new))
            raise UserError(
                f"{run}: another run is in this folder: {difference.name} is "
                f"{difference.old!r} there and {difference.new!r} now; "
                f"{_ways_out(run, difference.name)}"
            )


def _is_longer(
    run: RunDirectory, config: RunConfig, old: dict[str, Any], new: dict[str, Any]
) -> bool:
    """Returns whether `config` only changes the run's length, without affecting finished steps."""
    if {**old, "train.steps": 0} != {**new, "train.steps": 0}:
        return False
    finished = max(_steps(run), default=0)
    stable = min(config.optimizer.stable_steps(fields["train.steps"]) for fields in (old, new))
    return stable > 0 and finished <= stable


def _steps(run: RunDirectory) -> list[int]:
    """The steps that the run has checkpoints of."""
    return steps_in(located(str(run)) / run.checkpoints.name)


class _Difference(NamedTuple):
    """A field, or an entry of it, with different values in two configurations."""

    name: str
    old: Any
    new: Any


def _first_difference(whole: _Difference) -> _Difference:
    """The first differing entry of two lists or mappings; `whole` for other values."""
    name, old, new = whole
    if isinstance(old, dict) and isinstance(new, dict):
        entries = [
            _Difference(f"{name}.{key}", old.get(key, _NOTHING), new.get(key, _NOTHING))
            for key in {**old, **new}
        ]
    elif isinstance(old, list) and isinstance(new, list):
        pairs = itertools.zip_longest(old, new, fillvalue=_NOTHING)
        entries = [_Difference(f"{name}[{index}]", *pair) for index, pair in enumerate(pairs)]
    else:
        return whole
    return next(_first_difference(entry) for entry in entries if entry.old != entry.new)


def _ways_out(run: RunDirectory, field: str) -> str:
    """Advice for a folder whose run differs in `field`; never deletes a trained model."""
    if not (_steps(run) or run.checkpoints.is_dir()):
        return f"give another --run_dir, or delete {run}"
    if field == "train.steps":
        return (
            f"--model.path {run} --run_dir NEW starts from its trained weights, with new "
            "moments; a run can be extended with optimizer.schedule constant, or wsd before it "
            "decays"
        )
    return "give another --run_dir"


def _with_defaults(written: Any, defaults: Any) -> Any:
    """A resolved configuration with defaults for newer fields."""
    if not (isinstance(written, dict) and isinstance(defaults, dict)):
        return written
    return {
        **defaults,
        **{name: _with_defaults(value, defaults.get(name)) for name, value in written.items()},
    }


def _identity(written: dict[str, Any]) -> dict[str, Any]:
    """`identity` of a resolved configuration."""
    flat: dict[str, Any] = {}
    for section, value in written.items():
        fields = {section: value}
        if section in SECTIONS:
            fields = {f"{section}.{name}": inner for name, inner in value.items()}
        flat |= {
            name: inner
            for name, inner in fields.items()
            if section not in PLACEMENT and name not in PLACEMENT
        }
    if "data.sources" in flat:
        # Newer fields have their defaults in older runs.
        sources = [
            {**dataclasses.asdict(SourceConfig(path="")), **source}
            for source in flat["data.sources"]
        ]
        flat["data.sources"] = [
            {
                name: value
                for name, value in source.items()
                if f"data.sources.{name}" not in PLACEMENT
            }
            for source in sources
        ]
    return flat
