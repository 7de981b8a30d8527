"""The manifest of a checkpoint folder: the size and sha256 of every file, to detect later
damage."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from data.errors import TransientError, is_transient
from data.untrusted_files import parse_json
from trainer.checkpoint.commit import MANIFEST, Files

_FORMAT = "longstripe checkpoint"
_VERSION = 1


class DamagedError(ValueError):
    """A checkpoint was damaged after it was written. The message names the file."""


class ForeignError(ValueError):
    """A folder is not a checkpoint of this project."""


def none_good(folder: Path, problems: Sequence[ValueError]) -> ValueError:
    """Returns the error for a run's checkpoints that are all unusable.

    Args:
      problems: of each, the newest first.
    """
    if all(isinstance(problem, ForeignError) for problem in problems):
        return problems[0]
    return ValueError(
        f"{folder}: every checkpoint is damaged (newest: {problems[0]}); "
        "start over in another run directory, or restore them from a copy"
    )


def use_previous(problems: Sequence[ValueError]) -> None:
    """Warns of damaged checkpoints that are newer than the one used."""
    for problem in problems:
        print(f"warning: {problem}; using the previous checkpoint", file=sys.stderr)


def seal(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Makes files durable, reads them back, and returns their sizes and digests by name."""
    files = Files(folder)
    with ThreadPoolExecutor(_threads()) as pool:
        return dict(zip(names, pool.map(files.seal, names), strict=True))


def manifest(
    items: Sequence[str],
    records: Mapping[str, Mapping[str, Any]],
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> bytes:
    """Returns the text of a manifest, the last file written: a folder without one is not a
    checkpoint.

    Args:
      items: the names of the checkpoint's items.
      records: the result of `seal` for every file of the checkpoint.
      shapes: the parameters' shapes without padding; None if unknown.
    """
    content: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "items": sorted(items),
        "files": {name: dict(records[name]) for name in sorted(records)},
    }
    if shapes is not None:
        content["shapes"] = {name: list(shape) for name, shape in shapes.items()}
    return _serialize(content)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of `folder`'s manifest.

    Raises:
      ForeignError: the folder has no manifest of this project.
      DamagedError: the manifest has changed since it was written.
      OSError: a mount or disk fails; the files may be good.
    """
    try:
        data = Files(folder).read(MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise ForeignError(f"{folder}: not a checkpoint of this project (no {MANIFEST})") from None
    except OSError as error:  # such as a folder in its place
        if is_transient(error):
            raise
        raise DamagedError(f"{folder}: {MANIFEST} cannot be read ({error.strerror})") from None
    try:
        content = parse_json(data)
    except ValueError:
        raise DamagedError(f"{folder}: {MANIFEST} is damaged (not JSON)") from None
    if not isinstance(content, dict) or "format" not in content or "files" not in content:
        raise ForeignError(
            f"{folder}: not a checkpoint of this project (another kind of {MANIFEST})"
        )
    checksum = content.pop("sha256", None)
    # Bytes, not parsed content: a flipped bit in a key or in white space must not go unseen.
    if checksum != _checksum(content) or data != _serialize(content):
        raise DamagedError(f"{folder}: {MANIFEST} is damaged (its own checksum differs)")
    if content["format"] != _FORMAT:
        raise ForeignError(
            f"{folder}: not a checkpoint of this project (format {content['format']!r})"
        )
    if content["version"] != _VERSION:
        raise ForeignError(
            f"{folder}: checkpoint version {content['version']}; this release reads {_VERSION}"
        )
    return content


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Reports a checkpoint's removal as the reason for an error while it is read.

    Raises:
      TransientError: as `require_present`.
    """
    try:
        yield
    except Exception:
        require_present(folder)
        raise


def require_present(folder: Path) -> None:
    """Raises TransientError if a checkpoint that was being read has been removed."""
    try:
        Files(folder).read(MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise TransientError(
            f"{folder}: was removed while it was read, as a training does with checkpoints beyond "
            "checkpoint.keep; its run's folder leads to the newest one, and a copy stays"
        ) from None
    except OSError:  # it is there
        pass


def fingerprint(folder: Path) -> str:
    """A hash of a checkpoint's contents; errors as in `read_manifest`."""
    return _checksum(read_manifest(folder))[:32]


def verify(
    folder: Path,
    items: Sequence[str] | None = None,
    share: tuple[int, int] = (0, 1),
    digests: bool = True,
    shown: Path | None = None,
) -> dict[str, Any]:
    """Compares every listed file with its size and checksum, and returns the manifest.

    Unlisted files are ignored: a note put next to a checkpoint does no harm.

    Args:
      items: the items to compare; None compares all.
      share: this process's number, and how many processes share the work.
      digests: False compares only sizes (in a bucket only names), and reads no file.
      shown: the folder in messages, if `folder` is a copy of it.

    Raises:
      ForeignError: the folder is not a checkpoint.
      DamagedError: names the first file that is missing or differs.
      UserError: a link leads out of the folder.
    """
    content, files = read_manifest(folder), Files(folder)
    files.check()
    records = content["files"]
    number, count = share
    names = [name for name in records if items is None or name.split("/", 1)[0] in items]
    in_bucket = set(files.names()) if not digests and files.bucket is not None else None

    def problem(name: str) -> str | None:
        if in_bucket is not None:  # a file appears whole there
            return None if name in in_bucket else f"{name} is missing"
        return _problem(files, name, records[name], digests)

    with ThreadPoolExecutor(_threads()) as pool:
        for message in pool.map(problem, names[number::count]):
            if message:
                raise DamagedError(f"{shown or folder}: {message}")
    return content


def _problem(files: Files, name: str, record: Mapping[str, Any], digests: bool) -> str | None:
    """Returns how a file differs from its record; arguments as in `verify`."""
    try:
        found = files.record(name, record["size"] if digests else -1)
    except (FileNotFoundError, NotADirectoryError):
        return f"{name} is missing"
    except OSError as error:
        if is_transient(error):
            raise
        return f"{name} cannot be read ({error.strerror})"
    if found["size"] != record["size"]:
        return f"{name} is damaged ({found['size']} bytes, written with {record['size']})"
    if digests and found["sha256"] != record["sha256"]:
        return f"{name} is damaged (its checksum differs)"
    return None


def _threads() -> int:
    return min(8, os.cpu_count() or 1)


def _serialize(content: dict[str, Any]) -> bytes:
    return (json.dumps({**content, "sha256": _checksum(content)}, indent=1) + "\n").encode()


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
