"""A run's JSONL logs: truncated when the run continues, and checked against its checkpoint.

A log can lose its end, or change, without an unreadable line. A checkpoint therefore records how
many lines each log had, and their hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from data.folders import sync
from data.untrusted_files import read_bytes

LOG = ".jsonl"
# The name of a log's part in a bucket: its series and offset, see `trainer.run.mirror`.
_PART = re.compile(r"\d{6}-\d{15}")
_ASIDE = ".parts.tmp"  # ends the name of a log's parts while they are joined


@dataclasses.dataclass
class Written:
    """A log's number of lines, their SHA-256, and the last one's step (None without lines)."""

    lines: int
    sha256: Any
    last_step: int | None = None

    @classmethod
    def of(cls, lines: Iterable[bytes]) -> Written:
        """Returns the record of these lines, each with its newline."""
        record = cls(0, hashlib.sha256())
        for line in lines:
            record.add(line)
        return record

    def add(self, line: bytes) -> None:
        """Counts a written line."""
        self.lines += 1
        self.sha256.update(line)
        self.last_step = _logged_step(line)

    @property
    def data(self) -> dict[str, Any]:
        """The record in a checkpoint."""
        return {"lines": self.lines, "sha256": self.sha256.hexdigest()}


def cut_back(path: pathlib.Path, last_step: int, saved: Mapping[str, Any] | None = None) -> Written:
    """Removes lines after `last_step` from a log, if it exists; returns the record of the rest.

    Unreadable lines are moved to PATH.unreadable. Warnings name them, and lost or changed lines.

    Args:
      saved: `Written.data` of this log at the save of `last_step`; None if there is none.
    """
    kept, unreadable, numbers = [], [], []
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        step = _logged_step(line)
        if step is not None:
            kept += [line + b"\n"] if step <= last_step else []
        elif line.strip() and number < len(lines):  # a kill may have cut off a last line
            unreadable.append(line + b"\n")
            numbers.append(str(number))
    if unreadable:
        aside = path.with_name(path.name + ".unreadable")
        with aside.open("ab") as file:
            file.writelines(unreadable)
        listed = (
            f"line{'s' * (len(numbers) > 1)} {', '.join(numbers[:5])}{', ...' * (len(numbers) > 5)}"
        )
        _warn(f"{path}: {listed} cannot be read; moved to {aside.name}")
    written = Written.of(kept)
    if saved and len(kept) + len(unreadable) < saved["lines"]:
        _warn(
            f"{path}: {saved['lines']} lines had been written up to step {last_step}, and "
            f"{len(kept)} are left; the rest are lost (training does not depend on them)"
        )
    elif saved and not unreadable and written.data != saved:
        _warn(
            f"{path}: its lines up to step {last_step} have changed since they were written "
            "(training does not depend on them)"
        )
    if lines:
        replace_file(path, b"".join(kept))
    return written


def logs_and_others(
    files: Mapping[str, bytes],
) -> tuple[dict[str, tuple[int, bytes]], dict[str, bytes]]:
    """Joins the parts of a run's logs in a bucket.

    Args:
      files: name -> content of all files.

    Returns:
      Each log's name -> its newest series and its content; and the other files unchanged.
    """
    logs: dict[str, tuple[int, bytes]] = {}
    others: dict[str, bytes] = {}
    for name in sorted(files):
        path = pathlib.PurePosixPath(name)
        if not path.parent.name.endswith(LOG):
            others[name] = files[name]
            continue
        log, series = str(path.parent), int(path.name.partition("-")[0])
        newest, content = logs.get(log, (series, b""))
        logs[log] = (series, files[name] if series > newest else content + files[name])
    return logs, others


def read_log(path: pathlib.Path, folder: pathlib.Path) -> bytes:
    """Returns a log's lines; also of a run that was copied from a bucket, with its logs in parts.

    Args:
      path: of the log; folder: that must contain it, as in `data.untrusted_files.check_within`.
    """
    if not path.is_dir():
        return read_bytes(path, folder)
    parts = {f"{path.name}/{part.name}": read_bytes(part, folder) for part in _parts(path)}
    logs, _ = logs_and_others(parts)
    return logs[path.name][1] if parts else b""


def join_parts(folder: pathlib.Path) -> None:
    """Makes files of the logs of a run that was copied from a bucket."""
    for aside in folder.glob(f"*{LOG}{_ASIDE}"):  # a start was killed meanwhile
        path = aside.with_name(aside.name.removesuffix(_ASIDE))
        if path.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(path)
    for path in sorted(folder.glob(f"*{LOG}")):
        if in_parts(path):
            content, aside = read_log(path, folder), path.with_name(path.name + _ASIDE)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            replace_file(path, content)
            shutil.rmtree(aside)


def in_parts(path: pathlib.Path) -> bool:
    """Returns whether a log is a folder of parts, as in a run that was copied from a bucket."""
    return path.is_dir() and bool(_parts(path))


def _parts(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a log in parts."""
    return sorted(part for part in path.iterdir() if _PART.fullmatch(part.name))


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def _logged_step(line: bytes) -> int | None:
    """The step of a logged line; None if it is unreadable."""
    try:
        step = json.loads(line.decode())["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def replace_file(path: pathlib.Path, content: bytes) -> None:
    """Replaces a file atomically: after a kill, either the old or the new one is complete."""
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_bytes(content)
    sync(scratch)
    os.replace(scratch, path)
