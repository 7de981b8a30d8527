"""Folders that appear complete or not at all, and files that survive a power loss."""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TextIO, TypeVar

from data.errors import TransientError, UserError, file_size_limit, is_transient

_Content = TypeVar("_Content")
_LOCK = "lock"
# Unfinished folders of prepared data, .HASH-RANDOM.
_UNFINISHED = re.compile(r"\.(trajectories-)?[0-9a-f]{20}-\w+")
_SCRATCH = "longstripe-scratch-"  # prefix of temporary folders' names
_ABANDONED_SECONDS = 7 * 24 * 3600  # after which one without a lock is removed
# Bytes; array_record has checksums, which are verified when a record is read.
HASHED_AT_START = 1 << 24
# For `try_to_rename`.
BY_A_RENAME = (
    "by which a finished folder appears; another file system, or of a mounted bucket one with a "
    "hierarchical namespace, would work"
)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def storage_error(
    error: BaseException, folder: object, more_room: str, work: str = ""
) -> UserError | None:
    """Returns the error to raise for a full disk or a limit on the size of files; None for others.

    Args:
      error: the system's, or a C++ library's, which quotes the system's words.
      folder: for the message.
      more_room: what would work with a full disk.
      work: what was being done, such as " while it was written".
    """
    if limit := file_size_limit(error):
        return UserError(f"{folder}: {os.strerror(errno.EFBIG)}{work}; {limit}")
    words = [os.strerror(code) for code in _NO_ROOM]
    problem = next((problem for problem in words if problem in str(error)), None)
    return None if problem is None else TransientError(f"{folder}: {problem}{work}; {more_room}")


@contextlib.contextmanager
def named_errors(folder: Path) -> Iterator[None]:
    """Adds the folder's name to an error about a full disk or a limit on the size of files that
    names no file.

    Raises:
      TransientError: the disk is full.
      UserError: the limit is too low.
    """
    try:
        yield
    except OSError as error:
        problem = storage_error(error, folder, "with more room there, the same command resumes")
        if problem is None or error.filename is not None:
            raise
        raise problem from error


@contextlib.contextmanager
def exclusive(path: Path, work: str) -> Iterator[None]:
    """Holds a lock on `path`, a dedicated file, created if missing and never removed.

    Args:
      work: the holder's work, for the message.

    Raises:
      TransientError: another process holds it.
    """
    with path.open("a", encoding="utf-8") as file:
        lock(file, path.parent, work)
        yield


def lock(file: IO, folder: Path, work: str) -> None:
    """Locks an open file until it is closed.

    Args:
      folder: the user's, for the message.
      work: as in `exclusive`.

    Raises:
      TransientError: another process holds it.
    """
    if not try_to_lock(file):
        raise TransientError(
            f"{folder}: another process {work}; wait until it has ended, or name another folder"
        )


def try_to_lock(file: IO) -> bool:
    """Locks an open file until it is closed; returns False if another process holds its lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits for a lock on `path`, a dedicated file, created if missing, and holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sync(path: Path) -> None:
    """Calls fsync on a file or folder; does nothing if the file system cannot sync folders."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(handle)


