"""Every cause that ends a command has one line and the exit code from the table in
docs/troubleshooting.md."""

import errno
import http.client
import io
import os
import re
import resource
import socket
import ssl
import urllib.error

import pytest

from data.download import download_file
from data.errors import TransientError, UserError, is_transient
from data.folders import building, exclusive
from trainer.checkpoint.manifest import DamagedError
from trainer.run import outcome
from trainer.run.cluster import decoded_error, encoded_error
from trainer.run.outcome import TRY_AGAIN, UNEXPECTED, WRONG_INPUT, outcome_of


def system_error(code, *names):
    return OSError(code, os.strerror(code), *names)


def raised_for(error, cause, hidden=False):
    """The error after `raise error from cause`; with `hidden`, after `raise error from None`."""
    try:
        try:
            raise cause
        except BaseException:
            if hidden:
                raise error from None
            raise error  # noqa: B904 - tests the context alone
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
    """Named as in httpx; it derives from no OSError."""


class JaxRuntimeError(RuntimeError):
    pass


def library_error(*names, **attributes):
    """The error of a library that may not be installed, with the names of its class and base
    classes, wrapped by `raise UserError from` as commands do."""
    kind = Exception
    for name in reversed(names):
        kind = type(name, (kind,), {})
    error = kind("x")
    vars(error).update(attributes)
    return raised_for(UserError("gs://bucket/run: x"), error)


def connector_error(number):
    """aiohttp's error, an OSError with the errno of its cause."""
    kind = type("ClientConnectorError", (type("ClientOSError", (OSError,), {}),), {})
    return raised_for(UserError("gs://bucket/run: x"), kind(number, "cannot connect"))


