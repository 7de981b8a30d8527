"""Faults inside one process of a run, from its interpreter's first line; for tests.soak.faults.

A sitecustomize.py that calls `begin` is first on the path of all processes. The process whose
number is the name of a file in $INJECTED removes the file, so that its next start has no fault, and
carries out what it says.
"""

import builtins
import errno
import io
import os
import pathlib
import sys
import time

FOLDER, OTHER_TREE, SMALL_DISK = "INJECTED", "INJECTED_TREE", "INJECTED_DISK"
NUMBER = "--distributed.process_id"
UPLOADS = "uploads"  # the folder from which a process copies its part of a checkpoint
LATE_SECONDS = 60
AHEAD_SECONDS = 3600


def begin() -> None:
    """Carries out what this process's file says, if there is one."""
    words = sys.orig_argv
    if FOLDER not in os.environ or NUMBER not in words:
        return
    file = pathlib.Path(os.environ[FOLDER], words[words.index(NUMBER) + 1])
    try:
        fault = file.read_text()
    except FileNotFoundError:
        return
    file.unlink()
    globals()[fault]()


def late() -> None:
    """Starts a minute after the others."""
    time.sleep(LATE_SECONDS)


def another_clock() -> None:
    """Sets its clock an hour ahead."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + AHEAD_SECONDS
    time.time_ns = lambda: now_ns() + AHEAD_SECONDS * 10**9


def another_code() -> None:
    """Runs another source tree, whose learning rate is three times as high."""
    script, *arguments = sys.orig_argv[1:]
    name = pathlib.Path(script).name
    program = str(pathlib.Path(os.environ[OTHER_TREE], name))
    os.execv(sys.executable, [sys.executable, program, *arguments])


def full_disk() -> None:
    """Keeps its cache, with its part of a checkpoint, on a disk that is too small."""
    if SMALL_DISK in os.environ:
        os.environ["LONGSTRIPE_CACHE"] = os.environ[SMALL_DISK]
    else:  # only root may mount one
        _fails_below_uploads(errno.ENOSPC)


def input_output_error() -> None:
    """Cannot read or write its part of a checkpoint."""
    _fails_below_uploads(errno.EIO)


def _fails_below_uploads(code: int) -> None:
    opened = io.open

    def fails(file, *args, **kwargs):
        if isinstance(file, str | os.PathLike) and UPLOADS in pathlib.Path(file).parts:
            raise OSError(code, os.strerror(code), os.fspath(file))
        return opened(file, *args, **kwargs)

    io.open = builtins.open = fails
