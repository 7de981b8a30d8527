"""How a checkpoint is committed: by a rename on a disk; in a bucket, which cannot rename, by its
manifest.

A run in a bucket differs from one on a disk only here, in its lock (`trainer.run.lease` instead of
`trainer.run.lock`) and in its small files, which are written to a local folder and then copied
(`trainer.run.mirror`).

Orbax does not write to s3://: each process has it write to a local folder, and copies its files.

Either way, a process killed at any moment leaves nothing that a reader mistakes for a checkpoint;
the manifest, which lists all other files, is written last. Folders are `pathlib.Path`s, or in a
bucket `epath.Path`s, which Orbax accepts too.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

from etils import epath

from data.folders import sync
from data.untrusted_files import MAX_JSON_BYTES, check_tree, check_within, read_bytes
from trainer.config.schema import GCS
from trainer.run.bucket import Bucket, in_bucket

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
DAMAGED = "damaged"  # file in a checkpoint's folder: damage found in the background
DATA_FILE_BYTES = 1 << 28  # of a file of arrays in a bucket, which is read whole to be verified
_STEP = re.compile(r"\d+")
# Folders of killed saves and removals.
_LEFTOVER = re.compile(r"\d+\.tmp(-removed)?")


def located(path: str | Path) -> Path:
    """Returns the absolute path of a folder, local or in a bucket."""
    return epath.Path(path) if in_bucket(path) else Path(path).absolute()


def orbax_reaches(path: str | Path) -> bool:
    """Returns whether Orbax can write to a folder itself."""
    return not in_bucket(path) or str(path).startswith(GCS)


class Files:
    """The files of a checkpoint's folder, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bucket = Bucket(str(folder)) if in_bucket(folder) else None

    def names(self) -> list[str]:
        """Returns the names of all files but the manifest, sorted."""
        if self.bucket is not None:
            names = self.bucket.names()
        else:
            files = (path for path in self.folder.rglob("*") if path.is_file())
            names = sorted(path.relative_to(self.folder).as_posix() for path in files)
        return [name for name in names if name != MANIFEST]

    def read(self, name: str) -> bytes:
        """Returns the content of a small file.

        Raises:
          FileNotFoundError, NotADirectoryError: it is not there.
          UserError: a link points outside the folder.
        """
        if self.bucket is not None:
            return self.bucket.read(name)
        return read_bytes(self.folder / name, self.folder, MAX_JSON_BYTES)

    def check(self) -> None:
        """Raises UserError if a link in the folder points outside it."""
        if self.bucket is None:
            check_tree(self.folder)

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, durably."""
        if self.bucket is not None:
            self.bucket.write(name, content)
            return
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        sync(path)

    def seal(self, name: str) -> dict[str, Any]:
        """Makes a file durable and returns its `record`."""
        if self.bucket is None:
            sync(self.folder / name)
        return self.record(name)

    def record(self, name: str, expected: int | None = None) -> dict[str, Any]:
        """Returns a file's `size` and `sha256` by reading it; the digest is "" if the size is not
        the expected one.

        Raises:
          OSError: it is missing or cannot be read.
        """
        if self.bucket is not None:
            content = self.bucket.read(name)  # at most DATA_FILE_BYTES
            return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        check_within(self.folder, self.folder / name)
        size = (self.folder / name).stat().st_size
        if expected not in (None, size):
            return {"size": size, "sha256": ""}
        with (self.folder / name).open("rb") as file:
            return {"size": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

    def make_folders_durable(self) -> None:
        """Makes the names of all files durable."""
        if self.bucket is None:
            for path in [*(p for p in self.folder.rglob("*") if p.is_dir()), self.folder]:
                sync(path)


def steps_in(folder: Path) -> list[int]:
    """Returns the steps with a checkpoint in RUN/checkpoints, ascending; on a disk also those
    without a manifest."""
    if in_bucket(folder):
        names = (name.split("/") for name in Bucket(str(folder)).names())
        found = (parts[0] for parts in names if parts[1:] == [MANIFEST])
    else:
        paths = folder.iterdir() if folder.is_dir() else ()
        found = (path.name for path in paths if path.is_dir())
    return sorted(int(name) for name in found if _STEP.fullmatch(name))


def scratch_of(target: Path) -> Path:
    """Returns the folder to write a checkpoint to: TARGET.tmp, or in a bucket the target itself."""
    return target if in_bucket(target) else target.with_name(target.name + ".tmp")


def clear(scratch: Path) -> None:
    """Removes the remains of a killed attempt, or of a damaged checkpoint in a bucket, before
    writing."""
    if in_bucket(scratch):
        remove(scratch)
    else:
        _remove_tree(scratch)


def remove_leftovers(target: Path) -> None:
    """Removes what killed processes left behind of the run's other checkpoints."""
    if target.parent.name != CHECKPOINTS:
        return
    if in_bucket(target):
        bucket = Bucket(str(target.parent))
        folders = {name.partition("/")[0] for name in bucket.names()} - {target.name}
        for name in folders - {str(step) for step in steps_in(target.parent)}:
            if _STEP.fullmatch(name):
                bucket.remove(f"{name}/")
    elif target.parent.is_dir():
        for path in target.parent.iterdir():
            if _LEFTOVER.fullmatch(path.name) and path != scratch_of(target):
                _remove_tree(path)


def publish(target: Path, manifest: bytes) -> None:
    """Turns the target's scratch folder into a checkpoint."""
    scratch = scratch_of(target)
    files = Files(scratch)
    files.write(MANIFEST, manifest)
    if in_bucket(target):
        return
    files.make_folders_durable()
    # One of this step: damaged, so that training has reached it again, or without its best.
    replaced = _set_aside(target) if target.exists() else None
    try:
        scratch.rename(target)
    except OSError:
        if replaced is not None:
            replaced.rename(target)  # or neither would count
        raise
    sync(target.parent)  # makes the name durable before an older checkpoint is removed
    if replaced is not None:
        _remove_tree(replaced)


def _set_aside(folder: Path) -> Path:
    """Renames a checkpoint so that it does not count; returns its new name."""
    aside = folder.with_name(folder.name + ".tmp-removed")
    _remove_tree(aside)
    return folder.rename(aside)


def _remove_tree(path: Path) -> None:
    """Removes a folder as far as it can; if it is a link, only the link."""
    if path.is_symlink():  # or its target would be written to, or stay
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def remove(folder: Path) -> None:
    """Deletes a checkpoint. A kill in the middle leaves no partial one that counts."""
    if in_bucket(folder):
        Bucket(str(folder)).write(MANIFEST, None)
        Bucket(str(folder.parent)).remove(f"{folder.name}/")
        return
    _remove_tree(_set_aside(folder))
