"""Sets of hashes that find repeated records."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from typing import Protocol


class Seen(Protocol):
    """A set of hashes; a `set[bytes]` is one."""

    def __contains__(self, digest: bytes, /) -> bool: ...

    def add(self, digest: bytes, /) -> None:
        """Adds a hash, which may be in the set."""


class SeenOnDisk:
    """A set of hashes in a file; 2 MB of it are in memory. A `set` takes 100 bytes per hash."""

    def __init__(self, path: Path):
        """Creates the file.

        Raises:
          OSError: the disk is full or broken; so do `in`, which may have to make room in memory,
            and `add`.
        """
        self._path = path
        # No other process uses the file, and some file systems of clusters cannot lock.
        uri = f"{path.absolute().as_uri()}?nolock=1"
        self._database = sqlite3.connect(uri, uri=True, isolation_level=None)
        for statement in (
            "PRAGMA journal_mode = OFF",  # after a failure the file is not read again
            "CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID",
            "BEGIN",
        ):
            self._run(statement)

    def __contains__(self, digest: bytes) -> bool:
        return self._run("SELECT 1 FROM seen WHERE digest = ?", digest).fetchone() is not None

    def add(self, digest: bytes) -> None:
        """Adds a hash, which may be in the set."""
        self._run("INSERT OR IGNORE INTO seen VALUES (?)", digest)

    def _run(self, statement: str, *values: bytes) -> sqlite3.Cursor:
        try:
            return self._database.execute(statement, values)
        except sqlite3.OperationalError as error:
            code = errno.ENOSPC if error.sqlite_errorcode == sqlite3.SQLITE_FULL else errno.EIO
            raise OSError(code, os.strerror(code), str(self._path)) from error

    def close(self) -> None:
        """Removes the file."""
        self._database.close()
        self._path.unlink(missing_ok=True)
