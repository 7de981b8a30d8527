"""Processes meet before JAX starts: a missing process, an address in use and a wrong process number
are one-line errors within the time limit."""

import contextlib
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from data.errors import TransientError, UserError
from scripts.launch_local import free_port
from trainer.run import rendezvous
from trainer.run.cluster import DETECTED
from trainer.run.rendezvous import bind_address, meet


def meet_concurrently(calls, seconds=5):
    """Calls `meet` for several processes concurrently; returns the error of each, or None."""

    def call(arguments):
        try:
            meet(*arguments, seconds=seconds)
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, calls))


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"


def test_all_processes_meet_and_the_port_is_free_again(address):
    for _ in range(2):
        assert meet_concurrently([(address, number, 4) for number in range(4)]) == [None] * 4
    with socket.create_server(("", int(address.split(":")[1]))):
        pass


def test_process_0_may_come_last(address):
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meet, address, 1, 2, 5)
        time.sleep(0.5)
        meet(address, 0, 2, 5)
        assert other.result() is None


def test_a_missing_process_is_named_to_all(address):
    errors = meet_concurrently([(address, number, 5) for number in (0, 1, 3)], seconds=1)
    assert len(set(errors)) == 1 and errors[0].startswith(
        f"processes 2, 4 of 5 did not reach process 0 at {address} within 1 s; start all"
    )


def test_a_missing_process_0_is_named(address):
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        meet(address, 1, 2, 1)
    assert time.monotonic() - start < 3 and str(caught.value).startswith(
        "process 1: process 0 could not be reached at distributed.coordinator "
        f"{address} within 1 s (Connection refused); start it"
    )


def test_a_port_in_use_is_reported_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(
            UserError,
            match=rf"process 0: cannot listen at distributed.coordinator {address} \(Address al",
        ):
            meet(address, 0, 2)


def test_an_unknown_host_is_named():
    with pytest.raises(
        UserError,
        match=r"could not be reached at distributed.coordinator nowhere\.invalid:1234 within 1 s \(",
    ):
        meet("nowhere.invalid:1234", 1, 2, 1)


@pytest.mark.parametrize("address", ["127.0.0.1:", "127.0.0.1:x", "127.0.0.1:0", "127.0.0.1:99999"])
def test_an_address_without_a_port_is_refused(address):
    with pytest.raises(UserError, match="needs HOST:PORT of process 0"):
        meet(address, 0, 2)


def test_a_wrong_count_and_a_duplicate_number_are_reported_to_all(address):
    errors = meet_concurrently([(address, 0, 2), (address, 1, 3)])
    assert set(errors) == {
        "process 1 was started with distributed.num_processes 3, process 0 with 2"
    }
    errors = meet_concurrently([(address, 0, 3), (address, 1, 3), (address, 1, 3)])
    assert set(errors) == {
        f"two processes at {address} have distributed.process_id 1; each needs a unique number"
    }


def test_a_duplicate_number_in_a_detected_cluster_is_worth_a_restart(address):
    """A host that was replaced meanwhile has left without a word."""
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, address, 0, 3, 20, words=DETECTED)
        with connect(address) as silent:
            silent.sendall(b'{"run":"","process":1,"of":3}\n')
            with pytest.raises(TransientError, match=r"two .* have process_id 1; each"):
                meet(address, 1, 3, 20, words=DETECTED)
        with pytest.raises(TransientError, match="two processes"):
            first.result()


def test_a_stranger_at_the_port_is_ignored(address):
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, address, 0, 2, 20)
        time.sleep(0.3)
        for words in (b"GET / HTTP/1.1\n", b"[]\n", b""):
            with socket.create_connection(("127.0.0.1", int(address.split(":")[1]))) as stranger:
                stranger.sendall(words)
        meet(address, 1, 2, 20)
        assert first.result() is None


JOIN = """
import sys
from trainer import entry
from trainer.config.schema import DistributedConfig
from trainer.run import cluster

cluster.JOIN_SECONDS = 2
config = DistributedConfig(coordinator=sys.argv[1], process_id=0, num_processes=2)
sys.exit(entry.run(lambda: cluster.join(config, simulated=True, run="run")))
"""


