"""SIGTERM, SIGUSR1, SIGHUP and Ctrl-C end a command at once, even as PID 1 or while it compiles.

Python runs a signal handler only when the running call returns to the interpreter, which may take
half an hour in a compiler; and without a handler the system ignores SIGTERM for PID 1, which is
what a container's command is. Training has its own handlers while there is something to save; see
`trainer.run.notices`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

# How long Ctrl-C may take to become a KeyboardInterrupt, which cleans up, before the process ends
# without it.
INTERRUPT_SECONDS = 1.0

# SIGUSR1, which many Slurm scripts ask for, and a closed terminal's SIGHUP count as SIGTERM.
_TERMINATING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_OURS = (*_TERMINATING, signal.SIGINT)
_interrupted = threading.Event()
_before_the_end: list[Callable[[int, str], object]] = []


def end_at_once() -> None:
    """Installs the handlers; commands call it in their first lines, in the main thread."""
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # ignored by the parent, or done already
        return
    _open_standard_streams()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in _TERMINATING:
        if signal.getsignal(number) == signal.SIG_DFL:  # SIGHUP is ignored under nohup
            signal.signal(number, lambda *_: None)  # the thread does it all
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    threading.Thread(target=_listen, args=(read_end,), name="signals at once", daemon=True).start()
    # A child's SIGTERM must not end its parent through the shared pipe, not even during the fork.
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_reset)


def _open_standard_streams() -> None:
    """Opens the standard streams that the parent has closed, as with `>&-`, on nothing.

    Otherwise the next files would get their numbers, and what libraries write to standard error
    would be read from the pipe as signals.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


def before_the_end(tell: Callable[[int, str], object]) -> None:
    """Calls `tell(exit code, line)` before a signal ends this process, to inform others."""
    _before_the_end.append(tell)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _interrupted.set()
    signal.default_int_handler(number, frame)


def _listen(read_end: int) -> None:
    """The thread that reads which signals have arrived."""
    while byte := os.read(read_end, 1):
        if byte[0] in _TERMINATING:
            name = signal.Signals(byte[0]).name
            _end(128 + signal.SIGTERM, f"stopped ({name}); rerun the same command to start again")
        if (
            byte[0] == signal.SIGINT
            and signal.getsignal(signal.SIGINT) == _interrupt
            and not _interrupted.wait(INTERRUPT_SECONDS)
        ):
            _end(128 + signal.SIGINT, "stopped")
        _interrupted.clear()


def _end(code: int, line: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that was closed
        print(line, file=sys.stderr, flush=True)
    for tell in _before_the_end:
        tell(code, line)
    os._exit(code)


def _hold() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)


def _reset() -> None:
    """In a forked child: signals as they were before `end_at_once`."""
    signal.set_wakeup_fd(-1)
    for number in _TERMINATING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _release()
