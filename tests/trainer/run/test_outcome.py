"""Every cause that ends a command has the exit code of the table in docs/troubleshooting.md, and
one line."""

import errno
import http.client
import io
import os
import re
import socket
import ssl
import urllib.error

import pytest

from data.download import download_file
from data.errors import TransientError, UserError, is_transient
from data.folders import building, exclusive
from trainer.checkpoint.manifest import DamagedError
from trainer.run import outcome
from trainer.run.cluster import _decoded, _encoded
from trainer.run.outcome import TRY_AGAIN, UNEXPECTED, WRONG_INPUT, outcome_of


def of_system(code, *names):
    return OSError(code, os.strerror(code), *names)


def raised_for(error, cause, hidden=False):
    """The error after `raise error from cause`, or where it hides the cause: `raise error from
    None`."""
    try:
        try:
            raise cause
        except BaseException:
            if hidden:
                raise error from None
            raise error  # noqa: B904 - the context alone is what is tested
    except Exception as caught:
        return caught


class Response:
    def __init__(self, status):
        self.status_code = status


class HubError(Exception):
    """As huggingface_hub and requests raise it."""

    def __init__(self, status):
        super().__init__(f"server answered {status}")
        self.response = Response(status)


class ConnectTimeout(Exception):
    """As httpx names it; it derives from no error of Python's."""


class JaxRuntimeError(RuntimeError):
    pass


def of_library(*names, **attributes):
    """An error of a library that may be absent: its class's name, and those that it derives from,
    as the library has them; through `raise UserError from`, as commands pass them on."""
    kind = Exception
    for name in reversed(names):
        kind = type(name, (kind,), {})
    error = kind("x")
    vars(error).update(attributes)
    return raised_for(UserError("gs://bucket/run: x"), error)


def connector_error(number):
    """aiohttp's, which is an OSError with the number of what it was raised for."""
    kind = type("ClientConnectorError", (type("ClientOSError", (OSError,), {}),), {})
    return raised_for(UserError("gs://bucket/run: x"), kind(number, "cannot connect"))


