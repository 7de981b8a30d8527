"""A run's folder: its files, and the rule for continuing the run.

    RUN/config.yaml           the resolved configuration, as last run
    RUN/versions.json         this project's source (a digest, and git's commit), JAX and its
    plugins, as last run RUN/metrics.jsonl         one line of training metrics every
    train.log_every steps RUN/held_out.jsonl        one line for every held-out loss
    RUN/NAME.jsonl            one line for every measurement of a test in `evaluations`
    RUN/samples.jsonl         one line of answers to samples.prompts every samples.every steps
    RUN/local.json            the run's identifier in checkpoint.local, and the newest step there
    RUN/*.jsonl.unreadable    lines of these files that could not be read when the run was continued
    RUN/tensorboard/          the same figures for TensorBoard
    RUN/wandb/                the same for Weights & Biases, if logging.wandb asks for it
    RUN/profile/              a profile of logging.profile_steps
    RUN/assets/               the plain files that each checkpoint holds, as written by the last
    start RUN/checkpoints/STEP/     model/ assets/ optimizer/ data/ manifest.json
    RUN/stages/NUMBER/        the same for each stage before the last, if the recipe has stages
    RUN/evaluation/           results of line retrieval, if `make quickstart` evaluated
    RUN/lock                  names the process that trains, or trained last; locked while it does

The identity of a run is its resolved configuration without the fields that cannot change its
result: logging, the frequency of saves and evaluations, the locations of files, and the placement
on hardware (see PLACEMENT). So a run may continue on another mesh or with other tiles, and after
its files have moved, since checkpoints hold fingerprints of their contents. Any other configuration
is refused in a run's folder. `step` counts finished optimizer steps everywhere.
"""

import atexit
import contextlib
import dataclasses
import itertools
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from data.errors import UserError
from data.outputs import checkpoint_path
from data.within import check_within, read_text
from trainer.checkpoint.commit import located, steps_in
from trainer.config import load as configuration
from trainer.config.fields import SECTIONS
from trainer.config.schema import RunConfig, SourceConfig
from trainer.config.yaml_text import MAX_BYTES, InvalidYAML, parse
from trainer.run.bucket import Bucket
from trainer.run.lease import LOCK, Lease, leased, require_unused
from trainer.run.lock import held, require_free
from trainer.run.logs import Written, cut_back, replace_file
from trainer.run.mirror import Mirror, mirrored
from trainer.run.shared_token import TOKEN_FILE

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
    "attention.query_tile",
    "attention.key_tile",
)

