"""Errors that end a command with one line: those the user can correct, and Ctrl-C."""

import difflib
import errno
import http
import importlib.util
import os
import re
import resource
import signal
import sys
from collections.abc import Iterable, Iterator
from types import TracebackType

from data.signals import end_at_once

# Errors of mounts, connections and disks that may work a moment later. EFBIG, a limit on file
# sizes, is not among them: see `file_size_limit`.
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
        errno.ENONET,
        errno.ECOMM,
        errno.EPROTO,
        errno.ENOLCK,  # a network file system's lock server
        errno.EDEADLK,
        errno.ENFILE,  # of all programs; a process's own limit, EMFILE, would be hit again
        errno.ENOBUFS,
        errno.ETIME,
        errno.ECANCELED,
    )
)
# C++ libraries quote these words without a number.
_TRANSIENT_WORDS = tuple(
    sorted(os.strerror(code) for code in _TRANSIENT_CODES - {errno.EAGAIN, errno.EBUSY})
)
# Beginnings of messages of XLA, TensorStore and gRPC.
_TRANSIENT_STATUSES = ("UNAVAILABLE:", "DEADLINE_EXCEEDED:", "ABORTED:", "CANCELLED:")
# Of requests, urllib3, http.client, httpx, aiohttp, gcsfs, google.auth and botocore, whose errors
# do not all derive from Python's; and two of ssl, whose numbers are not the system's.
_TRANSIENT_NAMES = frozenset(
    (
        "BadStatusLine",
        "ChecksumError",
        "ChunkedEncodingError",
        "ClientConnectionError",
        "ClientConnectorError",
        "ClientPayloadError",
        "ConnectError",
        "ConnectTimeout",
        "ConnectTimeoutError",
        "ConnectionError",
        "EndpointConnectionError",
        "HTTPClientError",
        "IncompleteRead",
        "IncompleteReadError",
        "MaxRetryError",
        "NetworkError",
        "ProtocolError",
        "ReadTimeout",
        "ReadTimeoutError",
        "RetryError",
        "SSLEOFError",
        "SSLZeroReturnError",
        "Timeout",
        "TimeoutException",
        "TransportError",
    )
)
# Errors among those that would recur: an invalid certificate, an unknown scheme before ://, a
# request that HF_HUB_OFFLINE forbids.
_LASTING_NAMES = frozenset(
    (
        "CertificateError",
        "ClientConnectorCertificateError",
        "OfflineModeIsEnabled",
        "SSLCertVerificationError",
        "UnsupportedProtocol",
    )
)
TRANSIENT_HTTP = frozenset(
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

    It is a `UserError` because it also ends a command with one line, and handlers of that must
    catch it too. It differs in the exit code; see `is_transient`.
    """


def is_transient(error: BaseException) -> bool:
    """Returns whether another start may succeed: the cause is a mount, a network or a disk.

    These are `TransientError`; errors of the operating system such as EIO, ESTALE, ETIMEDOUT, a
    full disk and a refused connection, also where a library in C++ quotes them; answers of servers
    such as 503; broken transfers; and time-outs. An invalid certificate is not among them.
    """
    links = list(causes(error))
    return not any(_has_name(link, _LASTING_NAMES) for link in links) and any(
        map(_is_transient_alone, links)
    )


def is_refusal(error: BaseException) -> bool:
    """Returns whether a store refused the access: the account has no permission, or is unknown."""
    return any(
        isinstance(link, PermissionError)
        or _http_status(link) in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN)
        or (isinstance(link, OSError) and str(link).startswith("Forbidden: "))  # gcsfs
        for link in causes(error)
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its causes and contexts, the last one first.

    Each comes once, since an error that a library re-raised may be among its own causes.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        reason = getattr(error, "reason", None)  # urllib's URLError
        if isinstance(reason, BaseException):
            yield reason
        error = error.__cause__ or error.__context__


def _is_transient_alone(error: BaseException) -> bool:
    """`is_transient` of one error, without its causes."""
    if isinstance(error, UserError):
        return isinstance(error, TransientError)
    if isinstance(error, BrokenPipeError):  # the reader of our output is gone
        return False
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    if (status := _http_status(error)) is not None:
        return status in TRANSIENT_HTTP
    if isinstance(error, OSError) and type(error).__name__ == "gaierror":
        return error.errno == _RESOLVER_TRY_AGAIN
    if _has_name(error, _TRANSIENT_NAMES) or getattr(error, "retryable", None) is True:
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _TRANSIENT_CODES
    text = str(error)
    if isinstance(error, (OSError, ValueError)) and any(
        f": {words}" in text for words in _TRANSIENT_WORDS
    ):
        return True
    return isinstance(error, (OSError, RuntimeError, ValueError)) and text.startswith(
        _TRANSIENT_STATUSES
    )


def _http_status(error: BaseException) -> int | None:
    """Returns the HTTP status in an error of urllib, requests, httpx, gcsfs, aiohttp, botocore."""
    response = getattr(error, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    values = (
        getattr(response, "status_code", None),
        metadata.get("HTTPStatusCode"),
        getattr(error, "code", None),
        getattr(error, "status", None),
    )
    numbers = (int(str(value)) for value in values if re.fullmatch(r"[1-5]\d\d", str(value)))
    return next(numbers, None)


def _has_name(error: BaseException, names: frozenset[str]) -> bool:
    """Returns whether an error's type, or a base of it, has one of these names."""
    return any(kind.__name__ in names for kind in type(error).__mro__)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, up to 200 characters, or else its type; also
    the second line if the first ends with a colon.

    For operating system errors this is only their text, such as `No such file or directory`.
    """
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    lines = (text.strip() or type(error).__name__).splitlines()
    count = 2 if lines[0].endswith(":") else 1
    return " ".join(line.strip() for line in lines[:count])[:200]


def file_size_limit(error: BaseException) -> str | None:
    """Returns what would work if an error is about a file above a limit on sizes; else None.

    C++ libraries quote the system's words without a number.
    """
    if os.strerror(errno.EFBIG) not in str(error):
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return "a file system for larger files would work"
    return (
        f"files may have {limit:,} bytes; a higher limit, such as ulimit -f unlimited, would work"
    )


def missing_package(error: BaseException) -> str | None:
    """Returns what to do if an error is about a package that this Python does not have; else None.

    Most often the environment is not activated, and the system's Python runs the command.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    package = error.name.partition(".")[0]
    if importlib.util.find_spec(package) is not None:  # a module that the package does not have
        return None
    return (
        f"the package {package} is not installed for {sys.executable}; . .venv/bin/activate uses "
        "the environment that make install creates"
    )


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns `did you mean X? ` for the most similar valid name X, or "" if none is similar."""
    close = difflib.get_close_matches(name, list(names), 1)
    return f"did you mean {close[0]}? " if close else ""


def install_signal_hooks() -> None:
    """Makes an uncaught Ctrl-C, such as during a command's imports, print `stopped` and exit with
    status 130, and a missing package print what to do; and SIGTERM end the command at once with
    143.

    The packages that contain commands call this first. It takes effect only while `python -m`
    imports them to run a command, recognized by sys.argv, which does not yet contain the command's
    name at that time.
    """
    if sys.argv[:1] == ["-m"]:
        sys.excepthook = _report_uncaught
        end_at_once()


def _report_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        message, code = "stopped", 128 + signal.SIGINT
    elif (missing := missing_package(error)) and not os.environ.get("LONGSTRIPE_TRACEBACK"):
        message, code = f"error: {missing}", 2
    else:
        sys.__excepthook__(kind, error, traceback)
        return
    print(message, file=sys.stderr)
    sys.stdout.flush()
    os._exit(code)
