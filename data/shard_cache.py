"""Shards of prepared data in a store, copied to this machine when needed.

A cache folder holds the most recently used shards, up to a size, for all processes of this machine.
A process reading a shard that another one removes continues reading, and frees the disk when it
opens its next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from data import paths
from data.errors import UserError
from data.folders import file_hash, locked, named_errors

DOWNLOADS = 2  # concurrent downloads of shards needed soon
_WAIT = 0.02  # seconds


@dataclass
class ShardCache:
    """Shards of one folder in a store. Can be pickled, and used by several threads."""

    remote: str
    """The folder in the store."""
    files: Mapping[str, tuple[int, str]]
    """Size and sha256 of each shard, by its name in `remote`."""
    folder: Path
    """Where the copies are."""
    most_bytes: int
    """Bytes the copies may take."""

    def __post_init__(self) -> None:
        largest = max((size for size, _ in self.files.values()), default=0)
        if 2 * largest > self.most_bytes:
            raise UserError(
                f"data.cache_gib: found {_gib(self.most_bytes)}, and a shard of {self.remote} has "
                f"{_gib(largest)} GiB; at least {_gib(2 * largest)} would work"
            )
        self._pending: dict[str, Future[None]] = {}
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def __reduce__(self) -> tuple:  # without locks and threads
        return ShardCache, (self.remote, self.files, self.folder, self.most_bytes)

    def local(self, name: str) -> Path:
        """Returns the local copy of a shard, downloading it if missing.

        Raises:
          UserError: the store's shard is missing or has changed.
          TransientError: the store cannot be reached, or this machine's disk is full.
        """
        path = self.folder / name
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)  # the time of the last use
            return path
        with self._lock:
            pending = self._pending.get(name)
        if pending is not None:
            pending.result()
        self._download(name)
        return path

    def prefetch(self, names: Iterable[str]) -> None:
        """Downloads shards in the background; failures are retried when needed."""
        with self._lock:
            missing = [
                name
                for name in dict.fromkeys(names)
                if name not in self._pending and not (self.folder / name).exists()
            ]
            if missing:
                self._pool = self._pool or ThreadPoolExecutor(DOWNLOADS, "shards")
                for name in missing:
                    self._pending[name] = self._pool.submit(self._download_quietly, name)

    def _download_quietly(self, name: str) -> None:
        try:
            with contextlib.suppress(UserError, OSError):
                self._download(name)
        finally:
            with self._lock:
                self._pending.pop(name, None)

    def _download(self, name: str) -> None:
        size, sha256 = self.files[name]
        path = self.folder / name
        with locked(_beside(path, "lock")):
            if path.exists():  # another thread or process was faster
                return
            while not self._has_room(path, size):
                time.sleep(_WAIT)
            scratch = _beside(path, "part")
            try:
                with named_errors(self.folder):
                    paths.get_file(f"{self.remote}/{name}", scratch)
                if scratch.stat().st_size != size or file_hash(scratch) != sha256:
                    raise UserError(
                        f"{self.remote}/{name}: is damaged (not as it was written); if the folder "
                        "is deleted, the same command makes it again"
                    )
                with self._counted():
                    os.replace(scratch, path)
                    _beside(path, "room").unlink()
            finally:
                scratch.unlink(missing_ok=True)
                _beside(path, "room").unlink(missing_ok=True)

    def _counted(self) -> contextlib.AbstractContextManager[None]:
        """Holds the lock for counting and changing copies and reserved room."""
        return locked(self.folder / ".count.lock")

    def _has_room(self, wanted: Path, size: int) -> bool:
        """Reserves room for a shard, removing the least recently used; returns False while other
        downloads take it."""
        with self._counted():
            copies, reserved = [], 0
            for path in self.folder.rglob("*.array_record-*"):
                with contextlib.suppress(FileNotFoundError):
                    if not path.name.startswith("."):
                        copies.append((path.stat().st_mtime_ns, path.stat().st_size, path))
                    elif path.suffix == ".room" and _is_held(path.with_suffix(".lock")):
                        reserved += path.stat().st_size
            used = sum(taken for _, taken, _ in copies) + reserved
            for _, taken, path in sorted(copies):
                if used + size <= self.most_bytes:
                    break
                path.unlink(missing_ok=True)
                used -= taken
            if used + size > self.most_bytes:
                return False
            with _beside(wanted, "room").open("wb") as room:
                room.truncate(size)  # takes no disk
            return True


def _beside(path: Path, kind: str) -> Path:
    """Returns a hidden file of a shard's download."""
    return path.with_name(f".{path.name}.{kind}")


def _is_held(lock: Path) -> bool:
    """Returns whether a download holds its lock; a killed process's does not."""
    with lock.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g}"
