"""The frame of every command: exit codes, one line for an error that its user can mend, and the compilation cache."""
from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from data.errors import UserError
from data.folders import named_errors

MAX_MESSAGE = 4000  # characters of an error; the values of a recipe that it names may be of any size


def at_least_one(text: str) -> int:
    """The argparse type of a whole number of at least 1, such as devices, rows or tokens."""
    try:
        if (number := int(text)) >= 1:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"found {text}; a whole number, at least 1, is needed")


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the flag or value that is nearest to a misspelt one."""

    def parse_args(self, args=None, namespace=None):  # type: ignore[override]
        """As of argparse; raises SystemExit(2) after one line for what it does not know."""
        words = list(sys.argv[1:] if args is None else args)
        # A misspelt flag is named before the required one that it may have been meant to be.
        for word in words[:words.index("--")] if "--" in words else words:
            if re.match("--[a-z]", word) and word.partition("=")[0] not in self._option_string_actions:
                self._refuse(word)
        parsed, unknown = self.parse_known_args(words, namespace)
        if unknown:
            self._refuse(unknown[0])
        return parsed

    def _refuse(self, word: str) -> NoReturn:
        self.error(f"{word.partition('=')[0]} is no option of this command{self._meant(word)}; --help lists them")

    def error(self, message: str) -> NoReturn:
        """Prints the message in one line and exits with 2."""
        if match := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            choices = [choice.strip(" '") for choice in match[2].split(",")]
            near = difflib.get_close_matches(match[1], choices, n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"error: {message}\n")

    def _meant(self, word: str) -> str:
        from trainer.config.fields import FIELDS, MEANT

        name = word.partition("=")[0]
        if not name.startswith("-"):
            return ""
        own = [option for option in self._option_string_actions if option.startswith("--")]
        field = MEANT.get(name.lstrip("-").replace("-", "_").lower())
        if field and (option := "--" + field.rpartition(".")[2].replace("_", "-")) in own:
            return f" (did you mean {option}?)"
        last = "--" + name.lstrip("-").rpartition(".")[2].replace("_", "-")
        if name.lstrip("-") in FIELDS and last in own:
            return f" (did you mean {last}?)"
        near = difflib.get_close_matches(name.replace("_", "-"), own, n=1)
        return f" (did you mean {near[0]}?)" if near else ""


def keep_compiled(folder: str | None = None) -> None:
    """Keeps compiled programs between starts, in `folder`, or else $LONGSTRIPE_CACHE/xla or ~/.cache/longstripe/xla."""
    import jax

    from data.paths import cache_folder

    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(folder or cache_folder("xla")))


def _out_of_memory(error: RuntimeError) -> str | None:
    """The message for an error of the compiler or runtime that memory ran out, with advice; None for other errors."""
    _, status, details = str(error).partition("RESOURCE_EXHAUSTED:")  # the status code; the details are passed on as they are
    if not status:
        return None
    needed = details.strip().partition("\n")[0].rstrip(".")
    return (f"out of memory: {needed}; less is taken with memory.remat nothing, every_k or offload, with chunks "
            "(memory.query_chunks, memory.feed_forward_chunk, memory.loss_chunk) and over a larger mesh.sequence; "
            "python -m scripts.plan tells beforehand what fits" + _gpu_advice())


def _lost_connection(error: RuntimeError) -> str | None:
    """The message for a transfer between CPUs that failed because another process is gone; None for other errors."""
    cluster = sys.modules.get("trainer.run.cluster")  # a command without JAX does not import it
    if cluster is None or cluster.client() is None or "Gloo" not in str(error):
        return None
    return (f"the connection to another process was lost ({str(error).splitlines()[0]}); once all processes are started again, "
            "the same command resumes from the last checkpoint")


def _gpu_advice() -> str:
    """What else to do on a GPU whose share of memory nobody has set; "" elsewhere."""
    import jax

    from .xla_flags import MEMORY_SHARE, OLD_MEMORY_SHARE

    if jax.default_backend() != "gpu" or os.environ.get(MEMORY_SHARE) or os.environ.get(OLD_MEMORY_SHARE):
        return ""
    return ('; JAX takes 75% of a GPU and 64 GiB of its host by default; eval "$(python -m trainer.xla_flags gpu)" before the '
            "start allows more")


def _one_line(message: str) -> str:
    """The message in one line of at most MAX_MESSAGE characters; the middle of a longer one is left out."""
    line, half = " ".join(message.split("\n")), MAX_MESSAGE // 2
    return line if len(line) <= MAX_MESSAGE else f"{line[:half]} ... {line[-half:]}"


def run(work: Callable[[], object], output: str | Path | None = None) -> int:
    """Runs a command's work and returns its exit code.

    Args:
      work: raises an error that the user can mend, or another one.
      output: the file or folder that the command writes, by which an error of a full disk that names no file is named.

    It is 0 for success, 2 with one line on standard error for an error that the user can mend, 130 after Ctrl-C, and 143 after
    SIGTERM. LONGSTRIPE_TRACEBACK=1 raises the errors that would be one line.
    """
    from trainer.run.preemption import Preempted

    # A Ctrl-C within a callback, from which Python lets no exception escape, is sent again a moment later.
    unraisable, sys.unraisablehook = sys.unraisablehook, _interrupt_again
    # These stay when the work has ended, since the threads of a failed save may end later.
    threading.excepthook = _in_one_line
    for library in ("absl", "asyncio"):
        logging.getLogger(library).addFilter(_without_traceback)
    try:
        with contextlib.nullcontext() if output is None else named_errors(Path(output)):
            work()
    except Preempted as notice:
        print(notice, file=sys.stderr)
        return notice.exit_code
    except KeyboardInterrupt:
        return _stopped()
    except Exception as error:
        if _wraps_an_interrupt(error):
            return _stopped()
        message = _message_for_the_user(error)
        if message is None or os.environ.get("LONGSTRIPE_TRACEBACK"):
            _leave_others(error, 1)
            raise
        print(f"error: {_one_line(str(message))}", file=sys.stderr, flush=True)
        _leave_others(error, 2)
        return 2
    finally:
        sys.unraisablehook = unraisable
    return 0


def _message_for_the_user(error: Exception) -> object:
    """What says in one line what the user can mend; None for an error of another kind, whose traceback is needed."""
    if isinstance(error, MemoryError):
        return (f"out of memory: {str(error) or 'the host has no more'}; a host with more memory, or fewer programs beside "
                "this one, would work")
    if isinstance(error, RuntimeError):
        return _out_of_memory(error) or _lost_connection(error)
    return error if isinstance(error, (UserError, ValueError, OSError)) else None


def _wraps_an_interrupt(error: BaseException | None) -> bool:
    """Whether a Ctrl-C caused the error: a compiled module interrupted while it loads raises ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _stopped() -> int:
    # What was interrupted while it was being made may fail once more as it is deleted; `run` sets the hook back afterwards.
    sys.unraisablehook = lambda _: None
    print("stopped", file=sys.stderr)
    return 130


