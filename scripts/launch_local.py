"""Trains with several processes on this machine, which share its simulated devices.

    python -m scripts.launch_local --processes 4 --config RECIPE [--section.field value ...]

All flags except --processes and --restarts are train.py's. If a process fails or is killed, the
launcher ends the others. It forwards SIGTERM, SIGUSR1 and Ctrl-C to all processes, which save a
checkpoint and end; the exit status is then 143 or 130. The same command resumes from the last
checkpoint. With --restarts N the launcher restarts if that may help (scripts/restarts.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from data.errors import first_line, is_transient
from data.printable import printable, printable_output
from trainer.options import AtLeastOne, AtLeastZero, option, other_words, parse

from .restarts import Restarts, may_pass
from .run_status import read_status, run_folder

GRACE_SECONDS = 10
# Processes that fail with the same error end within this time of each other.
TOGETHER_SECONDS = 2
# Prefixes of train.py's final line.
FINAL_LINES = (b"error: ", b"preempted ", b"stopped")
# The command that starts Python. On Linux a first process asks the kernel for SIGTERM when the
# launcher dies, and then becomes train.py's.
PYTHON = [sys.executable]
if sys.platform == "linux":
    PYTHON += [
        "-Sc",
        "import ctypes, os, signal, sys\n"
        "ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
    ]
TRAIN = Path(__file__).resolve().parent.parent / "train.py"


class Failure(NamedTuple):
    """A process that failed."""

    process: int
    """Number of the process."""
    status: int
    """Its exit status; the negative signal number if a signal killed it."""


def free_port() -> int:
    """Returns a free port on this machine."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def start(count: int, flags: Sequence[str]) -> list[subprocess.Popen]:
    """Starts train.py in `count` processes; process 0 is the coordinator.

    Args:
        count: number of processes.
        flags: train.py's flags.
    """
    address = f"127.0.0.1:{free_port()}"
    processes = []
    for number in range(count):
        own_flags = [
            *("--distributed.coordinator", address),
            *("--distributed.process_id", str(number)),
            *("--distributed.num_processes", str(count)),
        ]
        # In separate process groups: a terminal sends Ctrl-C only to the launcher, which forwards
        # it.
        processes.append(
            subprocess.Popen(
                [*PYTHON, str(TRAIN), *flags, *own_flags],
                process_group=0,
                stderr=subprocess.PIPE if number else None,
            )
        )
    for process in processes[1:]:
        threading.Thread(
            target=_forward_stderr,
            args=(process, processes[0]),
            name=_forward_stderr.__name__,
            daemon=True,
        ).start()
    return processes


def _forward_stderr(process: subprocess.Popen, first: subprocess.Popen) -> None:
    """Forwards a process's stderr, without a final line that `first` has written too.

    Processes with the same exit status are assumed to have written the same final line. Even if
    nobody reads our stderr, as with `2>&1 | head`, the process's is read: a full pipe would stop
    the process.
    """
    final_lines = []
    for line in process.stderr or ():
        final_lines.append(line) if line.startswith(FINAL_LINES) else _write_error(line)
    if process.wait() not in (first.wait(), -signal.SIGTERM):
        _write_error(b"".join(final_lines))


def _write_error(text: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads
        os.write(2, text)


def wait(processes: list[subprocess.Popen], received: Sequence[int] = ()) -> int:
    """Waits for all processes, and ends the rest once one has failed.

    Args:
        processes: the processes.
        received: the signals forwarded to them; after one, all get the time they need to end.

    Returns:
        0, or the exit status of the first failed process, as in a shell.
    """
    failure, deadline = None, math.inf
    try:
        while (
            None in (statuses := [process.poll() for process in processes])
            and time.monotonic() < deadline
        ):
            if not failure and any(statuses):
                failure = _first_failure(statuses)
                deadline = math.inf if received else time.monotonic() + TOGETHER_SECONDS
            time.sleep(0.1)
        failure = failure or _first_failure(statuses)
        if not failure:
            return 0
        number, status = failure
        if not received:
            event = f"was lost (signal {-status})" if status < 0 else f"ended with {status}"
            print(
                f"launch_local: process {number} "
                f"{event}{'; ending the others' * (None in statuses)}",
                file=sys.stderr,
            )
        return status if status > 0 else 128 - status
    finally:
        end(processes)


def _first_failure(statuses: Sequence[int | None]) -> Failure | None:
    """Returns the first process that failed, or None."""
    return next((Failure(number, status) for number, status in enumerate(statuses) if status), None)


@contextlib.contextmanager
def forwarding_signals(processes: list[subprocess.Popen]) -> Iterator[list[int]]:
    """Forwards signals to the processes; yields the received ones.

    Signals that this process ignores from the start, such as SIGHUP under nohup, are not forwarded:
    the processes inherit that and ignore them too.
    """
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for process in processes:
            process.send_signal(number)

    handlers = {
        number: signal.signal(number, forward)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    # Otherwise `data.signals` would end the launcher immediately, while the processes are still
    # saving.
    at_once = signal.set_wakeup_fd(-1)
    try:
        yield received
    finally:
        signal.set_wakeup_fd(at_once)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def end(processes: list[subprocess.Popen]) -> None:
    """Terminates the running processes, and kills them after GRACE_SECONDS."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    restarts: AtLeastZero = option(
        "restart after transient errors, at most N times in a row without a new checkpoint",
        0,
        metavar="N",
    )
    processes: AtLeastOne = option(
        "number of processes, which share the devices of mesh.simulate", metavar="N"
    )
    flags: tuple[str, ...] = other_words(
        "--config RECIPE.yaml [--section.field value ...]",
        "All other flags go to train.py; python train.py --help describes them.",
    )


@printable_output()
def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    args = parse(Options, argv)
    counted = Restarts(args.restarts)
    while True:
        status, received = _run_once(args.processes, args.flags)
        if received or not args.restarts or not may_pass(status):
            return status
        decision = counted.after(status, _reached(args.flags))
        print(f"launch_local: {decision.reason}", file=sys.stderr)
        if not decision.restart:
            return status
        time.sleep(decision.pause)


def _reached(flags: Sequence[str]) -> int | None:
    """Returns the newest checkpoint's step; None if there is none or the store does not answer, in
    which case the start counts as one without a checkpoint."""
    try:
        return read_status(run_folder(list(flags))).reached
    except Exception as error:
        if not is_transient(error):
            raise
        print(f"launch_local: {printable(first_line(error))}", file=sys.stderr)
        return None


def _run_once(count: int, flags: Sequence[str]) -> tuple[int, list[int]]:
    """Returns the exit status of one start, and the signals forwarded during it."""
    processes: list[subprocess.Popen] = []
    with forwarding_signals(processes) as received:
        processes += start(count, flags)
        for number in received:  # signals received before there were processes
            for process in processes:
                process.send_signal(number)
        status = wait(processes, received)
    for thread in threading.enumerate():
        if thread.name == _forward_stderr.__name__:
            # With a time limit: a child of a killed process may keep the pipe open.
            thread.join(GRACE_SECONDS)
    return status, received


if __name__ == "__main__":
    sys.exit(main())
