"""Errors that end a command with one line instead of a traceback: those that its user can correct, and Ctrl-C."""
import difflib
import os
import signal
import sys
from collections.abc import Iterable
from types import TracebackType


class UserError(Exception):
    """An error in the user's input. The message says what was found, in which file or field, and what would work."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, at most 200 characters; the name of its type if it has no message.

    Of the operating system's errors this is their text alone, such as `No such file or directory`.
    """
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    return (text.strip() or type(error).__name__).splitlines()[0][:200]


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns `did you mean X? `, to be put before what would work, for the name X that is most like a misspelt one, or ""."""
    close = difflib.get_close_matches(name, list(names), 1)
    return f"did you mean {close[0]}? " if close else ""


def install_ctrl_c_hook() -> None:
    """Makes an uncaught Ctrl-C, such as one during a command's imports, print `stopped` and exit with status 130.

    The packages that contain commands call this first. It takes effect under `python -m` only, recognised by sys.argv, which
    does not yet contain the command's name at that time.
    """
    if sys.argv[:1] == ["-m"]:
        sys.excepthook = _report_uncaught


def _report_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    print("stopped", file=sys.stderr)
    sys.stdout.flush()
    os._exit(128 + signal.SIGINT)
