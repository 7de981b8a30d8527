"""The manifest of a checkpoint folder: size and sha256 of every file, and what has changed since."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_FORMAT = "longstripe checkpoint"
_VERSION = 1


class DamagedError(ValueError):
    """A checkpoint that was once whole, and is not what it was. The message names the file."""


class ForeignError(ValueError):
    """A folder that is no checkpoint of this project."""


def write_manifest(folder: Path, items: list[str]) -> None:
    """Lists every file below `folder` in `folder`/manifest.json, and makes all of it durable.

    The manifest is the last file written: a folder without one is not a checkpoint.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    with ThreadPoolExecutor(_threads()) as pool:
        found = list(pool.map(_seal, files))
    names = [path.relative_to(folder).as_posix() for path in files]
    content = {"format": _FORMAT, "version": _VERSION, "items": sorted(items),
               "files": {name: {"size": size, "sha256": digest}
                         for name, (size, digest) in zip(names, found, strict=True)}}
    (folder / MANIFEST).write_bytes(_serialise(content))
    _sync(folder / MANIFEST)
    for path in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        _sync(path)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`. Raises ForeignError where there is none of ours, DamagedError where it has changed."""
    try:
        data = (folder / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ForeignError(f"{folder}: not a checkpoint of this project (no {MANIFEST})") from None
    try:
        content = json.loads(data)
    except ValueError:
        raise DamagedError(f"{folder}: {MANIFEST} is damaged (not JSON)") from None
    if not isinstance(content, dict) or "format" not in content or "files" not in content:
        raise ForeignError(f"{folder}: not a checkpoint of this project (another kind of {MANIFEST})")
    checksum = content.pop("sha256", None)
    # The bytes, not only the content: otherwise a flipped bit in a key or in white space would go unseen.
    if checksum != _checksum(content) or data != _serialise(content):
        raise DamagedError(f"{folder}: {MANIFEST} is damaged (its own checksum differs)")
    if content["format"] != _FORMAT:
        raise ForeignError(f"{folder}: not a checkpoint of this project (format {content['format']!r})")
    if content["version"] != _VERSION:
        raise ForeignError(f"{folder}: checkpoint version {content['version']}; this release reads {_VERSION}")
    return content


def fingerprint(folder: Path) -> str:
    """Changes with the contents of a checkpoint. Raises as read_manifest."""
    return _checksum(read_manifest(folder))[:32]


def verify(folder: Path, items: Sequence[str] | None = None) -> dict[str, Any]:
    """Reads every file that the manifest lists (of `items`, or all) and compares. Returns the manifest.

    Raises ForeignError or DamagedError naming the first file, in order of name, that is missing or differs. Files that
    the manifest does not list are left alone: a note put beside a checkpoint does not spoil it.
    """
    content = read_manifest(folder)
    wanted = [(name, record) for name, record in content["files"].items()
              if items is None or name.split("/", 1)[0] in items]

    def problem(name_and_record: tuple[str, dict[str, Any]]) -> str | None:
        name, record = name_and_record
        try:
            size = (folder / name).stat().st_size
            if size != record["size"]:
                return f"{name} is damaged ({size} bytes, written with {record['size']})"
            if _digest(folder / name) != record["sha256"]:
                return f"{name} is damaged (its checksum differs)"
        except (FileNotFoundError, NotADirectoryError):
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return None

    with ThreadPoolExecutor(_threads()) as pool:
        for found in pool.map(problem, wanted):
            if found:
                raise DamagedError(f"{folder}: {found}")
    return content


def _threads() -> int:
    return min(8, os.cpu_count() or 1)


def _serialise(content: dict[str, Any]) -> bytes:
    return (json.dumps({**content, "sha256": _checksum(content)}, indent=1) + "\n").encode()


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(path: Path) -> tuple[int, str]:
    """(size, sha256) of a file that has been made durable."""
    _sync(path)
    return path.stat().st_size, _digest(path)


def _sync(path: Path) -> None:
    """fsync of a file or folder; a no-op where the file system does not know it for folders."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(handle)
