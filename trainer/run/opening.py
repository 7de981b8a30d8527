"""Opens a run's folder for training: that of the same run, or one that holds nothing else."""

import contextlib
import dataclasses
import os
import pathlib
import secrets
import sys
import tempfile
import time

from data.errors import UserError
from data.folders import try_to_rename
from data.outputs import checkpoint_path
from data.paths import expanded
from data.untrusted_files import check_within
from trainer.config import load as configuration
from trainer.config.schema import RunConfig
from trainer.run.bucket import Bucket
from trainer.run.directory import EARLIER_STAGES, RunDirectory
from trainer.run.identity import changed_evaluations, require_same
from trainer.run.lease import LOCK, leased, require_unused
from trainer.run.lock import held, require_free
from trainer.run.logs import in_parts, join_parts, replace_file
from trainer.run.mirror import mirrored

# Prefix of a file that is written to a bucket and deleted, to find out whether that is permitted.
_TRIAL = "lock-trial"
# A network file system remembers a missing file for a while (NFS for up to 60 seconds).
VISIBLE_SECONDS = 90


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
        require_same(run, config, steps_known)
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


def open_run(config: RunConfig, process_zero: bool, lock: contextlib.ExitStack) -> RunDirectory:
    """Returns the run's folder with `config` written to it; creates it if needed.

    This claims the folder for the run, so look for all other errors first.

    Args:
      process_zero: whether this is process 0, which writes; the others wait until they see its
        files.
      lock: receives the run's lock, before the write.

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
            # Of two starts only one writes at a time, and compares with what the other may have
            # just written.
            lock.enter_context(held(run.lock))
            _compare(run, config)
            join_parts(run.folder)
            replace_file(run.config, configuration.dump(config).encode())
        except OSError as error:
            raise UserError(
                f"{run.folder}: cannot write there ({error.strerror}); give another --run_dir"
            ) from error
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not run.config.exists():
        if time.monotonic() > deadline:
            raise UserError(
                f"{run.folder}: created by process 0 but not visible here; use a --run_dir that "
                "all processes share"
            )
        time.sleep(1)
    return run


def _open_in_bucket(
    run: RunDirectory, config: RunConfig, lock: contextlib.ExitStack
) -> RunDirectory:
    """`open_run` in process 0 for a run in a bucket; others need no file of it but checkpoints."""
    assert run.mirror is not None
    lease = lock.enter_context(leased(run.mirror.bucket))
    run.mirror.pull()  # another process may have trained since `check_run`
    _compare(run, config)
    replace_file(run.config, configuration.dump(config).encode())
    run.mirror.push()
    lock.enter_context(mirrored(run.mirror))
    return dataclasses.replace(run, lease=lease)


def _compare(run: RunDirectory, config: RunConfig) -> None:
    """Raises UserError if another run is in the folder; warns of what it measures otherwise."""
    if run.config.exists():
        require_same(run, config, steps_known=True)
        for line in changed_evaluations(run, config):
            print(f"warning: {line}", file=sys.stderr, flush=True)


def _require_writable(run: RunDirectory) -> None:
    """Raises UserError unless the run's folder, or its nearest existing parent, is writable."""
    if run.mirror is not None:
        # Another start at the same time would break our conditions on the same file.
        run.mirror.bucket.require_conditions(f"{_TRIAL}-{secrets.token_hex(8)}")
        return
    folder = next(path for path in (run.folder, *run.folder.absolute().parents) if path.exists())
    try:
        for path in (folder, *(path for path in (run.checkpoints, run.assets) if path.is_dir())):
            tempfile.TemporaryFile(dir=path).close()
        for path in (run.metrics, run.held_out, run.lock):
            if os.path.lexists(path) and not in_parts(path):
                check_within(run.folder, path)
                path.open("ab").close()
        # What is written beside them and renamed, or moved aside, goes through no link either.
        for path in (*run.folder.glob("*.tmp"), *run.folder.glob("*.unreadable")):
            check_within(run.folder, path)
        path = folder
        try_to_rename(
            folder,
            "by which a checkpoint comes to count; instead of a mounted bucket --run_dir "
            "gs://BUCKET/FOLDER would work, or one with a hierarchical namespace",
        )
    except OSError as error:
        raise UserError(
            f"{path}: cannot write there ({error.strerror}); give another --run_dir"
        ) from error


def _foreign_files(config: RunConfig) -> list[pathlib.Path]:
    """The files in a run's folder that no unfinished start of this run can have made."""
    if config.in_bucket:
        paths = map(pathlib.Path, Bucket(config.location).names())
        return [
            path
            for path in paths
            if path.parts[0] not in (LOCK, EARLIER_STAGES) and not path.name.startswith(_TRIAL)
        ]
    # Both may be in the run's folder.
    kept = [
        os.path.realpath(expanded(path))  # Path.resolve() fails for a link to itself
        for path in (config.data.prepared, config.compile_cache)
        if path
    ]
    ours = (EARLIER_STAGES, RunDirectory(config.folder).lock.name)
    files = (
        [path for path in config.folder.iterdir() if path.name not in ours]
        if config.folder.is_dir()
        else []
    )
    return [
        path
        for path in files
        if not path.name.endswith(".tmp")
        and not any(pathlib.Path(folder).is_relative_to(os.path.realpath(path)) for folder in kept)
    ]
