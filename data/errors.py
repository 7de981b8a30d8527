"""Errors that end a command with one line: those that its user can correct, and Ctrl-C."""

import difflib
import errno
import http
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from types import TracebackType

from data.signals import end_at_once

# What the operating system says of mounts, connections and disks that may work a moment later.
# EFBIG, a limit on the size of files, is not among them.
_TRANSIENT_CODES = frozenset(
    (
        errno.EIO,
        errno.ESTALE,
        errno.EREMOTEIO,
        errno.ENOLINK,
        errno.EBUSY,
        errno.EAGAIN,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.ETIMEDOUT,
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ECONNABORTED,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENETRESET,
        errno.EADDRINUSE,
    )
)
# Libraries in C++ quote these words, and give no number.
_TRANSIENT_WORDS = tuple(
    sorted(os.strerror(code) for code in _TRANSIENT_CODES - {errno.EAGAIN, errno.EBUSY})
)
# How messages of XLA, TensorStore and gRPC begin.
_TRANSIENT_STATUSES = ("UNAVAILABLE:", "DEADLINE_EXCEEDED:", "ABORTED:")
# Of requests, httpx, aiohttp and botocore, whose errors do not all derive from Python's.
_TRANSIENT_NAMES = frozenset(
    (
        "ConnectionError",
        "ConnectError",
        "ConnectTimeout",
        "ReadTimeout",
        "Timeout",
        "TimeoutException",
        "ClientConnectionError",
        "EndpointConnectionError",
        "ConnectTimeoutError",
        "ReadTimeoutError",
    )
)
_TRANSIENT_HTTP = frozenset(
    (
        http.HTTPStatus.REQUEST_TIMEOUT,
        http.HTTPStatus.TOO_MANY_REQUESTS,
        http.HTTPStatus.INTERNAL_SERVER_ERROR,
        http.HTTPStatus.BAD_GATEWAY,
        http.HTTPStatus.SERVICE_UNAVAILABLE,
        http.HTTPStatus.GATEWAY_TIMEOUT,
    )
)
_RESOLVER_TRY_AGAIN = -3  # socket.EAI_AGAIN, without importing socket


class UserError(Exception):
    """An error in the user's input: what was found, in which file or field, what would work."""


class TransientError(UserError):
    """An error that may be gone at the next start, such as a lost connection.

    It is a `UserError` because it ends a command with one line too, and whoever handles that must
    not let this one through. It differs in the exit code; see `is_transient`.
    """


def is_transient(error: BaseException) -> bool:
    """Returns whether another start may succeed: the cause is a mount, a network or a disk.

    These are `TransientError`; errors of the operating system such as EIO, ESTALE, ETIMEDOUT, a
    full disk and a refused connection, also where a library in C++ quotes them; answers of servers
    such as 503; and time-outs.
    """
    return any(_is_transient_alone(link) for link in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and those that it was raised for or while handling, the last one first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        reason = getattr(error, "reason", None)  # urllib's URLError
        if isinstance(reason, BaseException):
            yield reason
        error = error.__cause__ or error.__context__


def _is_transient_alone(error: BaseException) -> bool:
    """`is_transient` of one error, without those that it was raised for."""
    if isinstance(error, UserError):
        return isinstance(error, TransientError)
    if isinstance(error, TimeoutError) or (
        isinstance(error, ConnectionError) and not isinstance(error, BrokenPipeError)
    ):
        return True
    if (status := _http_status(error)) is not None:
        return status in _TRANSIENT_HTTP
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _TRANSIENT_CODES or (
            type(error).__name__ == "gaierror" and error.errno == _RESOLVER_TRY_AGAIN
        )
    if any(kind.__name__ in _TRANSIENT_NAMES for kind in type(error).__mro__):
        return True
    text = str(error)
    if isinstance(error, (OSError, ValueError)) and any(
        f": {words}" in text for words in _TRANSIENT_WORDS
    ):
        return True
    return isinstance(error, (OSError, RuntimeError, ValueError)) and text.startswith(
        _TRANSIENT_STATUSES
    )


def _http_status(error: BaseException) -> int | None:
    """Returns the HTTP status in an error of urllib, requests, httpx, gcsfs or aiohttp."""
    values = (
        getattr(getattr(error, "response", None), "status_code", None),
        getattr(error, "code", None),
        getattr(error, "status", None),
    )
    return next((value for value in values if isinstance(value, int) and 100 <= value < 600), None)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, up to 200 characters, or else its type.

    For errors of the operating system this is only their text, such as `No such file or directory`.
    """
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    return (text.strip() or type(error).__name__).splitlines()[0][:200]


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns `did you mean X? ` for the most similar valid name X, or "" if none is similar."""
    close = difflib.get_close_matches(name, list(names), 1)
    return f"did you mean {close[0]}? " if close else ""


def install_ctrl_c_hook() -> None:
    """Makes an uncaught Ctrl-C, such as one during a command's imports, print `stopped` and exit
    with status 130; and SIGTERM end the command at once with 143.

    The packages that contain commands call this first. It takes effect under `python -m` only,
    recognised by sys.argv, which does not yet contain the command's name at that time.
    """
    if sys.argv[:1] == ["-m"]:
        sys.excepthook = _report_uncaught
        end_at_once()


def _report_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    print("stopped", file=sys.stderr)
    sys.stdout.flush()
    os._exit(128 + signal.SIGINT)
