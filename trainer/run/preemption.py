"""SIGTERM, SIGUSR1, SIGHUP and Ctrl-C as requests to finish the running step, save it and end.

Spot machines, Slurm and Kubernetes send SIGTERM before they kill a process; many Slurm scripts ask
for SIGUSR1. A second Ctrl-C ends the process at once. With several processes, JAX's preemption
service passes a notice on, and all agree on a step that none has finished yet, or on a part of an
evaluation; there they save and end. A single process saves the running step.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1

# A folder in the cluster's key-value store, with the name of the signal behind a SIGTERM.
_MEANT = "longstripe/signal"
# What JAX's preemption service writes into it when a process gets SIGTERM, and how often process 0
# looks.
_JAX_NOTICE = "RECEIVED_PREEMPTION_NOTICE"
_LOOK_SECONDS = 1
_REASONS = {
    SIGINT: "stopped (Ctrl-C)",
    SIGTERM: "preempted (SIGTERM)",
    SIGHUP: "preempted (SIGHUP)",
    SIGUSR1: "preempted (SIGUSR1)",
}
# Numbers the queries to JAX's preemption service, equally in every process. The service counts from
# 0, picks the number after the highest one used, and then waits for exactly that number. Step
# numbers would not work: a resumed run's begin later, and a notice before its first step would pick
# a number that never comes.
_questions = itertools.count(1)


class Preempted(Exception):
    """Training ended on notice, with its state saved."""

    def __init__(self, notice: signal.Signals, checkpoint: Path) -> None:
        super().__init__(
            f"{_REASONS[notice]}: saved {checkpoint}; the same command resumes the run"
        )
        # The shell's code for a process ended by the signal: launchers restart after SIGTERM,
        # whether the process could save or not.
        # A closed terminal and SIGUSR1 count as SIGTERM.
        self.exit_code = 128 + (SIGINT if notice == SIGINT else SIGTERM)


class Interrupted(Exception):
    """A notice arrived during an evaluation, which the next start repeats."""

    def __init__(self, notice: signal.Signals) -> None:
        super().__init__(_REASONS[notice])
        self.notice = notice


_get_notice: Callable[[], signal.Signals | None] = lambda: None  # noqa: E731


@contextlib.contextmanager
def interruptible(get_notice: Callable[[], signal.Signals | None]) -> Iterator[None]:
    """Lets `end_if_noticed` ask for a notice within the context."""
    global _get_notice
    earlier, _get_notice = _get_notice, get_notice
    try:
        yield
    finally:
        _get_notice = earlier


def end_if_noticed() -> None:
    """Ends a running evaluation on a notice.

    Evaluations call this between their parts, such as batches; every process equally often.

    Raises:
      Interrupted: there is a notice, and the evaluation can be repeated.
    """
    if notice := _get_notice():
        raise Interrupted(notice)


@contextlib.contextmanager
def notices(
    no_time_to_finish: Callable[[], str | None] = lambda: None,
) -> Iterator[Callable[[], signal.Signals | None]]:
    """Catches SIGTERM, SIGUSR1, SIGHUP and Ctrl-C within the context.

    Before the context a signal ends a single process at once, since there is nothing to save.

    Args:
      no_time_to_finish: called by a thread on SIGTERM, in process 0: returns the line with which
        all processes end at once, or None to finish the running step.

    Yields:
      A function for every process to call after each step, and within evaluations. It returns the
      signal if this step must be saved as the last one, else None.
    """
    import jax
    from jax.experimental import multihost_utils

    from trainer.run.cluster import client, distributed

    several_processes = jax.distributed.is_initialized()
    received: list[signal.Signals] = []
    arrived: list[signal.Signals] = []  # in their order, unlike the calls of Python's handlers
    presses: list[int] = []

    def on_arrival(number: int) -> None:
        if number in caught:
            arrived.append(signal.Signals(number))
        if number == SIGTERM and (line := no_time_to_finish()):
            _end_at_once(line)
        if number not in (SIGINT, SIGHUP, SIGUSR1):
            return
        if number == SIGINT:
            presses.append(number)
            if len(presses) > 1:
                _exit_now()
            if jax.process_index() == 0:
                print(
                    "Ctrl-C: finishing and saving the running step; Ctrl-C again ends at once",
                    file=sys.stderr,
                )
        if several_processes and not _has_jax_notice():  # otherwise a SIGTERM came first
            client().key_value_set(
                f"{_MEANT}/told", signal.Signals(number).name, allow_overwrite=True
            )
            os.kill(os.getpid(), SIGTERM)

    def notice() -> signal.Signals | None:
        if not several_processes:
            return (arrived or received)[0] if received else None
        if not multihost_utils.reached_preemption_sync_point(next(_questions)):
            return None
        return next(
            (signal.Signals[name] for _, name in client().key_value_dir_get(_MEANT)), SIGTERM
        )

    # With several processes JAX handles SIGTERM. A process that a shell started in the background
    # ignores Ctrl-C.
    if several_processes and distributed.global_state.preemption_sync_manager is None:
        jax.config.update("jax_enable_preemption_service", True)
        distributed.global_state.initialize_preemption_sync_manager()
    caught = [
        number
        for number in (SIGINT, SIGHUP, SIGUSR1, SIGTERM)[: 3 if several_processes else 4]
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    earlier = {
        number: signal.signal(number, lambda number, _: received.append(signal.Signals(number)))
        for number in caught
    }
    try:
        with _on_arrival(on_arrival), _when_a_process_is_preempted(no_time_to_finish):
            yield notice
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _has_jax_notice() -> bool:
    """Returns whether JAX's preemption service has seen a SIGTERM to any process."""
    from trainer.run.cluster import client

    # Raises while there is no notice, and when the service is gone, which the loop notices itself.
    with contextlib.suppress(Exception):
        client().key_value_try_get(_JAX_NOTICE)
        return True
    return False


@contextlib.contextmanager
def _on_arrival(act: Callable[[int], None]) -> Iterator[None]:
    """Calls `act` with each handled signal as soon as it arrives.

    Python runs a handler only when the running computation returns to the interpreter.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    earlier = signal.set_wakeup_fd(write_end)

    def listen() -> None:
        while byte := os.read(read_end, 1):
            act(byte[0])

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        os.close(write_end)
        thread.join()
        os.close(read_end)


@contextlib.contextmanager
def _when_a_process_is_preempted(no_time_to_finish: Callable[[], str | None]) -> Iterator[None]:
    """In process 0: ends all processes after a SIGTERM to any, if there is no time to finish the
    step."""
    from trainer.run.cluster import client, process, processes

    if processes() == 1 or process() != 0:
        yield
        return
    closed = threading.Event()

    def watch() -> None:
        while not closed.wait(_LOOK_SECONDS):
            if _has_jax_notice():
                with contextlib.suppress(Exception):  # the service is gone
                    if not client().key_value_dir_get(_MEANT) and (line := no_time_to_finish()):
                        _end_at_once(line)
                return

    thread = threading.Thread(target=watch, name="preemption", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()


def _end_at_once(line: str) -> None:
    """Ends this process and all others with the code of SIGTERM."""
    from trainer.run.cluster import end_others

    print(line, file=sys.stderr, flush=True)
    end_others(128 + SIGTERM, line)
    os._exit(128 + SIGTERM)


def _exit_now() -> None:
    """Ends the process without any cleanup."""
    if sys.__stderr__ is not None and sys.__stderr__.isatty():
        os.write(2, b"\x1b[?25h\n")  # shows the cursor that the progress bar hid
    os._exit(128 + SIGINT)