CAUSES = {
    "a field of the recipe": (UserError("train.steps: found -1"), WRONG_INPUT),
    "a value": (ValueError("mesh: found 9"), WRONG_INPUT),
    "a file that is not there": (of_system(errno.ENOENT, "x.json"), WRONG_INPUT),
    "a folder that may not be written": (of_system(errno.EACCES, "runs"), WRONG_INPUT),
    "a read-only file system": (of_system(errno.EROFS, "runs"), WRONG_INPUT),
    "a limit on the size of files": (of_system(errno.EFBIG), WRONG_INPUT),
    "a reader that closed its end": (of_system(errno.EPIPE), WRONG_INPUT),
    "a damaged checkpoint": (DamagedError("5: model/x is missing"), WRONG_INPUT),
    "a server without the file": (
        urllib.error.HTTPError("http://x", 404, "Not Found", {}, io.BytesIO()),
        WRONG_INPUT,
    ),
    "a hub that wants a login": (
        raised_for(UserError("no such data set"), HubError(401)),
        WRONG_INPUT,
    ),
    "memory of the host": (MemoryError(), WRONG_INPUT),
    "memory of a device": (
        JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes."),
        WRONG_INPUT,
    ),
    "a mistake of ours": (KeyError("x"), UNEXPECTED),
    "a mistake of ours in JAX": (RuntimeError("INVALID_ARGUMENT: shapes"), UNEXPECTED),
    "a mount that fails": (of_system(errno.EIO, "runs/a"), TRY_AGAIN),
    "a mount that was exchanged": (of_system(errno.ESTALE, "runs/a"), TRY_AGAIN),
    "a mount that does not answer": (of_system(errno.ETIMEDOUT, "runs/a"), TRY_AGAIN),
    "a full disk": (of_system(errno.ENOSPC, "runs/a"), TRY_AGAIN),
    "a quota": (of_system(errno.EDQUOT, "runs/a"), TRY_AGAIN),
    "a full disk in TensorStore's words": (
        ValueError(
            'RESOURCE_EXHAUSTED: Failed writing: "x": Failed to write 9 bytes to file 4: No space left on device '
            "[os_error_code='28']"
        ),
        TRY_AGAIN,
    ),
    "a mount in TensorStore's words": (
        ValueError("INTERNAL: Failed reading: \"x\": Input/output error [os_error_code='5']"),
        TRY_AGAIN,
    ),
    "a store that is not there for a moment": (ValueError("UNAVAILABLE: HTTP 503"), TRY_AGAIN),
    "a failed save": (
        raised_for(OSError("saving checkpoint 5 failed"), of_system(errno.EIO)),
        TRY_AGAIN,
    ),
    "a message of ours for a mount": (
        raised_for(UserError("runs: cannot write there"), of_system(errno.ESTALE), hidden=True),
        TRY_AGAIN,
    ),
    "a connection that was refused": (
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        TRY_AGAIN,
    ),
    "a connection that was reset": (ConnectionResetError(), TRY_AGAIN),
    "a network that is down": (urllib.error.URLError(of_system(errno.ENETUNREACH)), TRY_AGAIN),
    "a name server that is down": (
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        TRY_AGAIN,
    ),
    "a time-out": (TimeoutError("timed out"), TRY_AGAIN),
    "a time-out of another library": (
        raised_for(UserError("hub: not reached"), ConnectTimeout()),
        TRY_AGAIN,
    ),
    "a busy server": (
        urllib.error.HTTPError("http://x", 503, "Unavailable", {}, io.BytesIO()),
        TRY_AGAIN,
    ),
    "a busy hub": (
        raised_for(UserError("cannot be downloaded"), HubError(429), hidden=True),
        TRY_AGAIN,
    ),
    "a name server that is down, by aiohttp": (connector_error(socket.EAI_AGAIN), TRY_AGAIN),
    "a certificate that does not hold": (
        of_library("ClientConnectorCertificateError", "ClientConnectorError"),
        WRONG_INPUT,
    ),
    "a connection that ends within TLS": (ssl.SSLEOFError(8, "EOF occurred"), TRY_AGAIN),
    "a certificate by ssl": (
        raised_for(ConnectionError("SSL"), ssl.SSLCertVerificationError(1, "self-signed")),
        WRONG_INPUT,
    ),
    "an answer that breaks off, by aiohttp": (of_library("ClientPayloadError"), TRY_AGAIN),
    "an answer that breaks off, by http.client": (http.client.IncompleteRead(b""), TRY_AGAIN),
    "an answer that breaks off, by requests": (
        of_library("ChunkedEncodingError", "RequestException"),
        TRY_AGAIN,
    ),
    "an answer that breaks off, by httpx": (
        of_library("RemoteProtocolError", "ProtocolError", "TransportError"),
        TRY_AGAIN,
    ),
    "an address that is none, by httpx": (
        of_library("UnsupportedProtocol", "TransportError"),
        WRONG_INPUT,
    ),
    "an answer that breaks off, by botocore": (
        of_library("ResponseStreamingError", "HTTPClientError"),
        TRY_AGAIN,
    ),
    "another content than was sent, by gcsfs": (of_library("ChecksumError"), TRY_AGAIN),
    "a busy store, by gcsfs": (of_library("HttpError", code="503"), TRY_AGAIN),
    "no right to the bucket, by gcsfs": (of_library("HttpError", code=403), WRONG_INPUT),
    "a busy store, by botocore": (
        of_library("ClientError", response={"ResponseMetadata": {"HTTPStatusCode": 503}}),
        TRY_AGAIN,
    ),
    "no right to the bucket, by botocore": (
        of_library("ClientError", response={"ResponseMetadata": {"HTTPStatusCode": 403}}),
        WRONG_INPUT,
    ),
    "a metadata server that does not answer": (of_library("TransportError"), TRY_AGAIN),
    "a token that cannot be had for a moment": (
        of_library("RefreshError", retryable=True),
        TRY_AGAIN,
    ),
    "a login that has expired": (of_library("RefreshError", retryable=False), WRONG_INPUT),
    "a lock server that restarts": (of_system(errno.ENOLCK, "runs/a"), TRY_AGAIN),
    "too many files of all programs": (of_system(errno.ENFILE, "runs/a"), TRY_AGAIN),
    "too many files of one's own": (of_system(errno.EMFILE, "runs/a"), WRONG_INPUT),
    "a call that its peer has left": (ValueError("CANCELLED: peer"), TRY_AGAIN),
    "what another start may pass": (TransientError("process 0 was not reached"), TRY_AGAIN),
    "Ctrl-C": (KeyboardInterrupt(), 130),
    "Ctrl-C in a library": (
        raised_for(ImportError("initialization failed"), KeyboardInterrupt()),
        130,
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_has_its_code(cause):
    error, code = CAUSES[cause]
    found = outcome_of(error)
    assert found.code == code
    assert (found.message is None) == (code == UNEXPECTED) and "\n" not in (found.message or "")


def test_the_page_has_a_row_for_each_code(repository):
    page = (repository / "docs/troubleshooting.md").read_text(encoding="utf-8")
    table = page[page.index("## Exit codes") : page.index("## Known limits")]
    codes = {
        int(code)
        for cell in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)
        for code in cell.split(", ")
    }
    assert codes == {
        outcome.SUCCESS,
        UNEXPECTED,
        WRONG_INPUT,
        TRY_AGAIN,
        outcome.STOPPED,
        outcome.TERMINATED,
        134,
        137,
        139,
    }
    assert TRY_AGAIN == 75


@pytest.mark.parametrize(
    "words", ["cannot be read (Input/output error)", "found 'Connection refused'"]
)
def test_words_that_a_user_wrote_are_no_cause(words):
    assert not is_transient(ValueError(words)) and not is_transient(UserError(words))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UserError("x: not here"), UserError),
        (of_system(errno.EIO, "x"), TransientError),
        (KeyError("x"), TransientError),
        (TransientError("gone"), TransientError),
        (of_system(errno.ENOENT, "x"), UserError),
    ],
)
def test_an_error_of_another_process_ends_this_one_with_its_code_or_to_be_tried_again(error, kind):
    import json

    assert type(_decoded(json.loads(_encoded(error)))) is kind


def test_what_another_process_says_is_made_printable():
    assert str(_decoded({"code": 2, "message": "\x1b[2Jx"})) == "\ufffd[2Jx"


def test_a_folder_that_another_process_prepares_may_be_free_later(tmp_path):
    with (
        exclusive(tmp_path / "lock", "prepares"),
        pytest.raises(TransientError),
        exclusive(tmp_path / "lock", "prepares"),
    ):
        pass


def test_a_full_disk_while_a_folder_is_built(tmp_path):
    with (
        pytest.raises(TransientError, match="No space left on device while x"),
        building(tmp_path / "x", lambda _: False),
    ):
        raise of_system(errno.ENOSPC)


def test_a_download_that_does_not_get_through(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(TransientError, match="after 1 attempts"):
        download_file(f"http://127.0.0.1:{port}/x", tmp_path / "x", attempts=1)


def test_an_error_among_its_own_causes_is_told():
    """A library that raises again what an error was raised for makes such a ring."""
    first, second = ValueError("first"), RuntimeError("second")
    first.__context__, second.__cause__ = second, first
    assert outcome_of(first) == (WRONG_INPUT, "first")
    assert outcome_of(second).code == UNEXPECTED
