"""Processes meet before JAX starts: who is missing, an address in use and a wrong number are one line, within the limit."""

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from data.errors import UserError
from scripts.launch_local import free_port
from trainer.run.rendezvous import meet


def together(calls, seconds=5):
    """Calls `meet` for several processes at once; returns the error of each, or None."""
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


def test_all_go_on_and_the_port_is_free(address):
    for _ in range(2):
        assert together([(address, number, 4) for number in range(4)]) == [None] * 4
    with socket.create_server(("", int(address.split(":")[1]))):
        pass


def test_process_0_may_come_last(address):
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meet, address, 1, 2, 5)
        time.sleep(0.5)
        meet(address, 0, 2, 5)
        assert other.result() is None


def test_who_does_not_come_is_named_to_all(address):
    errors = together([(address, number, 5) for number in (0, 1, 3)], seconds=1)
    assert len(set(errors)) == 1 and errors[0].startswith(
        f"processes 2, 4 of 5 did not come to process 0 at {address} within 1 s; start all")


def test_a_missing_process_0_is_named(address):
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        meet(address, 1, 2, 1)
    assert time.monotonic() - start < 3 and str(caught.value).startswith(
        f"process 1: process 0 was not reached at distributed.coordinator {address} within 1 s (Connection refused); start it")


def test_a_port_in_use_is_known_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"process 0: cannot listen at distributed.coordinator {address} \(Address al"):
            meet(address, 0, 2)


def test_a_name_that_is_no_host_is_named():
    with pytest.raises(UserError, match=r"not reached at distributed.coordinator nowhere\.invalid:1234 within 1 s \("):
        meet("nowhere.invalid:1234", 1, 2, 1)


@pytest.mark.parametrize("address", ["127.0.0.1:", "127.0.0.1:x", "127.0.0.1:0", "127.0.0.1:99999"])
def test_an_address_without_a_port_is_refused(address):
    with pytest.raises(UserError, match="needs HOST:PORT of process 0"):
        meet(address, 0, 2)


def test_a_wrong_count_and_a_number_given_twice_are_told_to_all(address):
    errors = together([(address, 0, 2), (address, 1, 3)])
    assert set(errors) == {"process 1 was started with distributed.num_processes 3, process 0 with 2"}
    errors = together([(address, 0, 3), (address, 1, 3), (address, 1, 3)])
    assert set(errors) == {f"two processes at {address} have distributed.process_id 1; each needs a number of its own"}


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
sys.exit(entry.run(lambda: cluster.join(config, simulated=True)))
"""


def test_a_process_that_is_lost_after_the_meeting_is_told_in_one_line(address, repository):
    """JAX would wait for it for 300 seconds, and then abort."""
    process = subprocess.Popen([sys.executable, "-c", JOIN, address], cwd=repository, stderr=subprocess.PIPE, text=True)
    meet(address, 1, 2, 60)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75 and said.startswith(
        f"error: process 0: not all 2 processes joined within 2 s, though all had come to {address}; one was lost"), said
