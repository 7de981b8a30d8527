"""What identifies a run, and the rule for continuing it.

The identity of a run is its resolved configuration without the fields that cannot change its
result: logging, the frequency of saves and evaluations, the locations of files, and the placement
on hardware (see PLACEMENT). So a run may continue on another mesh or with other tiles, and after
its files have moved, since checkpoints hold fingerprints of their contents. Any other configuration
is refused in a run's folder.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from data.conversation import TEMPLATE_FILES
from data.errors import UserError
from data.untrusted_files import read_text
from trainer.checkpoint.commit import CHECKPOINTS, located, steps_in
from trainer.checkpoint.local_record import RECORD, newest_local_step
from trainer.config import load as configuration
from trainer.config.checks import without_effect
from trainer.config.data import SourceConfig
from trainer.config.fields import SECTIONS
from trainer.config.schema import OptimizerConfig, RunConfig
from trainer.config.yaml_text import MAX_BYTES, InvalidYAML, parse
from trainer.run.directory import EARLIER_STAGES, RunDirectory

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
    "preference.ref_tokenizer",
    "trajectories.path",
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
    "attention.layout",
    "attention.schedule",
    "attention.kernel",
    "attention.backward",
    "attention.query_tile",
    "attention.key_tile",
)

# The fields that `stages` sets in later stages: the reference of all is the first one's model.
_STAGES_REFERENCE = (
    "preference.ref_model",
    "preference.ref_overrides",
    "preference.ref_without_adapter",
)

_NOTHING = "(nothing)"
# Settings of an evaluation that do not affect what it measures.
_HOW_MEASURED = ("name", "every", "rows", "chunk")


def identity(config: RunConfig) -> dict[str, Any]:
    """The fields that identify a run: `section.field` -> value, without PLACEMENT."""
    return _identity(configuration.resolved(config))


def shared_fields(config: RunConfig) -> dict[str, Any]:
    """The fields that a run's processes must share: its identity, and collective settings."""
    written = configuration.resolved(config)
    # Hosts may have their disks at different places.
    written["checkpoint"]["local"] = _given(config.checkpoint.local)
    together = ("mesh", "attention", "memory", "train", "checkpoint", "samples")
    fields = {
        f"{section}.{name}": value
        for section in together
        for name, value in written[section].items()
    }
    # So may their files, which are the other texts of an evaluation.
    fields["evaluations"] = [
        {
            name: value
            for name, value in entry.items()
            if name in ("name", "test") or not isinstance(value, str)
        }
        for entry in written["evaluations"]
    ]
    return identity(config) | fields


def require_same(run: RunDirectory, config: RunConfig, steps_known: bool) -> None:
    """Raises UserError with the first difference unless the folder's run is that of `config`.

    The number of steps may differ if that affects no finished step.
    """
    old_fields, new_fields = recorded_identity(run), identity(config)
    if not steps_known:
        old_fields["train.steps"] = new_fields["train.steps"]
    for field in without_effect(config):  # earlier releases accepted any value
        old_fields.pop(field, None)
        new_fields.pop(field, None)
    names = [name for name in {**new_fields, **old_fields} if name != "train.steps"]
    for name in (*names, "train.steps"):  # last: alone it may be allowed
        old, new = old_fields.get(name, _NOTHING), new_fields.get(name, _NOTHING)
        if old == new:
            continue
        difference = _first_difference(_Difference(name, old, new))
        ways_out = _ways_out(run) if name != "train.steps" else _refused_length(run, config, old)
        if ways_out is None:
            return
        if name in _STAGES_REFERENCE and stages_up_to(configuration.resolved(config)) > 1:
            ways_out = (
                "with stages it is derived from them, by other rules in earlier versions: finish "
                f"the run with the version that began it, or {ways_out}"
            )
        raise UserError(
            f"{run}: another run is in this folder: {difference.name} is "
            f"{difference.old!r} there and {difference.new!r} now; {ways_out}"
        )


def recorded_identity(run: RunDirectory) -> dict[str, Any]:
    """`identity` of the folder's run.

    Raises:
      UserError: its configuration cannot be read.
    """
    return _identity(recorded(run))


def recorded(run: RunDirectory) -> dict[str, Any]:
    """The resolved configuration of the folder's run, with defaults for newer fields.

    Raises:
      UserError: it cannot be read.
    """
    try:
        written = parse(read_text(run.config, run.folder, MAX_BYTES), str(run.config))
        configuration.check_version(written, str(run.config))
        whole = _with_defaults(written, configuration.resolved(RunConfig()))
        _identity(whole)  # needs sections and fields of the right kinds
        evaluation_called("", whole["evaluations"])
        return whole
    except (OSError, InvalidYAML, AttributeError, TypeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{run.config}: cannot be read as a run's configuration ({error}); give another "
            f"--run_dir, or delete {run}"
        ) from error


