"""Tests of trainer/run/preemption.py where a process would not outlive them."""

import signal
import subprocess
import sys

PROGRAM = """
import hashlib, os, threading
from trainer.run.preemption import notices

with notices() as last:
    os.kill(os.getpid(), 2)
    assert last(1).name == "SIGINT"
    threading.Timer(0.2, os.kill, (os.getpid(), 2)).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes in which no handler of Python's runs, as in a step
"""


def test_a_second_ctrl_c_ends_at_once_while_a_step_is_computed(repository):
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=repository, capture_output=True, text=True, timeout=60,
                          check=False)
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == "Ctrl-C: the running step is finished and saved; Ctrl-C again ends at once\n"
