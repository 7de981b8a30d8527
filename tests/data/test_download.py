"""Downloads from a server on this machine: resumed, started again where they cannot be, and refused
with a reason."""

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


def fetched(server, tmp_path, **options):
    """Downloads to tmp_path/file and returns its bytes."""
    download_file(f"{server.address}/file", tmp_path / "file", first_wait=0.01, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing else stays"
    return (tmp_path / "file").read_bytes()


def test_a_file_arrives_with_its_progress(server, tmp_path):
    seen = []
    assert fetched(server, tmp_path, on_progress=lambda *done: seen.append(done)) == CONTENT
    assert (
        seen[0] == (0, len(CONTENT))
        and seen[-1] == (len(CONTENT), len(CONTENT))
        and server.ranges == [None]
    )


def test_it_goes_on_where_the_connection_broke(server, tmp_path):
    server.breaks = [1_000_000, 500_000]
    failures = []
    assert fetched(server, tmp_path, on_failure=failures.append) == CONTENT
    assert server.ranges == [None, "bytes=1000000-", "bytes=1500000-"]
    assert (
        failures[0]
        == "the connection ended after 1,000,000 of 3,000,000 bytes; the next attempt is in 0.01 s"
    )


def test_a_later_call_goes_on(server, tmp_path):
    server.breaks = [1_000_000] + [0] * 3
    with pytest.raises(
        UserError, match="after 3 attempts without progress; 1,000,000 bytes are kept"
    ):
        fetched(server, tmp_path, attempts=3)
    server.breaks.clear()
    assert fetched(server, tmp_path) == CONTENT and server.ranges[-1] == "bytes=1000000-"


def test_all_had_arrived_when_it_was_interrupted(server, tmp_path):
    (tmp_path / "file.part").write_bytes(CONTENT)
    (tmp_path / "file.part.json").write_text('{"version": "\\"1\\""}')
    assert fetched(server, tmp_path) == CONTENT and server.ranges == [f"bytes={len(CONTENT)}-"]


@pytest.mark.parametrize("change", ["has_ranges", "has_length", "etag"])
def test_a_server_that_cannot_resume_sends_it_all_again(server, tmp_path, change):
    """Without a version nothing tells whether the rest belongs to the beginning."""
    setattr(server, change, None if change == "etag" else False)
    if change == "has_length":
        server.has_ranges = False
    else:
        server.breaks = [1_000_000]
    (tmp_path / "file.part").write_bytes(b"old")
    assert fetched(server, tmp_path) == CONTENT


@pytest.mark.parametrize("longer", [False, True])
def test_a_file_that_has_changed_is_not_mixed_with_the_old_one(server, tmp_path, longer):
    (tmp_path / "file.part").write_bytes(b"x" * (4_000_000 if longer else 1_000_000))
    (tmp_path / "file.part.json").write_text('{"version": "\\"0\\""}')
    assert fetched(server, tmp_path) == CONTENT


def test_a_part_that_is_too_long_is_dropped(server, tmp_path):
    (tmp_path / "file.part").write_bytes(CONTENT + b"x")
    (tmp_path / "file.part.json").write_text('{"version": "\\"1\\""}')
    assert fetched(server, tmp_path) == CONTENT and server.ranges == [
        f"bytes={len(CONTENT) + 1}-",
        None,
    ]


def test_a_busy_server_is_asked_again(server, tmp_path):
    server.statuses = [503, 429, 500]
    assert fetched(server, tmp_path) == CONTENT and len(server.requests) == 4


@pytest.mark.parametrize("told", ["many", "9" * 5000, "\xb2", "-1"])
def test_a_size_that_is_no_number_is_unknown(server, tmp_path, told):
    server.told = told
    seen = []
    assert fetched(server, tmp_path, on_progress=lambda *done: seen.append(done)) == CONTENT
    assert seen[-1] == (len(CONTENT), None)


def test_a_rest_without_end_is_not_written(server, tmp_path):
    """A server that sends more than it told would fill the disk."""
    (tmp_path / "file.part").write_bytes(CONTENT[:100])
    (tmp_path / "file.part.json").write_text('{"version": "\\"1\\""}')
    server.told = "2000"
    with pytest.raises(UserError, match="file: the server sends more than the 2,000 bytes of the"):
        fetched(server, tmp_path)
    assert (tmp_path / "file.part").stat().st_size <= 2000 and not (tmp_path / "file").exists()


@pytest.mark.parametrize("status", [404, 403])
def test_what_the_server_refuses_is_said_at_once(server, tmp_path, status):
    server.statuses = [status]
    with pytest.raises(UserError, match=f"{server.address}/file: the server answered {status} "):
        fetched(server, tmp_path)
    assert len(server.requests) == 1 and not list(tmp_path.iterdir())


def test_nobody_answers(tmp_path):
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
def test_no_address(tmp_path, address):
    with pytest.raises(UserError, match=rf"{address}: is not an? "):
        download_file(address, tmp_path / "file")
