"""SIGTERM as the notice it is on spot machines, Slurm and Kubernetes: soon this process will be killed; save, and end.

A notice to one process is one to all: JAX's preemption service carries it to the others, they agree on a step that none has
passed, and all save that one. A process that is alone saves the step that is running.
"""
from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


class Preempted(Exception):
    """Training ended on notice; what it had is saved."""

    # What a shell tells of a process that SIGTERM ended: launchers begin again, whether it came to saving or not.
    EXIT_CODE = 128 + signal.SIGTERM


@contextlib.contextmanager
def notices() -> Iterator[Callable[[int], bool]]:
    """Gives a function to be asked after each step, with the number of finished steps, by all processes: is this the step to
    save and end after? Before this, SIGTERM ends a process that is alone at once: there is nothing to save."""
    import jax
    from jax.experimental import multihost_utils

    if jax.distributed.is_initialized():  # whose service has its own handler
        yield multihost_utils.reached_preemption_sync_point
        return
    told = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        yield lambda step: bool(told)
    finally:
        signal.signal(signal.SIGTERM, before)
