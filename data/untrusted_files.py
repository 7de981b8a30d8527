"""Files that somebody else may have made: read only if they are plain files inside the folder the
user named."""

import contextlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.printable import printable

MAX_TEXT_BYTES = 4 << 30
MAX_JSON_BYTES = 256 << 20
MAX_JSON_DEPTH = 100  # of files that are written again, and read by other programs
# A snapshot in the Hugging Face cache; its files are links to the repository's blobs.
_SNAPSHOT = re.compile(r"(?P<repository>.*/(?:models|datasets)--[^/]+)/snapshots/[^/]+(?:/.*)?")
# What Git LFS leaves in a clone instead of a file, and the most bytes it has.
_POINTER, _POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024


def file_within(folder: str | Path, name: str) -> Path | None:
    """Returns the path of a file in a folder, or None if there is none.

    A stranger's link in a model, adapter or data set could otherwise carry any local file into a
    checkpoint, an export and the hub.

    Raises:
      UserError: as `check_within` and `refuse_pointer`.
    """
    path = Path(folder) / name
    if not os.path.lexists(path):
        return None
    check_within(folder, path)
    if not path.is_file():
        return None
    refuse_pointer(path)
    return path


def refuse_pointer(path: str | Path) -> None:
    """Raises UserError for a file that Git LFS has not fetched, of which a clone has a few lines of
    text instead; not for a missing file."""
    with contextlib.suppress(OSError):  # whoever reads it reports it
        status = os.stat(path)
        is_small = stat.S_ISREG(status.st_mode) and status.st_size <= _POINTER_BYTES
        if is_small and read_bytes(path).startswith(_POINTER):
            raise UserError(
                printable(
                    f"{path}: only Git LFS's pointer to the file; `git lfs pull` in the clone, or "
                    "`hf download`, gets the file itself"
                )
            )


def check_within(folder: str | Path, path: str | Path) -> None:
    """Raises UserError unless a path stays in a folder, or leads from the hub cache to its blobs.

    Args:
      folder: as the user named it; it may be a link itself.
      path: of a file or folder in it, which may not exist.
    """
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    allowed = [root]
    if match := _SNAPSHOT.fullmatch(str(root)):
        # Not resolved: a link instead of `blobs` leads out too.
        allowed.append(Path(match["repository"]) / "blobs")
    if not any(target.is_relative_to(parent) for parent in allowed):
        raise UserError(
            printable(
                f"{path}: leads to {target}, outside of its folder; a copy of the file would work"
            )
        )
    if target.exists() and not (target.is_file() or target.is_dir()):
        raise _not_plain(path)


def check_tree(folder: str | Path, root: str | Path | None = None) -> None:
    """Raises UserError unless everything below a folder stays inside, as in `check_within`.

    Args:
      folder: as the user named it, or one inside.
      root: as the user named it, if `folder` is inside.
    """
    root = folder if root is None else root
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                check_tree(entry.path, root)
            elif not entry.is_file(follow_symlinks=False):
                check_within(root, entry.path)


def read_bytes(
    path: str | Path, folder: str | Path | None = None, most: int = MAX_TEXT_BYTES
) -> bytes:
    """Returns the contents of a plain file; never waits for a pipe, and never reads a device.

    Args:
      folder: that must contain it, as in `check_within`; None for a file named by the user.
      most: bytes.

    Raises:
      UserError: it is not a plain file, is larger, or leads out of the folder.
      OSError: it cannot be read.
    """
    if folder is not None:
        check_within(folder, path)
    with open(path, "rb", opener=_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise _not_plain(path)
        if status.st_size > most:
            raise UserError(
                printable(f"{path}: has {status.st_size:,} bytes; up to {most:,} would work")
            )
        return file.read(status.st_size)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def read_text(
    path: str | Path, folder: str | Path | None = None, most: int = MAX_TEXT_BYTES
) -> str:
    """Returns a plain file's text; UnicodeDecodeError if it is not UTF-8, else as `read_bytes`."""
    return read_bytes(path, folder, most).decode("utf-8")


def read_json(path: str | Path, folder: str | Path | None = None) -> Any:
    """Returns the value in a plain file; ValueError if it is not JSON, else as `read_bytes`."""
    return parse_json(read_text(path, folder, MAX_JSON_BYTES))


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text; ValueError also for too deep nesting."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def check_writable(value: Any, file: str | Path) -> None:
    """Raises UserError if a JSON value could be read but not written again; names its field.

    Args:
      value: from `file`.
    """
    waiting: list[tuple[tuple[str, ...], Any]] = [((), value)]
    while waiting:
        fields, item = waiting.pop()
        name = ".".join(fields[:3])  # the whole would be as long as it is deep
        if len(fields) > MAX_JSON_DEPTH:
            problem = f"is nested more than {MAX_JSON_DEPTH} deep; less"
        elif isinstance(item, str) and not is_text(item):
            problem = "holds half of a surrogate pair; text that UTF-8 can express"
        elif fields and not is_text(fields[-1]):
            name = ascii(fields[-1])
            problem = "is no field's name; text that UTF-8 can express"
        else:
            if isinstance(item, list):
                item = dict(enumerate(item))
            inner = item.items() if isinstance(item, dict) else ()
            waiting += [((*fields, str(key)), part) for key, part in inner]
            continue
        raise UserError(printable(f"{file}: {name} {problem} would work"))


def is_text(value: object) -> bool:
    """Returns whether a JSON value is a text without lone surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _not_plain(path: str | Path) -> UserError:
    return UserError(printable(f"{path}: is neither a file nor a folder; a plain file would work"))
