"""A run's folder: what lies where, and the rule by which the same command continues it.

    RUN/config.yaml           the resolved configuration, as last run
    RUN/metrics.jsonl         one line of training metrics every train.log_every steps
    RUN/held_out.jsonl        one line for every held-out loss
    RUN/*.jsonl.unreadable    lines of these two that could not be read when the run went on
    RUN/tensorboard/          the same figures for TensorBoard
    RUN/wandb/                the same for Weights & Biases, where it is asked for
    RUN/profile/              what the devices did in logging.profile_steps
    RUN/assets/               what each checkpoint holds beside arrays, as gathered by the last start
    RUN/checkpoints/STEP/     model/ assets/ optimizer/ data/ manifest.json
    RUN/evaluation/           what line retrieval found, where `make quickstart` evaluated
    RUN/lock                  who trains, or trained last; the file is locked while they do

A run *is* its resolved configuration without what cannot change its result: logging, how often is saved and measured, where
files lie, and placement on hardware (see PLACEMENT). So a run may be continued on another mesh or with other tiles, and after
its files have moved: what they hold is told by fingerprints in its checkpoints. Another configuration in the same folder is
refused. `step` counts finished optimizer steps everywhere.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from data.errors import UserError
from data.paths import no_pattern
from trainer.config import load as configuration
from trainer.config.schema import RunConfig
from trainer.config.yaml_text import InvalidYAML, parse
from trainer.run.lock import require_free

# Sections and fields that do not make another run: a resumed run may change them.
PLACEMENT = (
    "name", "run_dir", "data.prepared", "compile_cache",  # where things lie
    "model.path", "model.tokenizer", "data.sources.path", "data.held_out_path",  # their contents have fingerprints
    "logging", "checkpoint", "evaluate", "train.log_every", "train.evaluate_every", "train.accumulation",
    "train.non_finite",  # what a run that stopped may be continued with
    "mesh", "distributed", "memory", "attention.kernel", "attention.query_tile", "attention.key_tile",
)  # fmt: skip

_NOTHING = "(nothing)"
# A network file system that was asked for a file believes for a while that there is none (NFS for up to 60 seconds).
SEEN_SECONDS = 90


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The paths of one run's folder."""

    folder: pathlib.Path

    @property
    def config(self) -> pathlib.Path:
        """The resolved configuration."""
        return self.folder / "config.yaml"

    @property
    def metrics(self) -> pathlib.Path:
        """Training metrics, one JSON object a line."""
        return self.folder / "metrics.jsonl"

    @property
    def held_out(self) -> pathlib.Path:
        """Held-out losses, one JSON object a line."""
        return self.folder / "held_out.jsonl"

    @property
    def tensorboard(self) -> pathlib.Path:
        """TensorBoard's event files."""
        return self.folder / "tensorboard"

    @property
    def profile(self) -> pathlib.Path:
        """Profiles of chosen steps."""
        return self.folder / "profile"

    @property
    def assets(self) -> pathlib.Path:
        """What each checkpoint holds beside arrays."""
        return self.folder / "assets"

    @property
    def checkpoints(self) -> pathlib.Path:
        """Checkpoints, each in a folder named by its step."""
        return self.folder / "checkpoints"

    @property
    def evaluation(self) -> pathlib.Path:
        """Results of line retrieval."""
        return self.folder / "evaluation"

    @property
    def lock(self) -> pathlib.Path:
        """Locked by the process that trains."""
        return self.folder / "lock"

    def cut_back(self, step: int, evaluated: bool = True, evaluations: Sequence[str] = ("held_out",)) -> None:
        """Forget the logged lines after `step`, the one that training goes on from; 0 forgets all.

        Steps that were logged but not saved are run again, and must not be in the files twice; nor the held-out loss of `step`
        itself where it is still to be measured (not `evaluated`). Lines that cannot be read are kept in a file beside, with a
        warning.
        """
        last_evaluated = step if evaluated else step - 1
        logs = [(self.metrics, step), *((self.folder / f"{name}.jsonl", last_evaluated) for name in evaluations)]
        for path, last in logs:
            if path.exists():
                _cut_back(path, last)


def identity(config: RunConfig) -> dict[str, Any]:
    """What makes `config` this run and no other: its flat fields, `section.field` to value, without PLACEMENT."""
    return _identity(configuration.resolved(config))


def check_run(config: RunConfig, first: bool = True) -> RunDirectory:
    """The run's folder, untouched; UserError if another run, or (asked by the first process) no run, is in it, or if
    another start is training there."""
    run = RunDirectory(config.folder)
    no_pattern(run.folder, "run_dir")
    if run.folder.exists() and not run.folder.is_dir():
        raise UserError(f"{run.folder}: is a file; give another --run_dir")
    if run.config.exists():
        _require_same(run, config)
        if first:
            require_free(run.lock)
    elif first and _strangers(config):
        raise UserError(
            f"{run.folder}: holds files but no config.yaml, so it is not a run; give another --run_dir, or delete it"
        )
    return run


