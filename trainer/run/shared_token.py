"""The secret by which a run's processes recognize each other at the rendezvous."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from data.errors import UserError
from data.within import read_text

# The environment variable, or file in the run's folder, that holds it.
TOKEN, TOKEN_FILE = "LONGSTRIPE_TOKEN", "token"
_MOST_BYTES = 2048


def token_of(folder: Path | None) -> str:
    """Returns the secret of the processes that train in a run's folder; "" if there is none.

    Args:
      folder: of the run or a stage; None if the processes share no folder.

    Raises:
      UserError: its file is empty, or not a plain file in the folder.
    """
    token = os.environ.get(TOKEN, "")
    if token or folder is None or not os.path.lexists(path := _token_file(folder)):
        return token
    if token := read_text(path, path.parent, _MOST_BYTES).strip():
        return token
    raise UserError(
        f"{path}: is empty; remove it, or write a secret such as openssl rand -hex 32 prints"
    )


@contextlib.contextmanager
def offered_token(folder: Path | None) -> Iterator[str]:
    """Yields process 0's token: that of `token_of`, or a new one, kept in its file meanwhile.

    The other processes read the file once process 0 has answered them; it is deleted at the end of
    the context. A folder with other files than a run's, or an unwritable one, gets no file: then
    the token is `token_of`'s, perhaps empty.

    Args:
      folder: the run's; None for none.
    """
    token = token_of(folder)
    if token or folder is None or not _may_hold(path := _token_file(folder)):
        yield token
        return
    new_folders = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_new(path, secrets.token_hex())
    except OSError:
        yield token_of(folder)
        return
    try:
        yield token_of(folder)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
            for parent in new_folders:
                parent.rmdir()


def _write_new(path: Path, token: str) -> None:
    """Writes a file that did not exist, for this user alone; or none, as on a full disk.

    An empty one would be refused at every later start.
    """
    opened = open(path, "x", encoding="utf-8", opener=_for_this_user)  # noqa: SIM115
    try:
        with opened as file:
            file.write(token)
    except OSError:
        path.unlink()
        raise


def _token_file(folder: Path) -> Path:
    # A stage before the last one is in RUN/stages/NUMBER.
    return (folder.parent.parent if folder.parent.name == "stages" else folder) / TOKEN_FILE


def _may_hold(path: Path) -> bool:
    """Whether a token's folder is a run's, or may become one, being empty or absent."""
    folder = path.parent
    try:
        return not folder.exists() or (folder / "config.yaml").exists() or not any(folder.iterdir())
    except OSError:
        return False


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
