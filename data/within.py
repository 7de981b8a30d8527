"""Files of a folder that somebody else may have made: read only if they are inside it."""

import os
import re
from pathlib import Path

from data.errors import UserError
from data.printable import printable

# A snapshot in the Hugging Face cache, whose files are links to the blobs of the same repository.
_SNAPSHOT = re.compile(r"(?P<repository>.*/(?:models|datasets)--[^/]+)/snapshots/[^/]+(?:/.*)?")


def file_within(folder: str | Path, name: str) -> Path | None:
    """Returns the path of a file in a folder, or None where the folder has none of this name.

    A link that a stranger put into a model, an adapter or a data set would otherwise carry any file
    of this machine into a checkpoint, an export and the hub.

    Raises:
      UserError: as `check_within`.
    """
    path = Path(folder) / name
    if not os.path.lexists(path):
        return None
    check_within(folder, path)
    return path if path.is_file() else None


def check_within(folder: str | Path, path: str | Path) -> None:
    """Raises UserError unless a path leads into a folder, or from the hub's cache to its blobs.

    Args:
      folder: as the user named it; it may be a link itself.
      path: of a file or folder in it, which may not exist.
    """
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    allowed = [root]
    if match := _SNAPSHOT.fullmatch(str(root)):
        # Not resolved: a link instead of `blobs` leads out too.
        allowed.append(Path(match["repository"]) / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise UserError(
            printable(
                f"{path}: leads to {target}, outside of its folder; a copy of the file would work"
            )
        )
    if target.exists() and not (target.is_file() or target.is_dir()):
        raise UserError(
            printable(f"{path}: is neither a file nor a folder; a plain file would work")
        )