def test_losing_a_process_after_the_meeting_is_a_one_line_error(address, repository):
    """JAX would wait for it for 300 seconds and then abort."""
    process = subprocess.Popen(
        [sys.executable, "-c", JOIN, address], cwd=repository, stderr=subprocess.PIPE, text=True
    )
    meet(address, 1, 2, 60, "run")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75 and stderr.startswith(
        "error: process 0: not all 2 processes joined within 2 s, although all had reached "
        f"{address}; one was lost"
    ), stderr


STRAYS = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "bytes": b"\x00\xff" * 6000,
    "nested": b"[" * 9990 + b"\n",
    "nothing": b"",
    "a process's line without a run": b'{"process":1,"of":2}\n',
    "a line longer than any process's": b'{"run":"' + b"x" * 6000 + b'","process":1,"of":2}\n',
    "a list as a run": b'{"run":[],"process":1,"of":2}\n',
    "a list as a number": b'{"run":"","process":[1],"of":2}\n',
    "a number out of range": b'{"run":"","process":77,"of":2}\n',
    "a boolean": b'{"run":"","process":true,"of":2}\n',
    "a fraction": b'{"run":"","process":1.0,"of":2}\n',
    "zero": b'{"run":"","process":0,"of":2}\n',
    "a negative number": b'{"run":"","process":-1,"of":2}\n',
    "escape sequences": b'{"run":"","process":"\\u001b[31mx\\u001b]0;t\\u0007","of":9}\n',
    "a huge number": b'{"run":"","process":' + b"9" * 6000 + b',"of":2}\n',
}


@pytest.mark.parametrize("stray", STRAYS)
def test_a_stray_line_changes_nothing(address, stray, capfd):
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, address, 0, 2, 20)
        strangers = [connect(address) for _ in range(20)]
        for stranger in strangers:
            stranger.sendall(STRAYS[stray])
        meet(address, 1, 2, 20)
        assert first.result() is None and capfd.readouterr().err == ""
        for stranger in strangers:
            stranger.close()


def connect(address):
    patience = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", int(address.split(":")[1])), timeout=10)
        except ConnectionRefusedError:
            assert time.monotonic() < patience
            time.sleep(0.02)


def test_ten_thousand_random_lines_and_connections(address):
    """By a fixed seed: whole lines, halves, and connections that stay open without sending
    anything."""
    random, kept = np.random.default_rng(0), []
    words = [
        b'{"process":',
        b'"run":"",',
        b'"of":',
        b"1",
        b"2",
        b"null",
        b"}",
        b"{",
        b"[",
        b"]",
        b",",
        b'"',
        b"\\u0000",
        b"\xff",
        b"1e999",
    ]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, address, 0, 3, 100)
        for number in range(10_000):
            stranger = connect(address)
            parts = random.integers(len(words), size=random.integers(12))
            stranger.sendall(
                b"".join(words[part] for part in parts) + b"\n" * int(random.integers(2))
            )
            if number % 100 == 0:
                kept.append(stranger)
            else:
                stranger.close()
        meetings = [pool.submit(meet, address, 1, 3, 30)]
        meet(address, 2, 3, 30)
        assert [future.result() for future in (first, *meetings)] == [None, None]
    for stranger in kept:
        stranger.close()


def test_one_byte_at_a_time_does_not_move_the_deadline(address):
    with ThreadPoolExecutor(1) as pool:
        start, first = time.monotonic(), pool.submit(meet, address, 0, 2, 1.5)
        with connect(address) as stranger:
            while not first.done():
                with contextlib.suppress(OSError):
                    stranger.sendall(b"x")
                time.sleep(0.1)
        with pytest.raises(TransientError, match="process 1 of 2 did not reach"):
            first.result()
        assert time.monotonic() - start < 4


