"""Downloads from a local server: resumed, restarted if they cannot be resumed, and refused with a
reason."""

import socket

import numpy as np
import pytest

from data.download import download_file
from data.errors import UserError

from .loopback import serving

CONTENT = np.random.default_rng(0).bytes(3_000_000)


@pytest.fixture
def server():
    with serving(CONTENT) as running:
        yield running


def download(server, tmp_path, **options):
    """Downloads to tmp_path/file and returns its bytes."""
    download_file(f"{server.address}/file", tmp_path / "file", first_wait=0.01, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "something else is left"
    return (tmp_path / "file").read_bytes()


def test_a_download_reports_its_progress(server, tmp_path):
    seen = []
    assert download(server, tmp_path, on_progress=lambda *done: seen.append(done)) == CONTENT
    assert (
        seen[0] == (0, len(CONTENT))
        and seen[-1] == (len(CONTENT), len(CONTENT))
        and server.ranges == [None]
    )


def test_a_broken_connection_is_resumed(server, tmp_path):
    server.breaks = [1_000_000, 500_000]
    failures = []
    assert download(server, tmp_path, on_failure=failures.append) == CONTENT
    assert server.ranges == [None, "bytes=1000000-", "bytes=1500000-"]
    assert (
        failures[0]
        == "the connection ended after 1,000,000 of 3,000,000 bytes; the next attempt is in 0.01 s"
    )


def test_a_later_call_resumes(server, tmp_path):
    server.breaks = [1_000_000] + [0] * 3
    with pytest.raises(
        UserError, match="after 3 attempts without progress; 1,000,000 bytes are kept"
    ):
        download(server, tmp_path, attempts=3)
    server.breaks.clear()
    assert download(server, tmp_path) == CONTENT and server.ranges[-1] == "bytes=1000000-"


def test_a_complete_part_is_not_downloaded_again(server, tmp_path):
    (tmp_path / "file.part").write_bytes(CONTENT)
    (tmp_path / "file.part.json").write_text('{"version": "\\"1\\""}')
    assert download(server, tmp_path) == CONTENT and server.ranges == [f"bytes={len(CONTENT)}-"]


@pytest.mark.parametrize("change", ["has_ranges", "has_length", "etag"])
def test_a_server_that_cannot_resume_sends_everything_again(server, tmp_path, change):
    """Without a version, the rest cannot be matched to the beginning."""
    setattr(server, change, None if change == "etag" else False)
    if change == "has_length":
        server.has_ranges = False
    else:
        server.breaks = [1_000_000]
    (tmp_path / "file.part").write_bytes(b"old")
    assert download(server, tmp_path) == CONTENT


@pytest.mark.parametrize("longer", [False, True])
def test_a_changed_file_is_not_mixed_with_the_old_one(server, tmp_path, longer):
    (tmp_path / "file.part").write_bytes(b"x" * (4_000_000 if longer else 1_000_000))
    (tmp_path / "file.part.json").write_text('{"version": "\\"0\\""}')
    assert download(server, tmp_path) == CONTENT


def test_a_part_longer_than_the_file_is_discarded(server, tmp_path):
    (tmp_path / "file.part").write_bytes(CONTENT + b"x")
    (tmp_path / "file.part.json").write_text('{"version": "\\"1\\""}')
    assert download(server, tmp_path) == CONTENT and server.ranges == [
        f"bytes={len(CONTENT) + 1}-",
        None,
    ]


def test_a_busy_server_is_retried(server, tmp_path):
    server.statuses = [503, 429, 500]
    assert download(server, tmp_path) == CONTENT and len(server.requests) == 4


@pytest.mark.parametrize("size", ["many", "9" * 5000, "\xb2", "-1"])
def test_an_invalid_size_is_treated_as_unknown(server, tmp_path, size):
    server.claimed_size = size
    seen = []
    assert download(server, tmp_path, on_progress=lambda *done: seen.append(done)) == CONTENT
    assert seen[-1] == (len(CONTENT), None)


def test_an_endless_response_is_not_written(server, tmp_path):
    """A server that sends more than it announced would fill the disk."""
    (tmp_path / "file.part").write_bytes(CONTENT[:100])
    (tmp_path / "file.part.json").write_text('{"version": "\\"1\\""}')
    server.claimed_size = "2000"
    with pytest.raises(UserError, match="file: the server sends more than the 2,000 bytes of the"):
        download(server, tmp_path)
    assert (tmp_path / "file.part").stat().st_size <= 2000 and not (tmp_path / "file").exists()


@pytest.mark.parametrize("status", [404, 403])
def test_a_servers_refusal_is_reported_without_a_retry(server, tmp_path, status):
    server.statuses = [status]
    with pytest.raises(UserError, match=f"{server.address}/file: the server answered {status} "):
        download(server, tmp_path)
    assert len(server.requests) == 1 and not list(tmp_path.iterdir())


def test_a_refused_connection_is_named(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/file"
        with pytest.raises(
            UserError, match=f"{address}: the connection failed .*refused.*after 2 attempts"
        ):
            download_file(address, tmp_path / "file", attempts=2, first_wait=0.01)


@pytest.mark.parametrize(
    "address", ["file:///etc/passwd", "dl.fbaipublicfiles.com/x", "http://a b/c"]
)
def test_an_invalid_address_is_refused(tmp_path, address):
    with pytest.raises(UserError, match=rf"{address}: is not an? "):
        download_file(address, tmp_path / "file")
