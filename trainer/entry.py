"""The frame of every command: exit codes, one-line user errors, the compilation cache."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from data.folders import named_errors
from data.printable import printable_output
from trainer.run.outcome import (
    STOPPED,
    SUCCESS,
    TERMINATED,
    TRY_AGAIN,
    UNEXPECTED,
    one_line,
    outcome_of,
)
from trainer.run.preemption import Preempted


def keep_compiled(folder: str | None = None) -> None:
    """Caches compiled programs in `folder`; by default in $JAX_COMPILATION_CACHE_DIR, or else in
    $LONGSTRIPE_CACHE/xla or ~/.cache/longstripe/xla."""
    import jax

    from data.paths import cache_folder, expanded, is_remote

    folder = folder or os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(cache_folder("xla"))
    jax.config.update(
        "jax_compilation_cache_dir", folder if is_remote(folder) else str(expanded(folder))
    )


@printable_output()
def run(work: Callable[[], object], output: str | Path | None = None) -> int:
    """Runs a command's work and returns its exit code.

    Args:
      work: may return an exit code; may raise a user's error or any other.
      output: the file or folder that the command writes, for full-disk errors that name no file.

    The code is that of `work`, or 0. For an error it is that of `trainer.run.outcome.outcome_of`: 2
    with one line on standard error for a user's error, 75 with one line if another start may
    succeed, 130 after Ctrl-C, and 143 after SIGTERM. LONGSTRIPE_TRACEBACK=1 raises one-line errors
    instead. All output is made printable.
    """
    # A Ctrl-C within a callback, from which no exception can escape, is sent again a moment later.
    unraisable, sys.unraisablehook = sys.unraisablehook, _interrupt_again
    shown, warnings.showwarning = warnings.showwarning, _show_in_one_line
    # These stay after the work, since threads of a failed save may end later.
    threading.excepthook = _in_one_line
    for library in ("absl", "asyncio"):
        logging.getLogger(library).addFilter(_without_traceback)
    for library in ("gcsfs", "fsspec.prefetcher"):
        logging.getLogger(library).addFilter(_without_errors)
    try:
        with contextlib.nullcontext() if output is None else named_errors(Path(output)):
            code = work()
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where an error becomes one line
    except (Exception, KeyboardInterrupt) as error:
        outcome = outcome_of(error)
        if outcome.code == TRY_AGAIN and (cluster := _cluster()) is not None:
            # If another process has reported why it ended, that is the reason, not the lost
            # connection.
            outcome = cluster.first_failure() or outcome
        if outcome.code in (STOPPED, TERMINATED):
            # An object interrupted during construction may fail again when it is deleted.
            sys.unraisablehook = lambda _: None
            print(outcome.message, file=sys.stderr, flush=True)
            if not isinstance(error, Preempted):
                _leave_others(error, outcome.code)
            return outcome.code
        if outcome.message is None or os.environ.get("LONGSTRIPE_TRACEBACK"):
            _leave_others(error, UNEXPECTED)
            raise
        print(f"error: {outcome.message}", file=sys.stderr, flush=True)
        _leave_others(error, outcome.code)
        return outcome.code
    finally:
        sys.unraisablehook, warnings.showwarning = unraisable, shown
    return code if isinstance(code, int) else SUCCESS


def leave(code: int) -> NoReturn:
    """Ends the process with the code of `run`; after Ctrl-C at once, without joining threads."""
    if code == STOPPED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    # What threads of a failed save leave may be deleted only now.
    sys.unraisablehook = _interrupt_again
    sys.exit(code)


def _cluster() -> ModuleType | None:
    """`trainer.run.cluster` if this process has joined a cluster; not imported without JAX."""
    cluster = sys.modules.get("trainer.run.cluster")
    return cluster if cluster is not None and cluster.client() is not None else None


def _leave_others(error: BaseException, code: int) -> None:
    """Calls `cluster.leave_others` in a cluster; prints the traceback of a bug."""
    if (cluster := _cluster()) is not None:
        if code == UNEXPECTED:
            traceback.print_exception(error)
        cluster.leave_others(error, code)


# Orbax's lines for errors of its threads, which are raised where the save is waited for.
_RAISED_TOO = (
    "run() raised an exception",
    "Handler Commit operations",
    "Failed to write metadata",
    "Task exception was never retrieved",
)


def _without_traceback(record: logging.LogRecord) -> bool:
    """A filter for Orbax's log: leaves out tracebacks, errors that Orbax also raises, and its note,
    at each save in which every process writes locally, that it logs no sizes."""
    if "size logging disabled" in str(record.msg):
        return False
    if not os.environ.get("LONGSTRIPE_TRACEBACK"):
        if any(words in str(record.msg) for words in _RAISED_TOO):
            return False
        record.msg, record.args, record.exc_info = one_line(record.getMessage()), (), None
    return True


def _without_errors(record: logging.LogRecord) -> bool:
    """A filter for logs of stores' libraries, which also raise the errors that they log."""
    return record.levelno < logging.ERROR or bool(os.environ.get("LONGSTRIPE_TRACEBACK"))


def _in_one_line(error: threading.ExceptHookArgs) -> None:
    """The hook for errors in threads: one line, since the main thread also receives them."""
    if os.environ.get("LONGSTRIPE_TRACEBACK") or error.thread is None:
        threading.__excepthook__(error)
    else:
        print(one_line(f"warning: thread {error.thread.name}: {error.exc_value}"), file=sys.stderr)


def _show_in_one_line(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """Shows a warning without its place in the code, which says nothing to a user.

    In a cluster only process 0 shows it, since the others have the same one; a RuntimeWarning is
    about what perhaps only one process has, such as its numbers, so each shows its own.
    """
    is_everyones = not issubclass(category, RuntimeWarning)
    if not is_everyones or (cluster := _cluster()) is None or cluster.process() == 0:
        print(one_line(f"warning: {message}"), file=sys.stderr, flush=True)


def _interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    """The hook for unraisable exceptions: repeats a Ctrl-C, and prints others on one line."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    elif os.environ.get("LONGSTRIPE_TRACEBACK"):
        sys.__unraisablehook__(unraisable)
    elif str(unraisable.exc_value) != "Event loop is closed":  # what a failed save had not begun
        _warn_once(
            f"warning: {unraisable.err_msg or unraisable.exc_type.__name__}: {unraisable.exc_value}"
        )


@functools.lru_cache(maxsize=1000)
def _warn_once(text: str) -> None:
    sys.stderr.write(f"{one_line(text)}\n")  # in one piece, since threads print too