EARLIER_STAGES = "stages"  # folder of earlier stages' runs
_NOTHING = "(nothing)"
_TRIAL = "lock-trial"  # a file that is written to a bucket and deleted, to see whether one may
# A network file system remembers a missing file for a while (NFS for up to 60 seconds).
VISIBLE_SECONDS = 90


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The paths of one run's folder; of a run in a bucket those of its small files while this
    process runs.

    Attributes:
      location: where the run is kept, as messages name it; the folder unless given.
      mirror: copies the small files to and from a bucket; None for a run on a disk.
      lease: of a run in a bucket that this process trains.
    """

    folder: pathlib.Path
    location: str = ""
    mirror: Mirror | None = None
    lease: Lease | None = None

    @classmethod
    def of(cls, config: RunConfig) -> "RunDirectory":
        """Returns the paths of a configuration's run."""
        if not config.in_bucket:
            return cls(config.folder)
        # Where no training follows, such as after a refusal.
        atexit.register(shutil.rmtree, config.folder, ignore_errors=True)
        mirror = Mirror(Bucket(config.location), config.folder)
        return cls(config.folder, config.location, mirror)

    def __str__(self) -> str:
        return self.location or str(self.folder)

    def before_checkpoint(self) -> None:
        """Makes sure that a checkpoint may be added to the run, and that the bucket has its logs up
        to here."""
        if self.lease is not None:
            self.lease.require()
        if self.mirror is not None:
            self.mirror.push()

    @property
    def config(self) -> pathlib.Path:
        """The resolved configuration."""
        return self.folder / "config.yaml"

    @property
    def versions(self) -> pathlib.Path:
        """The versions of the code that last trained here; see `trainer.run.versions`."""
        return self.folder / "versions.json"

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

    def keep_profile(self, name: str, content: bytes) -> None:
        """Keeps a file of a profile, of any process, also in a bucket."""
        if self.mirror is not None:
            self.mirror.bucket.write(f"{self.profile.name}/{name}", content)
            return
        path = self.profile / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    @property
    def assets(self) -> pathlib.Path:
        """The plain files of each checkpoint."""
        return self.folder / "assets"

    @property
    def checkpoints(self) -> pathlib.Path:
        """Checkpoints, each in a folder named by its step."""
        return self.folder / "checkpoints"

    @property
    def lock(self) -> pathlib.Path:
        """The file that the training process locks."""
        return self.folder / "lock"

    def cut_back(
        self,
        step: int,
        evaluated: bool = True,
        evaluations: Sequence[str] = ("held_out",),
        logged: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> dict[str, Written]:
        """Removes logged lines after `step`, from which training continues; 0 removes all.

        Those steps are repeated and must not be in the files twice. See `logs.cut_back`.

        Args:
          evaluated: whether the evaluations of `step` are logged already; otherwise their lines are
            removed too.
          evaluations: names of the evaluations, each of which has a file NAME.jsonl.
          logged: the checkpoint's record of each file, by name.

        Returns:
          The remaining lines' record of each file.
        """
        last_evaluated = step if evaluated else step - 1
        logs = [
            (self.metrics, step),
            *((self.folder / f"{name}.jsonl", last_evaluated) for name in evaluations),
        ]
        return {
            path.name: cut_back(path, last_step, (logged or {}).get(path.name))
            for path, last_step in logs
        }


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


def has_begun(config: RunConfig) -> bool:
    """Returns whether this configuration's folder holds a run."""
    run = RunDirectory.of(config)
    if run.mirror is not None:
        return run.mirror.bucket.version(run.config.name).content is not None
    return run.config.exists()


def check_run(
    config: RunConfig, process_zero: bool = True, steps_known: bool = True
) -> RunDirectory:
    """Returns the run's folder if this configuration may train there; writes nothing.

    Args:
      process_zero: whether this is process 0, which also checks the lock and foreign files.
      steps_known: False before train.epochs has become steps; then they are not compared.

    Raises:
      UserError: the folder holds another run or foreign files, cannot be written to, or another
        process is training there.
    """
    run = RunDirectory.of(config)
    if run.mirror is not None:
        run.mirror.pull("" if process_zero else run.config.name)
    else:
        checkpoint_path(run.folder, "run_dir")
    if run.folder.exists() and not run.folder.is_dir():
        raise UserError(f"{run.folder}: is a file; give another --run_dir")
    if process_zero:
        _require_writable(run)
    if run.config.exists():
        _require_same(run, config, steps_known)
        if process_zero and run.mirror is not None:
            require_unused(run.mirror.bucket)
        elif process_zero:
            require_free(run.lock)
    elif process_zero and _foreign_files(config):
        raise UserError(
            f"{run}: holds files but no config.yaml, so it is not a run; give another "
            "--run_dir, or delete it"
        )
    return run


def open_run(
    config: RunConfig, process_zero: bool = True, lock: contextlib.ExitStack | None = None
) -> RunDirectory:
    """Returns the run's folder with `config` written to it; creates it if needed.

    This claims the folder for the run, so find all other errors before.

    Args:
      process_zero: whether this is process 0, which writes; the others wait until they see its
        files.
      lock: holds the run's lock from before the write; without it the lock is released after the
        write.

    Raises:
      UserError: as `check_run`; the folder cannot be written; or the processes do not share its
        storage.
    """
    if config.in_bucket:
        run = RunDirectory.of(config)
        return _open_in_bucket(run, config, lock) if process_zero else run
    run = check_run(config, process_zero)
    if process_zero:
        try:
            run.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as own:
                # Of two starts only one writes at a time, and compares with what the other may have
                # just written.
                (own if lock is None else lock).enter_context(held(run.lock))
                if run.config.exists():
                    _require_same(run, config, steps_known=True)
                replace_file(run.config, configuration.dump(config).encode())
        except OSError as error:
            raise UserError(
                f"{run.folder}: cannot write there ({error.strerror}); give another --run_dir"
            ) from error
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not run.config.exists():
        if time.monotonic() > deadline:
            raise UserError(
                f"{run.folder}: not seen here, where process 0 has made it; a --run_dir that all "
                "processes share would work"
            )
        time.sleep(1)
    return run


def _open_in_bucket(
    run: RunDirectory, config: RunConfig, lock: contextlib.ExitStack | None
) -> RunDirectory:
    """`open_run` in process 0 for a run in a bucket; others need no file of it but checkpoints."""
    assert run.mirror is not None
    with contextlib.ExitStack() as own:
        held_until = own if lock is None else lock
        lease = held_until.enter_context(leased(run.mirror.bucket))
        run.mirror.pull()  # another process may have trained since `check_run`
        if run.config.exists():
            _require_same(run, config, steps_known=True)
        replace_file(run.config, configuration.dump(config).encode())
        run.mirror.push()
        held_until.enter_context(mirrored(run.mirror))
        return dataclasses.replace(run, lease=lease)


def _require_writable(run: RunDirectory) -> None:
    """Raises UserError unless the run's folder, or its nearest existing parent, is writable."""
    if run.mirror is not None:
        run.mirror.bucket.require_conditions(_TRIAL)
        return
    folder = next(path for path in (run.folder, *run.folder.absolute().parents) if path.exists())
    try:
        for path in (folder, *(path for path in (run.checkpoints, run.assets) if path.is_dir())):
            tempfile.TemporaryFile(dir=path).close()
        for path in (run.metrics, run.held_out, run.lock):
            if os.path.lexists(path):
                check_within(run.folder, path)
                path.open("ab").close()
        path = folder
        _try_to_rename(folder)
    except OSError as error:
        raise UserError(
            f"{path}: cannot write there ({error.strerror}); give another --run_dir"
        ) from error


def _try_to_rename(folder: pathlib.Path) -> None:
    """Raises UserError if a folder with another one in it cannot be renamed, by which a checkpoint
    comes to count."""
    with tempfile.TemporaryDirectory(prefix=".trial-", suffix=".tmp", dir=folder) as trial:
        written = pathlib.Path(trial) / "checkpoint.tmp"
        (written / "model").mkdir(parents=True)
        (written / "model" / "file").write_bytes(b"")
        try:
            written.rename(written.with_suffix(""))
        except OSError as error:
            raise UserError(
                f"{folder}: a folder cannot be renamed there ({error.strerror}), by which a "
                "checkpoint comes to count; instead of a mounted bucket --run_dir "
                "gs://BUCKET/FOLDER would work, or one with a hierarchical namespace"
            ) from error


def _foreign_files(config: RunConfig) -> list[pathlib.Path]:
    """The files in a run's folder that no unfinished start of this run can have made."""
    if config.in_bucket:
        paths = map(pathlib.Path, Bucket(config.location).names())
        return [path for path in paths if path.parts[0] not in (LOCK, EARLIER_STAGES)]
    # Both may be in the run's folder.
    kept = [
        pathlib.Path(path).expanduser().resolve()
        for path in (config.data.prepared, config.compile_cache)
        if path
    ]
    ours = (EARLIER_STAGES, RunDirectory(config.folder).lock.name, TOKEN_FILE)
    files = (
        [path for path in config.folder.iterdir() if path.name not in ours]
        if config.folder.is_dir()
        else []
    )
    return [
        path
        for path in files
        if not path.name.endswith(".tmp")
        and not any(folder.is_relative_to(path.resolve()) for folder in kept)
    ]


def _require_same(run: RunDirectory, config: RunConfig, steps_known: bool) -> None:
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