def open_run(config: RunConfig, write: bool = True) -> RunDirectory:
    """The run's folder, made if need be, with `config` in it; errors as check_run's.

    From here on the folder is this run's, so whatever else can be wrong is best found before. With several processes
    only the first writes, and then the others look: UserError where they do not see what it wrote.
    """
    run = check_run(config, first=write)
    if write:
        try:
            run.folder.mkdir(parents=True, exist_ok=True)
            _write(run.config, configuration.dump(config))
        except OSError as error:
            raise UserError(f"{run.folder}: cannot write there ({error.strerror}); give another --run_dir") from error
    patience = time.monotonic() + SEEN_SECONDS
    while not run.config.exists():
        if time.monotonic() > patience:
            raise UserError(f"{run.folder}: not seen here, where process 0 has made it; a --run_dir that all processes share "
                            "would work")
        time.sleep(1)
    return run


def _strangers(config: RunConfig) -> list[pathlib.Path]:
    """What lies in the folder and was not put there by a start that did not get to write config.yaml."""
    prepared = pathlib.Path(config.data.prepared).expanduser().resolve()  # may be kept in the run's folder
    there = config.folder.iterdir() if config.folder.is_dir() else ()
    return [path for path in there if not path.name.endswith(".tmp") and not prepared.is_relative_to(path.resolve())]


def _require_same(run: RunDirectory, config: RunConfig) -> None:
    """UserError that names the first difference between the folder's run and `config`."""
    try:
        written = configuration.upgraded(parse(run.config.read_text(encoding="utf-8"), str(run.config)), str(run.config))
        there = _identity(_completed(written, configuration.resolved(RunConfig())))
    except (OSError, InvalidYAML, AttributeError, TypeError, UnicodeDecodeError) as error:
        raise UserError(f"{run.config}: cannot be read as a run's configuration ({error}); give another --run_dir, "
                        f"or delete {run.folder}") from error  # fmt: skip
    here = identity(config)
    for name in [*here, *(name for name in there if name not in here)]:
        old, new = there.get(name, _NOTHING), here.get(name, _NOTHING)
        if old != new:
            name, old, new = _difference(name, old, new)
            raise UserError(f"{run.folder}: another run is in this folder: {name} is {old!r} there and {new!r} now; "
                            f"{_ways_out(run, name)}")


def _difference(name: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """The first place within two values where they differ, by its name, and what is there in either."""
    if isinstance(old, dict) and isinstance(new, dict):
        parts = [(f"{name}.{key}", old.get(key, _NOTHING), new.get(key, _NOTHING)) for key in {**old, **new}]
    elif isinstance(old, list) and isinstance(new, list):
        pairs = itertools.zip_longest(old, new, fillvalue=_NOTHING)
        parts = [(f"{name}[{number}]", *pair) for number, pair in enumerate(pairs)]
    else:
        return name, old, new
    return next(_difference(*part) for part in parts if part[1] != part[2])


def _ways_out(run: RunDirectory, name: str) -> str:
    """What to do where `name` is another: to delete is no advice where a model has been trained."""
    if not run.checkpoints.is_dir():
        return f"give another --run_dir, or delete {run.folder}"
    if name == "train.steps":
        return f"--model.path {run.folder} --run_dir NEW starts from the weights that it has trained"
    return "give another --run_dir"


def _completed(written: Any, defaults: Any) -> Any:
    """A resolved configuration with the fields that its writer did not know yet, at their defaults."""
    if not (isinstance(written, dict) and isinstance(defaults, dict)):
        return written
    return {**defaults, **{name: _completed(value, defaults.get(name)) for name, value in written.items()}}


def _identity(written: dict[str, Any]) -> dict[str, Any]:
    flat = {}
    for section, value in written.items():
        fields = {section: value}
        if section in configuration.SECTIONS:
            fields = {f"{section}.{name}": inner for name, inner in value.items()}
        flat |= {name: inner for name, inner in fields.items() if section not in PLACEMENT and name not in PLACEMENT}
    if "data.sources" in flat:
        flat["data.sources"] = [{name: value for name, value in source.items() if f"data.sources.{name}" not in PLACEMENT}
                                for source in flat["data.sources"]]
    return flat


def _cut_back(path: pathlib.Path, last: int) -> None:
    kept, unreadable, numbers = [], [], []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if (step := _step(line)) is not None:
            kept += [line.decode() + "\n"] if step <= last else []
        elif line.strip() and number < len(lines):  # a last line without an end was cut short by a kill
            unreadable.append(line + b"\n")
            numbers.append(str(number))
    if unreadable:
        aside = path.with_name(path.name + ".unreadable")
        with aside.open("ab") as file:
            file.writelines(unreadable)
        shown = f"line{'s' * (len(numbers) > 1)} {', '.join(numbers[:5])}{', ...' * (len(numbers) > 5)}"
        print(f"warning: {path}: {shown} cannot be read; moved to {aside.name}", file=sys.stderr)
    _write(path, "".join(kept))


def _step(line: bytes) -> int | None:
    """A logged line's step; None for a line that cannot be read."""
    try:
        step = json.loads(line.decode())["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def _write(path: pathlib.Path, text: str) -> None:
    """Replace a file as a whole: killed at any moment, either the old or the new one is there."""
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)
