"""SIGTERM and Ctrl-C end a command at once, wherever it is, before there is anything to save."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

# Runs for minutes without returning to Python's signal handlers, like a compilation.
BUSY = """
import hashlib, os, signal, sys
from data.signals import end_at_once
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the default in a terminal, even if tests run under nohup
end_at_once()
if sys.argv[1] == "fork":
    child = os.fork()
    if child:
        os.kill(child, 15)
        print(os.waitpid(child, 0)[1], flush=True)
    else:
        while True: pass
print("busy", os.getpid(), flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


def busy(repository, how="", *before):
    return subprocess.Popen(
        [*before, sys.executable, "-c", BUSY, how],
        cwd=repository,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGTERM, 143, "stopped (SIGTERM); rerun the same command to start again\n"),
        (signal.SIGHUP, 143, "stopped (SIGHUP); rerun the same command to start again\n"),
        (signal.SIGUSR1, 143, "stopped (SIGUSR1); rerun the same command to start again\n"),
        (signal.SIGINT, 130, "stopped\n"),
    ],
)
def test_a_signal_ends_a_command_during_a_long_call(repository, number, code, line):
    process = busy(repository)
    assert process.stdout.readline().startswith("busy")
    time.sleep(0.5)  # until the call has started
    start = time.monotonic()
    process.send_signal(number)
    try:
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, errors) == (code, line) and time.monotonic() - start < 5


def test_printing_to_a_closed_terminal_does_not_end_a_command(repository):
    """The terminal closes while the command writes; it ignores SIGHUP, as under nohup."""
    code = """
import signal, sys, time
from data.printable import printable_output
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with printable_output():
    print("ready", flush=True)
    time.sleep(0.5)
    print("nobody reads this", flush=True)
    print("nor this", file=sys.stderr, flush=True)
sys.exit(7)
"""
    master, slave = os.openpty()
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(
        command, cwd=repository, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    assert os.read(master, 100).startswith(b"ready")
    os.close(master)
    assert process.wait(timeout=30) == 7


def test_sigterm_ends_a_command_that_is_pid_1(repository):
    """As in a container: without a handler the system ignores SIGTERM for PID 1."""
    if (
        os.geteuid() != 0
        or shutil.which("unshare") is None
        or subprocess.run(
            ["unshare", "--pid", "--fork", "true"], check=False, capture_output=True
        ).returncode
    ):
        pytest.skip("needs root, for a PID namespace")
    process = busy(repository, "", "unshare", "--pid", "--fork", "--kill-child")
    assert process.stdout.readline() == "busy 1\n"
    [child] = subprocess.run(
        ["pgrep", "-P", str(process.pid)], check=True, capture_output=True, text=True
    ).stdout.split()
    os.kill(int(child), signal.SIGTERM)
    assert (
        process.communicate(timeout=30)[1]
        == "stopped (SIGTERM); rerun the same command to start again\n"
    )
    assert process.returncode == 143


CLOSED = """
import os, sys, time
from data.signals import end_at_once
end_at_once()
os.write(2, bytes([15, 10, 1]))  # as signals SIGTERM, SIGUSR1 and SIGHUP
time.sleep(0.2)
print("nobody reads this", file=sys.stderr, flush=True)
sys.stdout.flush()
sys.exit(7 if sys.stdin.read() == "" and not sys.stdin.isatty() else 1)
"""


def test_what_is_written_to_closed_streams_is_no_signal(repository):
    command = f"{shlex.join([sys.executable, '-c', CLOSED])} <&- >&- 2>&-"
    assert (
        subprocess.run(command, shell=True, cwd=repository, timeout=60, check=False).returncode == 7
    )


def test_a_childs_sigterm_does_not_end_its_parent(repository):
    process = busy(repository, "fork")
    assert process.stdout.readline() == f"{int(signal.SIGTERM)}\n"
    assert process.stdout.readline().startswith("busy")
    time.sleep(0.3)
    assert process.poll() is None
    process.kill()
    process.communicate()


@pytest.mark.parametrize("command", [["-m", "scripts.inspect_data"], ["-m", "eval.line_retrieval"]])
def test_a_command_ends_during_its_imports(command, tmp_path, repository):
    (tmp_path / "numpy.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, *command],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (
        143,
        "stopped (SIGTERM); rerun the same command to start again\n",
    )
