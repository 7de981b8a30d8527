"""SHA-256 of files' contents, remembered on this machine while the files stay the same."""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from data.paths import File, cache_folder, expanded, is_remote

LARGE_BYTES = 1 << 24
"""Digests are remembered if those computed at a time cover at least this much."""
CACHE_BYTES = 1 << 28
"""Size of the cache, about 300 bytes per file, above which its oldest parts are removed."""
HASHED_AT_A_TIME = 8  # files
_SETTLED_SECONDS = 2.0  # resolution of file system times

_Identity = list[int | str]
_Records = dict[str, tuple[_Identity, str]]  # by path


class _Digest(NamedTuple):
    sha256: str
    identity: _Identity | None
    """What the file had while it was read, if that identifies its content from now on."""
    read_bytes: int
    """0 if the digest was remembered."""


def file_digest(path: str | Path) -> str:
    """Returns the SHA-256 of a file's contents, in hexadecimal; see `file_digests`."""
    return file_digests([File(str(path))], path)[0]


def file_digests(files: Sequence[File], kept_for: str | Path) -> list[str]:
    """Returns the SHA-256 of each file's contents, in hexadecimal.

    A digest is remembered and used again while the file's path, size, times, inode and device are
    the same. `os.utime` can set one of the times, but not the time of change. A just-changed
    file's digest is not remembered: the same clock tick may hold another change. A file in a store
    is remembered by its version there, and always read if the store gives none.

    Args:
      kept_for: the file or folder whose files these are; the cache has one file for its digests.
    """
    name = hashlib.sha256(os.fsencode(_resolved(str(kept_for)))).hexdigest()
    kept = cache_folder("digests") / f"{name}.json"
    records = _read(kept)
    with ThreadPoolExecutor(HASHED_AT_A_TIME) as pool:  # hashing releases Python's lock
        digests = list(pool.map(lambda file: _digest(file, records), files))
    computed: _Records = {
        _resolved(file.path): (digest.identity, digest.sha256)
        for file, digest in zip(files, digests, strict=True)
        if digest.identity and digest.read_bytes
    }
    if sum(digest.read_bytes for digest in digests if digest.identity) >= LARGE_BYTES:
        with suppress(OSError):  # such as a cache that cannot be written to
            # Read again: another process may have written since.
            _write(kept, {**_read(kept), **computed})
            _make_room(kept.parent)
    return [digest.sha256 for digest in digests]


def _resolved(path: str) -> str:
    return path if is_remote(path) else os.path.realpath(expanded(path))


def _digest(file: File, records: _Records) -> _Digest:
    """Returns a file's digest, from the records if they have it."""
    known, sha256 = records.get(_resolved(file.path), (None, ""))
    if is_remote(file.path):
        identity = _identity_in_store(file)
        if identity and identity == known:
            return _Digest(sha256, identity, 0)
        with file.open() as opened:
            return _Digest(_sha256(opened), identity, file.size())
    # Opened before it is looked at, since a network file system asks its server only then.
    with open(_resolved(file.path), "rb") as opened:
        now = time.time()
        identity, changed = _identity(opened)
        if identity == known:
            return _Digest(sha256, identity, 0)
        sha256 = _sha256(opened)
        is_settled = now - changed > _SETTLED_SECONDS and identity == _identity(opened)[0]
        return _Digest(sha256, identity if is_settled else None, cast(int, identity[0]))


def _identity(opened: BinaryIO) -> tuple[_Identity, float]:
    """Returns what changes with a local file's content, its size first, and the time of its last
    change."""
    status = os.fstat(opened.fileno())
    identity: _Identity = [
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_ino,
        status.st_dev,
    ]
    return identity, max(status.st_mtime, status.st_ctime)


def _identity_in_store(file: File) -> _Identity | None:
    """Returns what changes with the content of a file in a store; None if the store has no such
    thing, or one that need not change (a weak ETag)."""
    version = file.version()
    return [version] if version and not version.startswith("W/") else None


def _sha256(opened: BinaryIO) -> str:
    return hashlib.file_digest(cast(Any, opened), "sha256").hexdigest()


def _read(kept: Path) -> _Records:
    """Returns the remembered digests; none if they were not written completely, or are damaged."""
    try:
        checksum, text = kept.read_text(encoding="utf-8").split("\n", 1)
        if checksum == hashlib.sha256(text.encode()).hexdigest():
            return {path: (identity, sha256) for path, (identity, sha256) in json.loads(text)}
    except (OSError, ValueError, TypeError):
        pass
    return {}


def _write(kept: Path, records: _Records) -> None:
    """Replaces the remembered digests."""
    text = json.dumps(list(records.items()))
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=kept.parent, delete=False, encoding="utf-8"
    ) as scratch:
        try:
            scratch.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
            scratch.close()
            os.replace(scratch.name, kept)
        except BaseException:  # such as a full disk
            os.unlink(scratch.name)
            raise


def _make_room(folder: Path) -> None:
    """Removes the parts of the cache that were written first, until it is small enough."""
    with os.scandir(folder) as entries:
        parts = [(entry.stat().st_mtime_ns, entry.stat().st_size, entry.path) for entry in entries]
    size = 0
    for _, part_size, path in sorted(parts, reverse=True):
        size += part_size
        if size > CACHE_BYTES:
            Path(path).unlink(missing_ok=True)
