"""Tests of trainer/run/lock.py: one holder, named in messages; kill -9 frees the lock; another
host's lock is waited for; without file locks training continues."""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from data.errors import UserError
from trainer.run import lock as run_lock

HOLD = """
import pathlib, sys, time
from trainer.run.lock import held

with held(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def holder(tmp_path, repository):
    """A process that holds tmp_path/lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")], cwd=repository, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_start_is_refused_in_one_line_until_the_first_is_killed(holder, tmp_path):
    lock = tmp_path / "lock"
    expected = (
        re.escape(
            f"{tmp_path}: process {holder.pid} on {socket.gethostname()} is training there since "
        )
        + r"\d{4}-"
    )
    for _ in range(2):  # a refused start takes nothing away from the holder
        with pytest.raises(UserError, match=expected):
            run_lock.require_free(lock)
        with pytest.raises(UserError, match=expected), run_lock.held(lock):
            pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    run_lock.require_free(lock)
    with run_lock.held(lock):
        assert (
            f"process {os.getpid()} on" in lock.read_text()
            and str(holder.pid) not in lock.read_text()
        )
        with pytest.raises(UserError):
            run_lock.require_free(lock)
    run_lock.require_free(lock)


def test_another_hosts_lock_is_waited_for_and_then_the_remedy_is_printed(
    holder, tmp_path, monkeypatch, capsys
):
    lock = tmp_path / "lock"
    monkeypatch.setattr(run_lock.socket, "gethostname", lambda: "elsewhere")
    monkeypatch.setattr(run_lock, "LEASE_SECONDS", 0)
    with pytest.raises(
        UserError, match=rf"process {holder.pid} on .*delete {re.escape(str(lock))}"
    ):
        run_lock.require_free(lock)
    monkeypatch.setattr(run_lock, "LEASE_SECONDS", 60)
    monkeypatch.setattr(run_lock.time, "sleep", lambda _: (holder.kill(), holder.wait()))
    run_lock.require_free(lock)
    assert capsys.readouterr().err.count("waiting for its end") == 2


def test_training_works_on_a_file_system_without_locks_and_says_so(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "lock").write_text("process 7 on a is training there since May")
    for _ in range(2):
        with run_lock.held(tmp_path / "lock"):
            run_lock.require_free(tmp_path / "lock")
    assert capsys.readouterr().err == (
        f"warning: {tmp_path}: has no file locks (Function not implemented), so a second start "
        "there is not refused; its lock file says: process 7 on a is training there since May\n"
    )