def record_files(folder: Path, names: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Returns sizes and hashes of files, and of those in folders among them, for `check_files`."""
    paths = [
        path
        for name in names
        for path in sorted([folder / name, *(folder / name).rglob("*")])
        if path.is_file()
    ]
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_size, file_hash(path))
        for path in paths
    }


def check_files(folder: Path, recorded: Mapping[str, tuple[int, str]]) -> None:
    """Compares files with `record_files`'s result; hashes of large files are left to the caller.

    Raises:
      UserError: a file is missing or damaged.
    """
    for name, (size, digest) in recorded.items():
        try:
            same = (folder / name).stat().st_size == size
            same = same and (size > HASHED_AT_START or file_hash(folder / name) == digest)
        except PermissionError:
            raise
        except OSError as error:
            if is_transient(error):
                raise
            raise UserError(f"{folder}: {name} is damaged ({error.strerror})") from error
        if not same:
            raise UserError(f"{folder}: {name} is damaged (not as it was written)")


def file_hash(path: Path) -> str:
    """Returns the sha256 of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a file to write; without an error, it then durably replaces `path`.

    Its name is always the same, so that what a killed process leaves is overwritten.
    """
    scratch = path.with_name(f".{path.name}.part")
    yield scratch
    sync(scratch)
    os.replace(scratch, path)
    sync(path.parent)


def read_or_warn(folder: Path, last: str, read: Callable[[Path], _Content]) -> _Content | None:
    """Returns what `read` reads of a prepared folder; None if it lacks the file written last or,
    with a warning, is damaged."""
    if not (folder / last).exists():
        return None
    try:
        return read(folder)
    except UserError as error:
        print(f"warning: {error}; rebuilding it", file=sys.stderr)
        return None


def holds_files(folder: Path) -> bool:
    """Returns whether a folder is not empty."""
    return any(folder.iterdir())


def sync_tree(folder: Path) -> None:
    """Calls fsync on every file and folder below `folder`, and on itself last."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)


def is_unfinished(folder: Path) -> bool:
    """Returns whether a folder's name is that of unfinished prepared data of `building`."""
    return _UNFINISHED.fullmatch(folder.name) is not None


@contextlib.contextmanager
def building(folder: Path, is_whole: Callable[[Path], bool]) -> Iterator[Path]:
    """Yields a new folder that durably becomes `folder` when the context ends without an error.

    Several processes may build the same folder: the first one's is kept. Remains of killed
    processes are removed.

    Args:
      folder: the folder to create.
      is_whole: whether an existing folder can be used; otherwise it is replaced.

    Raises:
      UserError: the parent of `folder` cannot be written to, or not files of this size; or
        folders cannot be renamed there.
      TransientError: its disk is full.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        try_to_rename(folder.parent, BY_A_RENAME)
        scratch = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
        scratch.mkdir()
        lock = _locked_file(scratch)
    except OSError as error:
        raise UserError(
            f"{folder.parent}: cannot be written to ({error.strerror}); another folder would work"
        ) from error
    try:
        with lock:
            yield scratch
            (scratch / _LOCK).unlink()
            sync_tree(scratch)
            _publish(scratch, folder, is_whole)
    except Exception as error:
        problem = storage_error(
            error,
            folder.parent,
            "more room there, or another folder, would work",
            f" while {folder.name} was written",
        )
        if isinstance(error, UserError) or problem is None:
            raise
        raise problem from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yields an empty temporary folder, and removes it and those of killed processes."""
    temporary = Path(tempfile.gettempdir())
    _remove_unlocked(path for path in temporary.glob(f"{_SCRATCH}*") if _is_own_folder(path))
    outer = Path(tempfile.mkdtemp(prefix=_SCRATCH))
    try:
        with _locked_file(outer):
            inner = outer / "files"
            inner.mkdir()
            yield inner
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def _is_own_folder(path: Path) -> bool:
    """Whether a path is a folder made by this user's `scratch_folder`, not a link to one."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        return is_own and (path / _LOCK).is_file()
    return False


def _publish(scratch: Path, folder: Path, is_whole: Callable[[Path], bool]) -> None:
    is_busy = False
    try:
        if folder.exists() and not is_whole(folder):
            damaged = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                os.rename(folder, damaged)
                shutil.rmtree(damaged, ignore_errors=True)
        os.rename(scratch, folder)
    except OSError as error:
        # If it is there and not empty, another process has built the same.
        if not (folder.is_dir() and is_whole(folder)):
            is_busy = error.errno == errno.EBUSY
            if not is_busy:
                raise
    if is_busy:  # not raised from EBUSY, which elsewhere may be gone at the next start
        raise mount_point(folder)
    sync(folder.parent)


def mount_point(folder: Path) -> UserError:
    """Returns the error for a folder that cannot be replaced by another."""
    return UserError(
        f"{folder}: is a mount point, which a finished folder cannot replace; a folder in it, such "
        f"as {folder}/model, would work"
    )


def try_to_rename(folder: Path, purpose: str) -> None:
    """Tries to rename a folder in `folder` that contains another.

    Args:
      purpose: the end of the message: what renames are for, and what would work.

    Raises:
      UserError: this file system cannot, such as a flat bucket mounted by gcsfuse.
    """
    with tempfile.TemporaryDirectory(prefix=".trial-", suffix=".tmp", dir=folder) as trial:
        written = Path(trial) / "checkpoint.tmp"
        (written / "model").mkdir(parents=True)
        (written / "model" / "file").write_bytes(b"")
        try:
            os.rename(written, written.with_suffix(""))
        except OSError as error:
            raise UserError(
                f"{folder}: a folder cannot be renamed there ({error.strerror}), {purpose}"
            ) from error


def _locked_file(scratch: Path) -> TextIO:
    """Makes a file that is locked, from its first moment, while this process builds `scratch`."""
    file = open(scratch / f"{_LOCK}.new", "w", encoding="utf-8")  # noqa: SIM115 - closed by the caller
    try_to_lock(file)
    os.rename(scratch / f"{_LOCK}.new", scratch / _LOCK)
    return file


def _remove_abandoned(folder: Path) -> None:
    """Removes unfinished folders next to `folder` whose processes have ended."""
    own = re.compile(rf"\.{re.escape(folder.name)}-[0-9a-f]{{8}}")
    _remove_unlocked(
        path
        for path in folder.parent.iterdir()
        if own.fullmatch(path.name) or _UNFINISHED.fullmatch(path.name)
    )


def _remove_unlocked(folders: Iterable[Path]) -> None:
    """Removes folders that no process has locked, or old ones without a lock."""
    for path in folders:
        with contextlib.suppress(OSError):  # a process is at work, or another one was faster
            if (path / _LOCK).exists():
                with open(path / _LOCK, "a", encoding="utf-8") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            elif time.time() - path.stat().st_mtime < _ABANDONED_SECONDS:
                continue
            shutil.rmtree(path, ignore_errors=True)
