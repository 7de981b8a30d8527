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
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1

import jax
from jax.experimental import multihost_utils

from trainer.run.cluster import client, distributed, end_others, process, processes

# A folder in the cluster's key-value store, with the name of the signal behind a SIGTERM.
_MEANT = "longstripe/signal"
# What JAX's preemption service writes into it when a process gets SIGTERM, and how often process 0
# looks.
_JAX_NOTICE = "RECEIVED_PREEMPTION_NOTICE"
_LOOK_SECONDS = 1
_ANNOUNCED = (SIGINT, SIGHUP, SIGUSR1)  # JAX's preemption service knows only SIGTERM
# Numbers the queries to JAX's preemption service, equally in every process. The service counts from
# 0, picks the number after the highest one used, and then waits for exactly that number. Step
# numbers would not work: a resumed run's begin later, and a notice before its first step would pick
# a number that never comes.
_questions = itertools.count(1)


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
    signals = _Signals(no_time_to_finish)
    with (
        signals.handled(),
        _on_arrival(signals.on_arrival),
        _when_a_process_is_preempted(no_time_to_finish),
    ):
        yield signals.get_notice


class _Signals:
    """What one process has received within `notices`, and does about it."""

    def __init__(self, no_time_to_finish: Callable[[], str | None]) -> None:
        self._no_time_to_finish = no_time_to_finish
        self._several_processes = jax.distributed.is_initialized()
        self._handled: list[signal.Signals] = []  # by Python's handlers
        self._arrived: list[signal.Signals] = []  # in their order, unlike the handlers' calls
        self._presses = 0  # of Ctrl-C
        if self._several_processes:
            _start_preemption_service()
        # With several processes JAX handles SIGTERM. A process that a shell started in the
        # background ignores Ctrl-C.
        numbers = _ANNOUNCED if self._several_processes else (*_ANNOUNCED, SIGTERM)
        self._caught = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handles signals within the context by noting them, instead of ending."""

        def note(number: int, _: object) -> None:
            self._handled.append(signal.Signals(number))

        earlier = {number: signal.signal(number, note) for number in self._caught}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def on_arrival(self, number: int) -> None:
        """Acts on a signal when it arrives, in a thread other than the handlers', which run only
        when the running computation returns to the interpreter."""
        if number in self._caught:
            self._arrived.append(signal.Signals(number))
        if number == SIGTERM and (line := self._no_time_to_finish()):
            _end_at_once(line)
        if number == SIGINT:
            self._on_ctrl_c()
        if number in _ANNOUNCED and self._several_processes:
            _announce(signal.Signals(number))

    def _on_ctrl_c(self) -> None:
        """Says what the first Ctrl-C does; ends the process on the second."""
        self._presses += 1
        if self._presses > 1:
            _exit_now()
        if jax.process_index() == 0:
            print(
                "Ctrl-C: finishing and saving the running step; Ctrl-C again ends at once",
                file=sys.stderr,
            )

    def get_notice(self) -> signal.Signals | None:
        """Returns the signal on which the running step must be saved as the last one, if any."""
        if self._several_processes:
            return _agreed_notice()
        return (self._arrived or self._handled)[0] if self._handled else None


def _start_preemption_service() -> None:
    """Starts JAX's preemption service, unless it is running."""
    if distributed.global_state.preemption_sync_manager is None:
        jax.config.update("jax_enable_preemption_service", True)
        distributed.global_state.initialize_preemption_sync_manager()


def _agreed_notice() -> signal.Signals | None:
    """Returns the signal on which all processes have agreed to end after this step, if any."""
    if not multihost_utils.reached_preemption_sync_point(next(_questions)):
        return None
    return next((signal.Signals[name] for _, name in client().key_value_dir_get(_MEANT)), SIGTERM)


def _announce(received: signal.Signals) -> None:
    """Tells all processes of a signal to this one, as a SIGTERM with the signal's name."""
    if not _has_jax_notice():  # otherwise a SIGTERM came first
        client().key_value_set(f"{_MEANT}/told", received.name, allow_overwrite=True)
        os.kill(os.getpid(), SIGTERM)


def _has_jax_notice() -> bool:
    """Returns whether JAX's preemption service has seen a SIGTERM to any process."""
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
    print(line, file=sys.stderr, flush=True)
    end_others(128 + SIGTERM, line)
    os._exit(128 + SIGTERM)


def _exit_now() -> None:
    """Ends the process without any cleanup."""
    if sys.__stderr__ is not None and sys.__stderr__.isatty():
        os.write(2, b"\x1b[?25h\n")  # shows the cursor that the progress bar hid
    os._exit(128 + SIGINT)
