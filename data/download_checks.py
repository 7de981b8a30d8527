"""Verifies files downloaded into the hub's cache against the hub's digests.

During a download, a note in the cache lists the files that were there before. If the process is
killed, the next process finds the note, no longer locked, and checks the files that are not on it.
"""

import concurrent.futures
import contextlib
import glob
import hashlib
import json
import os
import re
import secrets
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from data.errors import UserError
from data.folders import try_to_lock
from data.printable import printable

_DIGEST = re.compile("[0-9a-f]{64}|[0-9a-f]{40}")
_PART = 1 << 20  # bytes


@contextlib.contextmanager
def checked(repository: Path) -> Iterator[None]:
    """Checks the files downloaded within the context, even if it ends with an error.

    If the process is killed or interrupted, the next one checks them.

    Args:
      repository: the repository's folder in the hub's cache, which contains `blobs`.

    Raises:
      UserError: a file does not match its digest; it was removed.
    """
    before = _blobs(repository)
    with _note(repository, before) as note:
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        damaged = _damaged(_blobs(repository) - before)
        for blob in damaged:
            blob.unlink()
        if note is not None:
            with contextlib.suppress(OSError):
                note.unlink()
    if damaged:
        raise UserError(
            f"{damaged[0]}: does not match the hub's digest, and was removed; the same command "
            "downloads it again"
        )
    if failure is not None:
        raise failure


def remove_damaged(repository: Path) -> None:
    """Removes files left by killed downloads of a repository that do not match their digests, with
    a message for each."""
    for path in repository.parent.glob(f"{glob.escape(_prefix(repository))}*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            if not try_to_lock(file):
                continue  # its download is still running
            before = _names(file)
            for blob in _damaged(_blobs(repository) - {repository / "blobs" / x for x in before}):
                blob.unlink()
                print(
                    printable(
                        f"{blob}: does not match the hub's digest, because its download was "
                        "killed, and was removed"
                    ),
                    file=sys.stderr,
                    flush=True,
                )
            path.unlink()


def _prefix(repository: Path) -> str:
    return f".longstripe-{repository.name}.arriving-"


@contextlib.contextmanager
def _note(repository: Path, before: set[Path]) -> Iterator[Path | None]:
    """Writes a note of the files in the cache, which is locked within the context; yields its path.

    None if the cache is read-only or its disk is full: then nothing can be downloaded either.
    """
    name = secrets.token_hex(8)
    final = repository.parent / f"{_prefix(repository)}{name}"
    part = repository.parent / f".longstripe-{name}.part"
    with contextlib.ExitStack() as stack:
        try:
            # Locked before it is renamed, so that no process takes it for a killed process's note.
            file = stack.enter_context(part.open("wb"))
            try_to_lock(file)
            file.write(json.dumps(sorted(blob.name for blob in before)).encode())
            file.flush()
            os.rename(part, final)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            yield None
            return
        yield final


def _names(file: BinaryIO) -> list[str]:
    """Returns the files that a note lists; none if it is damaged, so that all are checked."""
    try:
        names = json.loads(file.read(1 << 26))
    except (ValueError, RecursionError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _blobs(repository: Path) -> set[Path]:
    return set((repository / "blobs").glob("*"))


def _damaged(blobs: Iterable[Path]) -> list[Path]:
    """Returns the files whose contents do not match their names."""
    ordered = sorted(blobs)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return [
            blob
            for blob, damaged in zip(ordered, pool.map(_is_damaged, ordered), strict=True)
            if damaged
        ]


def _is_damaged(blob: Path) -> bool:
    """Returns whether a file's contents do not match its name.

    Large files are named by their SHA-256 and small ones by git's SHA-1. Names from a mirror may be
    a plain SHA-1, or anything else, which cannot be checked.
    """
    digest = blob.name.lower()
    if not _DIGEST.fullmatch(digest):
        return False
    with blob.open("rb") as file:
        if len(digest) == 64:
            return hashlib.file_digest(file, "sha256").hexdigest() != digest
        plain, git = hashlib.sha1(), hashlib.sha1(b"blob %d\0" % blob.stat().st_size)
        while part := file.read(_PART):
            plain.update(part)
            git.update(part)
        return digest not in (plain.hexdigest(), git.hexdigest())
