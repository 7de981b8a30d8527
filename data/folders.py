"""Folders that appear whole or not at all, whenever a process is killed, and files that outlive a loss of power."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from data.errors import UserError

_LOCK = "lock"
# Unfinished folders of prepared data, .HASH-RANDOM, also as earlier releases named them.
_UNFINISHED = re.compile(r"\.[0-9a-f]{20}-\w+")
_ABANDONED_SECONDS = 7 * 24 * 3600  # an unfinished folder without a lock, as earlier releases made them, is left for so long
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sync(path: Path) -> None:
    """Calls fsync on a file or folder; does nothing where the file system has no fsync for folders."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Calls fsync on every file and folder below `folder`, and on itself last."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)


@contextlib.contextmanager
def building(folder: Path, is_whole: Callable[[Path], bool]) -> Iterator[Path]:
    """Yields a new folder beside `folder` that becomes `folder`, durably, when the context ends without an error.

    Several processes may build the same folder: the first one's is kept. What killed processes left of theirs is removed.

    Args:
        folder: the folder to create.
        is_whole: whether an existing folder can be used. One that cannot is replaced.

    Raises:
        UserError: the parent of `folder` cannot be written to, or its disk is full.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        scratch = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
        scratch.mkdir()
        lock = _locked_file(scratch)
    except OSError as error:
        raise UserError(f"{folder.parent}: cannot be written to ({error.strerror}); another folder would work") from error
    try:
        with lock:
            yield scratch
            (scratch / _LOCK).unlink()
            sync_tree(scratch)
            _publish(scratch, folder, is_whole)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise UserError(f"{folder.parent}: {error.strerror} while {folder.name} was written; more room there, or another "
                        "folder, would work") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _publish(scratch: Path, folder: Path, is_whole: Callable[[Path], bool]) -> None:
    if folder.exists() and not is_whole(folder):
        damaged = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.rename(folder, damaged)
            shutil.rmtree(damaged, ignore_errors=True)
    try:
        os.rename(scratch, folder)
    except OSError:
        if not is_whole(folder):  # if it is, another process has built the same
            raise
    sync(folder.parent)


def _locked_file(scratch: Path) -> TextIO:
    """Makes the file that stays locked while this process builds in `scratch`; it is never there without its lock."""
    file = open(scratch / f"{_LOCK}.new", "w", encoding="utf-8")  # noqa: SIM115 - closed by the caller
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(scratch / f"{_LOCK}.new", scratch / _LOCK)
    return file


def _remove_abandoned(parent: Path) -> None:
    """Removes the unfinished folders in `parent` whose processes are gone."""
    for path in parent.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            with contextlib.suppress(OSError):  # locked by a process at work, or another process was faster
                if (path / _LOCK).exists():
                    with open(path / _LOCK, "a", encoding="utf-8") as file:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                elif time.time() - path.stat().st_mtime < _ABANDONED_SECONDS:
                    continue
                shutil.rmtree(path, ignore_errors=True)
