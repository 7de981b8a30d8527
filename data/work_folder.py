"""Small files of a folder that workers share, on a file system or in a store: whole, or absent."""

import json
import tempfile
from pathlib import Path
from typing import Any

from data import paths
from data.paths import File


def write_bytes(path: str, content: bytes) -> None:
    """Writes a file, which appears whole."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        paths.put_file(Path(file.name), path)


def read_bytes(path: str) -> bytes | None:
    """Returns the content of a file; None if it is missing."""

    def read() -> bytes | None:
        if not File(path).exists():
            return None
        with File(path).open() as file:
            return file.read()

    return paths.retried(read)


def read_json(path: str) -> Any:
    """Returns what a file holds; None if it is missing or not whole."""
    try:
        return json.loads(read_bytes(path) or b"null")
    except ValueError:
        return None
