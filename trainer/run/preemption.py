"""How a notice ends a run: with training saved, or with an evaluation to be repeated.

`trainer.run.notices` catches the notices. This module does not import JAX, so that commands that
only handle the exceptions start fast.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1

_REASONS = {
    SIGINT: "stopped (Ctrl-C)",
    SIGTERM: "preempted (SIGTERM)",
    SIGHUP: "preempted (SIGHUP)",
    SIGUSR1: "preempted (SIGUSR1)",
}


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
