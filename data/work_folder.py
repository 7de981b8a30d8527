"""Small files of a folder shared by workers, on a file system or in a store: complete or absent."""

import contextlib
import json
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data import paths
from data.errors import UserError
from data.folders import named_errors, storage_error


@contextlib.contextmanager
def worker_scratch(what: str) -> Iterator[Path]:
    """Yields an empty folder on the worker's disk, and removes it.

    Raises:
      TransientError: that disk, or a file's destination, is full; the message says which.
      UserError: neither may have files of this size.
    """
    with tempfile.TemporaryDirectory(prefix=f"longstripe-{what}-") as name:
        try:
            yield Path(name)
        except UserError:
            raise
        except Exception as error:  # array_record raises RuntimeError
            path = getattr(error, "filename2", None) or tempfile.gettempdir()
            problem = storage_error(
                error,
                f"{path} of {platform.node()}",
                "with more room there, or another folder in TMPDIR, the same command goes on",
                f" while a {what} was written",
            )
            if problem is None:
                raise
            raise problem from error


def write_bytes(path: str, content: bytes) -> None:
    """Writes a file, which appears complete."""
    with tempfile.NamedTemporaryFile() as file:
        with named_errors(Path(tempfile.gettempdir())):
            Path(file.name).write_bytes(content)
        paths.put_file(Path(file.name), path)


def read_bytes(path: str) -> bytes | None:
    """Returns the content of a file; None if it is missing."""

    def read() -> bytes | None:
        with paths.open_file_system(path) as (file_system, name):
            return file_system.cat_file(name) if paths.is_file(file_system, name) else None

    return paths.retried(read)


def read_json(path: str) -> Any:
    """Returns a file's value; None if it is missing or incomplete."""
    try:
        return json.loads(read_bytes(path) or b"null")
    except ValueError:
        return None
