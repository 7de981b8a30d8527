"""Trains with several processes on this machine, as a cluster does, each with its share of the simulated devices.

    python -m scripts.launch_local --processes 4 --config configs/NAME.yaml [--section.field value ...]

All but --processes goes to train.py. When a process ends by an error or is lost, the others are ended too; SIGTERM goes to
all, which save, end, and give 143. The same command goes on from the last checkpoint.
"""
from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

GRACE_SECONDS = 10
TRAIN = Path(__file__).resolve().parent.parent / "train.py"


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def start(processes: int, train: list[str]) -> list[subprocess.Popen]:
    """One train.py for each process, process 0 their coordinator."""
    address = f"127.0.0.1:{free_port()}"
    return [subprocess.Popen([sys.executable, str(TRAIN), *train, "--distributed.coordinator", address,
                              "--distributed.process_id", str(number), "--distributed.num_processes", str(processes)])
            for number in range(processes)]


def wait(running: list[subprocess.Popen]) -> int:
    """The exit code of all: 0, or that of the first that failed, after which the others are ended."""
    try:
        while True:
            codes = [process.poll() for process in running]
            failed = next(((number, code) for number, code in enumerate(codes) if code), None)
            if failed:
                number, code = failed
                how = f"was lost (signal {-code})" if code < 0 else f"ended with {code}"
                print(f"launch_local: process {number} {how}; ending the others", file=sys.stderr)
                return code if code > 0 else 128 - code
            if None not in codes:
                return 0
            time.sleep(0.1)
    except KeyboardInterrupt:
        return 130
    finally:
        end(running)


@contextlib.contextmanager
def passing_on(running: list[subprocess.Popen]) -> Iterator[None]:
    """SIGTERM to this process is one to each that is running."""
    before = signal.signal(signal.SIGTERM, lambda number, _: [process.send_signal(number) for process in running])
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
                                     description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, required=True, help="processes to start; they divide mesh.simulate")
    args, train = parser.parse_known_args(argv)
    if args.processes < 1:
        parser.error(f"--processes: found {args.processes}; at least 1")
    running = start(args.processes, train)
    with passing_on(running):
        return wait(running)


if __name__ == "__main__":
    sys.exit(main())
