"""Where commands write: writable folders, and files of their own."""

import contextlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from data.errors import UserError
from data.folders import BY_A_RENAME, mount_point, sync, try_to_rename
from data.paths import expanded, on_this_machine, require_utf8
from data.untrusted_files import check_within


def output_folder(path: str | Path) -> Path:
    """Makes the folder for a command's results and returns it; call it before the work.

    Raises:
      UserError: the folder cannot be made or written to.
    """
    path = on_this_machine(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise UserError(
            f"{path}: cannot be a folder for results ({error.strerror}); name another one"
        ) from None
    return path


# The metadata given to `savefig`, and the resulting bytes in a PNG's header: a user's own picture
# lacks it, even one by Matplotlib.
PICTURE_METADATA = {"Software": "Longstripe"}
PICTURE = b"Software\0Longstripe"


def check_own(path: str | Path, marker: bytes) -> None:
    """Checks that a file may be overwritten: it is absent or empty, or the same command wrote it.

    Args:
      marker: bytes within the first 64 KiB of everything the command writes to such a file, and of
        hardly anything else.

    Raises:
      UserError: it is something else, or a link to nothing, or cannot be written to.
    """
    path = Path(path)
    _check_link(path)
    if not path.is_file():
        return
    with path.open("rb") as file:
        start = file.read(1 << 16)
    if start and marker not in start:
        raise UserError(
            f"{path}: exists, but was not written by this command, so it is not "
            "overwritten; name another file, or remove it"
        )
    try:
        path.open("ab").close()
    except OSError as error:  # such as another user's file
        raise UserError(
            f"{path}: cannot be written to ({error.strerror}); name another file, or remove it"
        ) from error


def _check_link(path: Path) -> None:
    """Raises UserError if a path is a link to nothing."""
    if path.is_symlink() and not path.exists():
        raise UserError(
            f"{path}: is a link to {os.readlink(path)}, which does not exist and is not made "
            "through it; name another path, or remove it"
        )


def output_file(path: str | Path, marker: bytes) -> Path:
    """Makes the folder of a command's output file, and returns the file's path.

    Args:
      marker: as in `check_own`.

    Raises:
      UserError: the path is a folder or someone else's file, or its folder cannot be made or
        written to.
    """
    path = on_this_machine(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file, such as {path}/result.json")
    output_folder(path.parent)
    check_own(path, marker)
    return path


def results_folder(path: str | Path, evaluation: str, *pictures: str) -> Path:
    """Makes the folder for an evaluation's answers, results and pictures; returns it.

    Args:
      evaluation: text that only this evaluation's results.json has, such as "evaluation": "needle".
      pictures: names of the evaluation's PNG files.

    Raises:
      UserError: as `output_files`.
    """
    markers = {
        "results.json": evaluation.encode(),
        "cases.jsonl": b'"generated"',
        "answers.jsonl": b"{",  # `eval.journal` reads whose they are
    }
    return output_files(path, markers | dict.fromkeys(pictures, PICTURE))


def output_files(path: str | Path, markers: Mapping[str, bytes]) -> Path:
    """Makes the folder of files that a command will write, and returns it.

    Args:
      markers: name of each file -> bytes within its first 64 KiB that only this command writes, by
        which a file of its own is known; see `check_own`.

    Raises:
      UserError: it cannot be made or written to, or has such a file that another wrote or that is
        a link out of it.
    """
    folder = output_folder(path)
    for name, marker in markers.items():
        check_within(folder, folder / name)
        check_own(folder / name, marker)
    return folder


def write_texts(folder: str | Path, texts: Mapping[str, str]) -> None:
    """Writes files of a command, each of which appears complete, and none before there is room for
    all: results of different answers must not stand side by side.

    Links, devices such as /dev/stdout, and other users' files are written in place.

    Args:
      texts: by the names of the files in the folder, which appear in this order.
    """
    contents = {expanded(folder) / name: text for name, text in texts.items()}
    scratches = {
        path: path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        for path in filter(_is_replaceable, contents)
    }
    try:
        for path, scratch in scratches.items():
            scratch.touch()
            with contextlib.suppress(OSError):  # as for a new file
                shutil.copystat(path, scratch)
                os.chown(scratch, -1, path.stat().st_gid)
            scratch.write_text(contents[path], encoding="utf-8")
            sync(scratch)
        for path, text in contents.items():
            if path in scratches:
                with contextlib.suppress(OSError):  # such as a single file mounted into a container
                    os.replace(scratches[path], path)
                    continue
            path.write_text(text, encoding="utf-8")
    finally:
        for scratch in scratches.values():
            scratch.unlink(missing_ok=True)


def _is_replaceable(path: Path) -> bool:
    """Returns whether a path is free, or a file of this user without other names."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return True
    is_only = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    return is_only and status.st_uid == os.geteuid()


def write_text(path: str | Path, text: str) -> None:
    """Writes a command's file; see `write_texts`."""
    write_texts(Path(path).parent, {Path(path).name: text})


def new_folder(path: str | Path) -> Path:
    """Makes the parent of a folder that a command will create last; returns the folder's path.

    A link to an empty folder stays: the returned path is that of its target.

    Raises:
      UserError: `path` exists and is not an empty folder, cannot be replaced by the new one, or is
        a link to nothing; or its parent cannot be made or written to, or has no renames.
    """
    path = on_this_machine(path)
    _check_link(path)
    if path.is_symlink():
        path = path.resolve()
    if path.exists() and path.samefile(os.curdir):
        raise UserError(
            f"{path}: is the folder in which this command runs, which a finished one would "
            "replace; a folder in it would work"
        )
    if path.is_mount():
        raise mount_point(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path}: exists and is not an empty folder; name another one or remove it")
    try_to_rename(output_folder(path.parent), BY_A_RENAME)
    return path


def checkpoint_path(path: str | Path, field: str) -> Path:
    """Returns the absolute path of a folder for checkpoints; it must contain no pattern characters.

    Orbax finds its files by a glob pattern that begins with this path: with pattern characters in
    it, it would find nothing, or another folder's files.

    Args:
      field: name of the user's field or argument, for the message.

    Raises:
      UserError: the absolute path contains *, ?, [ or a backslash, or is not UTF-8.
    """
    path = on_this_machine(path).absolute()
    require_utf8(path)
    if characters := [character for character in "*?[\\" if character in str(path)]:
        raise UserError(
            f"{field}: {path} has {' and '.join(characters)} in it, and Orbax cannot save "
            "checkpoints in such a path; one without *, ?, [ and backslash would work, such as "
            "that of a link to this folder"
        )
    return path