def test_a_process_of_another_run_is_told_so_and_takes_no_place(address, capfd):
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, address, 0, 2, 20, "here")
        for _ in range(2):
            with pytest.raises(TransientError) as caught:
                meet(address, 1, 3, 20, "\x1b[2J\nthere" + "\uffff" * 200)
        meet(address, 1, 2, 20, "here")
        assert first.result() is None
    said = str(caught.value)
    assert said.startswith(f"process 0 at {address} trains the run here, and a process of the run ")
    assert "\ufffd[2J there" in said and len(said.splitlines()) == 1 and len(said) < 400
    assert capfd.readouterr().err == f"warning: {said}\n"  # once


FEW_FILES = """
import resource
import sys
from trainer.run.rendezvous import meet

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
meet(sys.argv[1], 0, 2, 30)
"""


def test_strangers_that_exhaust_file_handles_do_not_prevent_the_meeting(address, repository):
    process = subprocess.Popen([sys.executable, "-c", FEW_FILES, address], cwd=repository)
    strangers = [connect(address) for _ in range(100)]
    meet(address, 1, 2, 30)
    assert process.wait(30) == 0
    for stranger in strangers:
        stranger.close()


def test_a_restarted_process_takes_its_own_place(address):
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, address, 0, 3, 20)
        with connect(address) as lost:
            lost.sendall(b'{"run":"","process":1,"of":3}\n')
            time.sleep(0.3)
        other = pool.submit(meet, address, 1, 3, 20)
        meet(address, 2, 3, 20)
        assert [first.result(), other.result()] == [None, None]


def test_only_the_coordinators_own_address_listens(address):
    """Not 127.0.0.2, which stands for another interface of this machine."""
    port = int(address.split(":")[1])
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, address, 0, 2, 20)
        connect(address).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)
        meet(address, 1, 2, 20)
        first.result()


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "127.0.0.2"])
def test_process_0_listens_where_it_is_told(address, host):
    """JAX_COORDINATOR_BIND_ADDRESS: all interfaces, or another one than the address names."""
    port = int(address.split(":")[1])
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, address, 0, 2, 20, listen=f"{host}:{port}")
        meet(f"127.0.0.2:{port}", 1, 2, 20)
        first.result()


@pytest.mark.parametrize(
    ("coordinator", "bound"),
    [
        ("127.0.0.1:1234", "127.0.0.1:1234"),
        ("nowhere.invalid:1234", "[::]:1234"),
        ("[::1]:1234", "[::1]:1234"),
    ],
)
def test_jax_binds_the_same_interface(coordinator, bound):
    assert bind_address(coordinator) == bound


def test_while_processes_gather_the_first_one_names_those_absent(address, monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "REPORT_SECONDS", 0.2)
    meet_concurrently([(address, number, 4) for number in (0, 2)], seconds=1.5)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) >= 2 and all(line.startswith("process 0: processes 1, ") for line in lines)
    # The first report may be printed before process 2 arrives.
    assert lines[-1].startswith("process 0: processes 1, 3 of 4 missing; waiting for up to")


@pytest.mark.parametrize(
    "answer",
    ["[" * 4000, "go away", "[2]", '{"challenge":1}', "\x1b[2J", '[Infinity, "x"]', "[1e999, 2]"],
)
def test_another_programs_answer_is_one_printable_line(answer):
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def serve():
            connection, _ = server.accept()
            connection.sendall(f"{answer}\n".encode())
            connection.close()

        pool.submit(serve)
        with pytest.raises(UserError) as caught:
            meet(f"127.0.0.1:{server.getsockname()[1]}", 1, 2, 5)
        assert "\x1b" not in str(caught.value)
        assert "another program, or another version of this one, answers" in str(caught.value)


def test_a_detected_address_may_be_that_of_another_step_which_ends():
    """The port of a step of Slurm is computed from its job's number."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def serve():
            connection, _ = server.accept()
            connection.sendall(b"\x00\x00\x18\x04 HTTP/2\n")
            connection.close()

        pool.submit(serve)
        with pytest.raises(
            TransientError, match=r"the detected address: another .*; JAX_COORDINATOR_PORT sets"
        ):
            meet(f"127.0.0.1:{server.getsockname()[1]}", 1, 2, 5, words=DETECTED)