def leave(code: int) -> NoReturn:
    """Ends the process with the code of `run`; after Ctrl-C at once, without waiting for threads that are writing."""
    if code == 128 + signal.SIGINT:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _leave_others(error: BaseException, code: int) -> None:
    """Calls `cluster.leave_others` if this process may have joined a cluster; prints the traceback of an error of ours."""
    cluster = sys.modules.get("trainer.run.cluster")  # a command without JAX does not import it
    if cluster is not None and cluster.client() is not None:
        if code == 1:
            traceback.print_exception(error)
        cluster.leave_others(error, code)


def _without_traceback(record: logging.LogRecord) -> bool:
    """The filter of Orbax's log, which prints the traceback of an error that it also raises."""
    if not os.environ.get("LONGSTRIPE_TRACEBACK"):
        record.msg, record.args, record.exc_info = _one_line(record.getMessage()), (), None
    return True


def _in_one_line(error: threading.ExceptHookArgs) -> None:
    """The hook for errors that end a thread: one line, as the main thread learns of them when it waits for the thread."""
    if os.environ.get("LONGSTRIPE_TRACEBACK") or error.thread is None:
        threading.__excepthook__(error)
    else:
        print(_one_line(f"warning: thread {error.thread.name}: {error.exc_value}"), file=sys.stderr)


def _interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    """The hook for exceptions that Python cannot raise: repeats a Ctrl-C shortly after, and prints any other in one line."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    elif os.environ.get("LONGSTRIPE_TRACEBACK"):
        sys.__unraisablehook__(unraisable)
    else:
        _warn_once(f"warning: {unraisable.err_msg or unraisable.exc_type.__name__}: {unraisable.exc_value}")


@functools.lru_cache(maxsize=1000)
def _warn_once(text: str) -> None:
    print(_one_line(text), file=sys.stderr)