def evaluation_called(name: str, entries: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The entry of `evaluations` with this name; None if there is none."""
    return next((x for x in entries if (x.get("name") or x.get("test")) == name), None)


def changed_setting(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """The first setting by which two entries of `evaluations` measure different things; None if
    they measure the same, as far as both have settings: releases may add some."""
    names = sorted((old.keys() & new.keys()).difference(_HOW_MEASURED))
    return next((name for name in names if old[name] != new[name]), None)


def changed_evaluations(run: RunDirectory, config: RunConfig) -> Iterator[str]:
    """Yields a line for each evaluation that measures something else than in the folder's run."""
    then = recorded(run)["evaluations"]
    for new in configuration.resolved(config)["evaluations"]:
        name = new.get("name") or new["test"]
        old = evaluation_called(name, then)
        if old is not None and (field := changed_setting(old, new)):
            yield (
                f"evaluations: {field} of {name} was {old[field]!r} and is {new[field]!r} now; "
                f"{name}.jsonl goes on with other measurements"
            )


def stages_up_to(written: Mapping[str, Any]) -> int:
    """The number of a resolved configuration's stage, which begins with the one before it; 1 for
    the first stage and for a run without stages."""
    paths = (str(written[section]["path"] or "") for section in ("adapter", "model"))
    before = (re.search(rf"/{EARLIER_STAGES}/(\d+)$", path) for path in paths)
    return next((int(match[1]) + 1 for match in before if match), 1)


def saved_steps(location: str) -> list[int]:
    """The steps of the checkpoints in a run's folder, ascending."""
    return steps_in(located(location) / CHECKPOINTS)


def _refused_length(run: RunDirectory, config: RunConfig, old: int) -> str | None:
    """Says why a run of `old` steps cannot change its length, and what would work; None if it can,
    since that affects no finished step."""
    optimizer, new, shorter = config.optimizer, config.train.steps, min(old, config.train.steps)
    stable = min(optimizer.stable_steps(steps) for steps in (old, new))
    saved = max(saved_steps(str(run)), default=0)
    # Local checkpoints count without checkpoint.local too: a later start may continue from them.
    finished = max(saved, newest_local_step(run.folder, str(run)))
    if stable > 0 and finished <= stable:
        return None
    if not finished:
        return _ways_out(run)
    if stable > 0:
        ends = "ends" if optimizer.schedule == "constant" else "decays"
        reason = f"a run of {shorter} steps {ends} after step {stable}, and {finished} are finished"
    else:
        reason = f"a run can change its length with {_extendable(optimizer)}"
    if saved <= stable < finished and stable > 0:
        remedy = f"without {run}/{RECORD} it continues from step {saved}, and {new} would work"
    elif new < old:
        remedy = f"{finished if optimizer.schedule == 'constant' and stable else old} would work"
    elif saved:
        remedy = (
            f"--model.path {run} --run_dir NEW starts from its trained weights, with new moments"
        )
    else:
        remedy = "give another --run_dir"
    return f"{reason}; {remedy}"


def _extendable(optimizer: OptimizerConfig) -> str:
    """Says which optimizer settings a run lacks to change its length."""
    needed = []
    if optimizer.warmup_fraction:
        needed.append("optimizer.warmup_steps instead of warmup_fraction")
    if optimizer.schedule != "constant":
        needed.append("optimizer.schedule constant, or wsd before it decays")
    return ", and ".join(needed)


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


def _ways_out(run: RunDirectory) -> str:
    """Advice for a folder with another run; never deletes a trained model."""
    local = newest_local_step(run.folder, str(run))
    if saved_steps(str(run)) or run.checkpoints.is_dir() or local:
        return "give another --run_dir"
    return f"give another --run_dir, or delete {run}"


def _with_defaults(written: Any, defaults: Any) -> Any:
    """A resolved configuration with defaults for newer fields."""
    if not (isinstance(written, dict) and isinstance(defaults, dict)):
        return written
    return {
        **defaults,
        **{name: _with_defaults(value, defaults.get(name)) for name, value in written.items()},
    }


def _given(value: str | None) -> str:
    return "given" if value else "not given"


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
    # The reference's location may change, but not whether it is a separate model.
    flat["preference.ref_model"] = _given(flat.get("preference.ref_model"))
    # Another path of a chat template's file may have its text, which prepared data are named by.
    if str(flat.get("data.template")).endswith(TEMPLATE_FILES):
        flat["data.template"] = "a file"
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