CAUSES = {
    "a field of the recipe": (UserError("train.steps: found -1"), WRONG_INPUT),
    "a value": (ValueError("mesh: found 9"), WRONG_INPUT),
    "a missing file": (system_error(errno.ENOENT, "x.json"), WRONG_INPUT),
    "a folder without write permission": (system_error(errno.EACCES, "runs"), WRONG_INPUT),
    "a read-only file system": (system_error(errno.EROFS, "runs"), WRONG_INPUT),
    "a limit on the size of files": (system_error(errno.EFBIG), WRONG_INPUT),
    "a reader that closed its pipe": (system_error(errno.EPIPE), WRONG_INPUT),
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
    "a bug of ours": (KeyError("x"), UNEXPECTED),
    "a bug of ours in JAX": (RuntimeError("INVALID_ARGUMENT: shapes"), UNEXPECTED),
    "a mount that fails": (system_error(errno.EIO, "runs/a"), TRY_AGAIN),
    "a mount that was replaced": (system_error(errno.ESTALE, "runs/a"), TRY_AGAIN),
    "a mount that does not answer": (system_error(errno.ETIMEDOUT, "runs/a"), TRY_AGAIN),
    "a full disk": (system_error(errno.ENOSPC, "runs/a"), TRY_AGAIN),
    "a quota": (system_error(errno.EDQUOT, "runs/a"), TRY_AGAIN),
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
    "a temporarily absent store": (ValueError("UNAVAILABLE: HTTP 503"), TRY_AGAIN),
    "a failed save": (
        raised_for(OSError("saving checkpoint 5 failed"), system_error(errno.EIO)),
        TRY_AGAIN,
    ),
    "our message about a mount": (
        raised_for(UserError("runs: cannot write there"), system_error(errno.ESTALE), hidden=True),
        TRY_AGAIN,
    ),
    "a connection that was refused": (
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        TRY_AGAIN,
    ),
    "a connection that was reset": (ConnectionResetError(), TRY_AGAIN),
    "a network that is down": (urllib.error.URLError(system_error(errno.ENETUNREACH)), TRY_AGAIN),
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
    "an invalid certificate": (
        library_error("ClientConnectorCertificateError", "ClientConnectorError"),
        WRONG_INPUT,
    ),
    "a connection that ends within TLS": (ssl.SSLEOFError(8, "EOF occurred"), TRY_AGAIN),
    "a certificate by ssl": (
        raised_for(ConnectionError("SSL"), ssl.SSLCertVerificationError(1, "self-signed")),
        WRONG_INPUT,
    ),
    "a truncated answer, by aiohttp": (library_error("ClientPayloadError"), TRY_AGAIN),
    "a truncated answer, by http.client": (http.client.IncompleteRead(b""), TRY_AGAIN),
    "a truncated answer, by requests": (
        library_error("ChunkedEncodingError", "RequestException"),
        TRY_AGAIN,
    ),
    "a truncated answer, by httpx": (
        library_error("RemoteProtocolError", "ProtocolError", "TransportError"),
        TRY_AGAIN,
    ),
    "an invalid address, by httpx": (
        library_error("UnsupportedProtocol", "TransportError"),
        WRONG_INPUT,
    ),
    "a truncated answer, by botocore": (
        library_error("ResponseStreamingError", "HTTPClientError"),
        TRY_AGAIN,
    ),
    "a checksum mismatch, by gcsfs": (library_error("ChecksumError"), TRY_AGAIN),
    "a busy store, by gcsfs": (library_error("HttpError", code="503"), TRY_AGAIN),
    "no access to the bucket, by gcsfs": (library_error("HttpError", code=403), WRONG_INPUT),
    "a busy store, by botocore": (
        library_error("ClientError", response={"ResponseMetadata": {"HTTPStatusCode": 503}}),
        TRY_AGAIN,
    ),
    "no access to the bucket, by botocore": (
        library_error("ClientError", response={"ResponseMetadata": {"HTTPStatusCode": 403}}),
        WRONG_INPUT,
    ),
    "a metadata server that does not answer": (library_error("TransportError"), TRY_AGAIN),
    "a temporarily unavailable token": (
        library_error("RefreshError", retryable=True),
        TRY_AGAIN,
    ),
    "a login that has expired": (library_error("RefreshError", retryable=False), WRONG_INPUT),
    "a lock server that restarts": (system_error(errno.ENOLCK, "runs/a"), TRY_AGAIN),
    "too many open files in the system": (system_error(errno.ENFILE, "runs/a"), TRY_AGAIN),
    "too many open files in the process": (system_error(errno.EMFILE, "runs/a"), WRONG_INPUT),
    "a call that its peer cancelled": (ValueError("CANCELLED: peer"), TRY_AGAIN),
    "our own transient error": (TransientError("process 0 was not reached"), TRY_AGAIN),
    "Ctrl-C": (KeyboardInterrupt(), 130),
    "Ctrl-C in a library": (
        raised_for(ImportError("initialization failed"), KeyboardInterrupt()),
        130,
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_has_its_exit_code(cause):
    error, code = CAUSES[cause]
    result = outcome_of(error)
    assert result.code == code
    assert (result.message is None) == (code == UNEXPECTED) and "\n" not in (result.message or "")


def test_a_limit_on_the_size_of_files_is_named_once():
    """In TensorStore's words, as a failed save reports it, and in our own."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        words = "saving checkpoint 4 failed: OUT_OF_RANGE: Failed to write 9 bytes: File too large"
        message = outcome_of(OSError(f"{words} [os_error_code='27']")).message
        assert message.endswith(
            "; files may have 5,000 bytes; a higher limit, such as ulimit -f unlimited, would work"
        )
        assert outcome_of(UserError(message)).message == message
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert outcome_of(system_error(errno.EFBIG)).message.endswith(
        "File too large; a file system for larger files would work"
    )


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
def test_a_users_own_words_do_not_make_an_error_transient(words):
    assert not is_transient(ValueError(words)) and not is_transient(UserError(words))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UserError("x: not here"), UserError),
        (system_error(errno.EIO, "x"), TransientError),
        (KeyError("x"), TransientError),
        (TransientError("gone"), TransientError),
        (system_error(errno.ENOENT, "x"), UserError),
    ],
)
def test_an_error_in_another_process_keeps_its_code_or_is_transient(error, kind):
    import json

    assert type(decoded_error(json.loads(encoded_error(error)))) is kind


def test_another_processs_message_is_made_printable():
    assert str(decoded_error({"code": 2, "message": "\x1b[2Jx"})) == "\ufffd[2Jx"


def test_a_folder_locked_by_another_process_is_a_transient_error(tmp_path):
    with (
        exclusive(tmp_path / "lock", "prepares"),
        pytest.raises(TransientError),
        exclusive(tmp_path / "lock", "prepares"),
    ):
        pass


def test_a_full_disk_while_a_folder_is_built_is_a_transient_error(tmp_path):
    with (
        pytest.raises(TransientError, match="No space left on device while x"),
        building(tmp_path / "x", lambda _: False),
    ):
        raise system_error(errno.ENOSPC)


def test_a_failed_download_is_a_transient_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(TransientError, match="after 1 attempts"):
        download_file(f"http://127.0.0.1:{port}/x", tmp_path / "x", attempts=1)


def test_a_cycle_of_causes_is_reported():
    """A library makes one when it raises an error again from an error that this one caused."""
    first, second = ValueError("first"), RuntimeError("second")
    first.__context__, second.__cause__ = second, first
    assert outcome_of(first) == (WRONG_INPUT, "first")
    assert outcome_of(second).code == UNEXPECTED
