"""Trains with several processes on this machine, as a cluster does, each with its share of the simulated devices.

    python -m scripts.launch_local --processes 4 --config configs/NAME.yaml [--section.field value ...]

All but --processes goes to train.py. When a process ends by an error or is lost, the others are ended too; SIGTERM and Ctrl-C
go to all, which save, end, and give 143 or 130. The same command goes on from the last checkpoint.
"""
from __future__ import annotations

import argparse
import contextlib
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

GRACE_SECONDS = 10
# Processes that meet the same error end by themselves within so long of each other.
TOGETHER_SECONDS = 2
LAST_WORDS = (b"error: ", b"preempted ", b"stopped")  # what train.py ends with, in one line
TRAIN = Path(__file__).resolve().parent.parent / "train.py"


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def start(processes: int, train: list[str]) -> list[subprocess.Popen]:
    """One train.py for each process, process 0 their coordinator."""
    address = f"127.0.0.1:{free_port()}"
    running = []
    for number in range(processes):
        # In groups of their own: a terminal's Ctrl-C comes to the launcher alone, and to them once.
        place = ["--distributed.coordinator", address, "--distributed.process_id", str(number), "--distributed.num_processes",
                 str(processes)]
        running.append(subprocess.Popen([sys.executable, str(TRAIN), *train, *place], process_group=0,
                                        stderr=subprocess.PIPE if number else None))
    for process in running[1:]:
        threading.Thread(target=_speak, args=(process, running[0]), name=_speak.__name__, daemon=True).start()
    return running


def _speak(process: subprocess.Popen, first: subprocess.Popen) -> None:
    """Passes on what a process says on standard error, but not its last words where `first` has said the same, as their exit
    codes tell."""
    last_words = []
    for line in process.stderr:
        last_words.append(line) if line.startswith(LAST_WORDS) else os.write(2, line)
    if process.wait() not in (first.wait(), -signal.SIGTERM):
        os.write(2, b"".join(last_words))


def wait(running: list[subprocess.Popen], told: Sequence[int] = ()) -> int:
    """The exit code of all: 0, or that of the first that failed, after which the others are ended. Those that are `told` to end
    by a signal are given the time to do so."""
    failed, until = None, math.inf
    try:
        while None in (codes := [process.poll() for process in running]) and time.monotonic() < until:
            if not failed and any(codes):
                failed = _failed(codes)
                until = math.inf if told else time.monotonic() + TOGETHER_SECONDS
            time.sleep(0.1)
        number, code = failed or _failed(codes)
        if not code:
            return 0
        if not told:
            how = f"was lost (signal {-code})" if code < 0 else f"ended with {code}"
            print(f"launch_local: process {number} {how}{'; ending the others' * (None in codes)}", file=sys.stderr)
        return code if code > 0 else 128 - code
    finally:
        end(running)


def _failed(codes: list[int | None]) -> tuple[int, int]:
    """The first process that failed, and its exit code; 0 where none did."""
    return next(((number, code) for number, code in enumerate(codes) if code), (0, 0))


@contextlib.contextmanager
def passing_on(running: list[subprocess.Popen]) -> Iterator[list[int]]:
    """A signal that asks this process to end is one to each that is running; gives the list of those that came."""
    told = []

    def tell(number, _):
        told.append(number)
        for process in running:
            process.send_signal(number)

    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end(running: list[subprocess.Popen]) -> None:
    """Asks those still running to end, and kills them after a while."""
    for process in running:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    patience = time.monotonic() + GRACE_SECONDS
    for process in running:
        try:
            process.wait(max(0.0, patience - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m scripts.launch_local", allow_abbrev=False,
                                     usage="%(prog)s --processes N --config RECIPE.yaml [--section.field value ...]",
                                     description=__doc__.splitlines()[0],
                                     epilog="All other flags go to train.py; python train.py --help describes them.")
    parser.add_argument("--processes", type=int, required=True, metavar="N",
                        help="processes to start; they divide mesh.simulate")
    args, train = parser.parse_known_args(argv)
    if args.processes < 1:
        parser.error(f"--processes: found {args.processes}; at least 1")
    running = []
    with passing_on(running) as told:
        running += start(args.processes, train)
        code = wait(running, told)
    for thread in threading.enumerate():
        if thread.name == _speak.__name__:
            thread.join(GRACE_SECONDS)  # no longer: what a lost process has started may hold its end of the pipe open
    return code


if __name__ == "__main__":
    sys.exit(main())
