"""A folder in a bucket, such as gs://bucket/runs/mine: its files by their names, through
TensorStore.

TensorStore tries again where a store is busy, and writes on condition that nobody has written
since. Its errors become one line that names the folder.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorstore

from data.errors import TransientError, UserError, first_line, is_transient

READABLE = "gs://"  # the stores that Orbax, too, can write to
_SECONDS = 600.0  # in which a request is answered, however often it is tried again


class Version(NamedTuple):
    """What a file held when it was read, and the mark by which a later write can require that it
    still holds it."""

    content: bytes | None
    mark: bytes


def in_bucket(path: str | Path) -> bool:
    """Returns whether a path is one of a bucket that runs can be kept in."""
    return str(path).startswith(READABLE)


class Bucket:
    """The files of a folder in a bucket; a file appears whole, and is seen by all at once."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    @functools.cached_property
    def _store(self) -> tensorstore.KvStore:
        return self._result(tensorstore.KvStore.open(f"{self.url}/"))

    def _result(self, future: Any, seconds: float = _SECONDS) -> Any:
        try:
            return future.result(timeout=seconds)
        except TimeoutError as error:
            raise TransientError(f"{self.url}: no answer within {seconds:g} s") from error
        except (ValueError, OSError, RuntimeError) as error:
            raise self._told(error) from error

    def _told(self, error: Exception) -> UserError:
        """Returns the error of a library as one line."""
        kind = TransientError if is_transient(error) else UserError
        return kind(
            f"{self.url}: {first_line(error)}; a bucket that exists, and that this machine's "
            "account may read and write, would work"
        )

    def names(self, prefix: str = "") -> list[str]:
        """Returns the names of all files that begin with `prefix`, sorted.

        TensorStore 0.1.86 takes a refused list for an empty one, so gcsfs is asked, which Orbax
        needs too.
        """
        root = self.url.removeprefix(READABLE)
        try:
            import gcsfs

            store = gcsfs.GCSFileSystem(use_listings_cache=False)
            found = store.find(root, prefix=prefix)
        except ImportError as error:
            raise UserError(f"{self.url}: gs:// needs gcsfs; pip install gcsfs") from error
        except FileNotFoundError:
            return []
        except Exception as error:  # of gcsfs, aiohttp and google.auth, each with types of its own
            raise self._told(error) from error
        return sorted(name.removeprefix(f"{root}/") for name in found)

    def version(self, name: str, seconds: float = _SECONDS) -> Version:
        """Returns a file's content, None if it is not there, with its mark."""
        read = self._result(self._store.read(name), seconds)
        return Version(read.value if read.state == "value" else None, read.stamp.generation)

    def read(self, name: str) -> bytes:
        """Returns a file's content.

        Raises:
          FileNotFoundError: there is no such file.
        """
        content = self.version(name).content
        if content is None:
            raise FileNotFoundError(2, "No such file", f"{self.url}/{name}")
        return content

    def read_all(self, names: Sequence[str]) -> dict[str, bytes]:
        """Returns the contents of several files, read at the same time, by name."""
        reads = {name: self._store.read(name) for name in names}
        return {name: self._result(future).value for name, future in reads.items()}

    def write(
        self, name: str, content: bytes | None, mark: bytes | None = None, seconds: float = _SECONDS
    ) -> bytes:
        """Writes a file, or deletes it where `content` is None, and returns its mark.

        Args:
          mark: only if the file still is as the `version` or `write` that gave this mark left it;
            b"" is returned if not.
        """
        return self._result(self._store.write(name, content, if_equal=mark), seconds).generation

    def remove(self, prefix: str) -> None:
        """Deletes all files whose names begin with `prefix`."""
        deletes = [self._store.write(name, None) for name in self.names(prefix)]
        for delete in deletes:
            self._result(delete)
