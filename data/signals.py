"""SIGTERM, SIGHUP and Ctrl-C end a command at once, even as PID 1 or while it compiles.

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

_OURS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_interrupted = threading.Event()
_before_the_end: list[Callable[[int, str], object]] = []


def end_at_once() -> None:
    """Installs the handlers; commands call it in their first lines, in the main thread."""
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # ignored by the parent, or done already
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)  # the thread does it all
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # not under nohup
        signal.signal(signal.SIGHUP, lambda *_: None)
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    threading.Thread(target=_listen, args=(read_end,), name="signals at once", daemon=True).start()
    # A child's SIGTERM must not end its parent through the shared pipe, not even during the fork.
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_reset)


def before_the_end(tell: Callable[[int, str], object]) -> None:
    """Calls `tell(exit code, line)` before a signal ends this process, to inform others."""
    _before_the_end.append(tell)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _interrupted.set()
    signal.default_int_handler(number, frame)


def _listen(read_end: int) -> None:
    """The thread that reads which signals have arrived."""
    while byte := os.read(read_end, 1):
        if byte[0] in (signal.SIGTERM, signal.SIGHUP):
            name = signal.Signals(byte[0]).name
            # A closed terminal counts as SIGTERM.
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
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _release()
