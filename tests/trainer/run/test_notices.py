"""Tests of trainer/run/notices.py that need a process of their own."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from trainer.run.notices import notices
from trainer.run.preemption import Preempted

PROGRAM = """
import hashlib, os, threading
from trainer.run.notices import notices

with notices() as last:
    os.kill(os.getpid(), 2)
    assert last().name == "SIGINT"
    threading.Timer(0.2, os.kill, (os.getpid(), 2)).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes in which no handler of Python's runs, as in a step
"""

# A process of a cluster gets a signal while it restores or compiles; the run that it resumes has
# finished 500 steps.
BEFORE_THE_FIRST_STEP = """
import os, signal, socket, time
import jax
from trainer.run.notices import notices

with socket.create_server(("localhost", 0)) as server:
    address = f"localhost:{server.getsockname()[1]}"
jax.distributed.initialize(address, num_processes=1, process_id=0, cluster_detection_method="deactivate")
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(3)  # until JAX's preemption service has agreed on a step
with notices() as asked_to_end:
    print([asked_to_end() for step in range(501, 504)])
"""

WITHOUT_TIME = """
import hashlib, os
from trainer.run.notices import notices

with notices(lambda: "no time"):
    os.kill(os.getpid(), 15)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # as above
"""

# One of two processes gets SIGTERM; process 0 says that there is no time to finish the step.
TWO_WITHOUT_TIME = """
import os, signal, sys, time
import jax
from trainer.run import cluster
from trainer.run.notices import notices

number = int(sys.argv[2])
cluster._initialize(
    coordinator_address=sys.argv[1], num_processes=2, process_id=number, cluster_detection_method="deactivate"
)
with notices(lambda: f"no time, says {number}"):
    if number == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("sent", "how", "code"),
    [
        ((signal.SIGUSR1,), "preempted (SIGUSR1)", 143),
        ((signal.SIGTERM, signal.SIGINT), "preempted (SIGTERM)", 143),
        ((signal.SIGINT, signal.SIGTERM), "stopped (Ctrl-C)", 130),
    ],
)
def test_the_first_signal_says_how_the_run_ends(tmp_path, sent, how, code):
    """Python calls the handlers of signals that wait for it in the order of their numbers."""
    with notices() as get_notice:
        for number in sent:
            threading.Timer(0.1 + 0.2 * sent.index(number), os.kill, (os.getpid(), number)).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)  # over half a second, as above
        ended = Preempted(get_notice(), tmp_path)
    assert str(ended).startswith(how) and ended.exit_code == code


def test_a_step_is_not_finished_without_time_for_it(repository):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TIME],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "no time\n")


def test_process_0_decides_for_all_whether_there_is_time(repository):
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_WITHOUT_TIME, address, str(number)],
            cwd=repository,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=50)[1] for process in processes]
    assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * 2, outputs
    assert all("no time, says 0\n" in text for text in outputs), outputs


def test_one_of_several_processes_notified_before_its_first_step_ends_after_that_step(repository):
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_THE_FIRST_STEP],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.stdout == f"{[signal.SIGTERM, None, None]}\n", done.stderr


def test_a_second_ctrl_c_during_a_step_ends_at_once(repository):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 128 + signal.SIGINT
    assert (
        done.stderr == "Ctrl-C: finishing and saving the running step; Ctrl-C again ends at once\n"
    )
