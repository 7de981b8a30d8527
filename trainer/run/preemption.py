"""SIGTERM and Ctrl-C as notices: finish the running step, save it, end. SIGTERM is how spot machines, Slurm and Kubernetes say
that this process will soon be killed; a second Ctrl-C ends it at once.

A notice to one process is one to all: JAX's preemption service carries it to the others, they agree on a step that none has
passed, and all save that one. A process that is alone saves the step that is running.
"""
from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGINT, SIGTERM

_CTRL_C = "longstripe/ctrl_c"  # the folder in which processes tell each other that a SIGTERM was meant as Ctrl-C


class Preempted(Exception):
    """Training ended on notice; what it had is saved."""

    def __init__(self, told: signal.Signals, saved: Path) -> None:
        how = "stopped (Ctrl-C)" if told == SIGINT else "preempted (SIGTERM)"
        super().__init__(f"{how}: saved {saved}; the same command goes on")
        # What a shell tells of a process that the signal ended: launchers begin again after SIGTERM, whether it came to
        # saving or not.
        self.exit_code = 128 + told


@contextlib.contextmanager
def notices() -> Iterator[Callable[[int], signal.Signals | None]]:
    """Gives a function to be asked after each step, with the number of finished steps, by all processes: is this the step to
    save and end after, and by which signal? Before this, a signal ends a process that is alone at once: there is nothing to
    save."""
    import jax
    from jax._src import distributed  # as trainer.run.cluster does
    from jax.experimental import multihost_utils

    together = jax.distributed.is_initialized()
    told, presses = [], []

    def at_once(number: int) -> None:
        if number != SIGINT:
            return
        presses.append(number)
        if len(presses) > 1:
            _leave()
        if jax.process_index() == 0:
            print("Ctrl-C: the running step is finished and saved; Ctrl-C again ends at once", file=sys.stderr)
        if together:
            distributed.global_state.client.key_value_set(f"{_CTRL_C}/told", "", allow_overwrite=True)
            os.kill(os.getpid(), SIGTERM)

    def last(step: int) -> signal.Signals | None:
        if not together:
            return told[0] if told else None
        if not multihost_utils.reached_preemption_sync_point(step):
            return None
        return SIGINT if distributed.global_state.client.key_value_dir_get(_CTRL_C) else SIGTERM

    # With several processes SIGTERM has JAX's own handler. What a shell starts in the background ignores Ctrl-C.
    mine = [number for number in ((SIGINT,) if together else (SIGINT, SIGTERM)) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _: told.append(signal.Signals(number))) for number in mine}
    try:
        with _heard_at_once(at_once):
            yield last
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _heard_at_once(act: Callable[[int], None]) -> Iterator[None]:
    """Calls `act` with each signal that has a handler, when it comes: the handler itself waits until a step is computed."""
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    before = signal.set_wakeup_fd(mouth)

    def listen():
        while heard := os.read(ear, 1):
            act(heard[0])

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(mouth)
        thread.join()
        os.close(ear)


def _leave() -> None:
    """Ends the process where it stands."""
    if sys.__stderr__.isatty():
        os.write(2, b"\x1b[?25h\n")  # shows the cursor again, which the progress bar hides
    os._exit(128 + SIGINT)
