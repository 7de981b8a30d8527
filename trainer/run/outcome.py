"""How a command ends: one function says which exit code and which line an error means. docs/clusters.md has the table.

A launcher decides by the code alone whether it starts the command again. WRONG_INPUT is for what is found before the work, or
repeats itself exactly, such as a loss that is not finite; everything that another start may pass is TRY_AGAIN.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NamedTuple

from data.errors import TransientError, UserError, is_transient

SUCCESS = 0
UNEXPECTED = 1  # an error of ours, with its traceback
WRONG_INPUT = 2  # an error that the user can mend, and that would occur again
TRY_AGAIN = (
    os.EX_TEMPFAIL
)  # 75: a lost connection or process, a mount, a full disk, a lock, a time-out
STOPPED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

MAX_MESSAGE = (
    4000  # characters of an error; the values of a recipe that it names may be of any size
)


class Outcome(NamedTuple):
    """How a command ends."""

    code: int
    """Its exit code."""
    message: str | None
    """Its last line on standard error, without a prefix; None for an unexpected error, whose traceback is needed."""


def outcome_of(error: BaseException) -> Outcome:
    """Returns the exit code and the line for an error that ends a command."""
    from trainer.run.preemption import Preempted

    if isinstance(error, Preempted):
        return Outcome(error.exit_code, str(error))
    if _wraps_an_interrupt(error):
        return Outcome(STOPPED, "stopped")
    if isinstance(error, MemoryError):
        return Outcome(
            WRONG_INPUT,
            f"out of memory: {str(error) or 'the host has no more'}; a host with more memory, or fewer "
            "programs beside this one, would work",
        )
    if isinstance(error, RuntimeError) and (message := _out_of_memory(error)):
        return Outcome(WRONG_INPUT, message)
    if isinstance(error, RuntimeError) and (message := _lost_connection(error)):
        return Outcome(TRY_AGAIN, message)
    if is_transient(error):
        return Outcome(TRY_AGAIN, one_line(str(error) or type(error).__name__))
    if isinstance(error, (UserError, ValueError, OSError)):
        return Outcome(WRONG_INPUT, one_line(str(error)))
    return Outcome(UNEXPECTED, None)


def error_with(code: int, message: str) -> UserError:
    """Returns an error that ends this process as another one has ended: with WRONG_INPUT where that has, else TRY_AGAIN."""
    return UserError(message) if code == WRONG_INPUT else TransientError(message)


def one_line(message: str) -> str:
    """Returns the message in one line of at most MAX_MESSAGE characters; the middle of a longer one is left out."""
    line, half = " ".join(message.split("\n")), MAX_MESSAGE // 2
    return line if len(line) <= MAX_MESSAGE else f"{line[:half]} ... {line[-half:]}"


def _wraps_an_interrupt(error: BaseException | None) -> bool:
    """Whether a Ctrl-C caused the error: a compiled module interrupted while it loads raises ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _out_of_memory(error: RuntimeError) -> str | None:
    """The message for an error of the compiler or runtime that memory ran out, with advice; None for other errors."""
    _, status, details = str(error).partition(
        "RESOURCE_EXHAUSTED:"
    )  # the status code; the details are passed on as they are
    if not status:
        return None
    needed = details.strip().partition("\n")[0].rstrip(".")
    return (
        f"out of memory: {needed}; less is taken with memory.remat nothing, every_k or offload, with chunks "
        "(memory.query_chunks, memory.feed_forward_chunk, memory.loss_chunk) and over a larger mesh.sequence; "
        "python -m scripts.plan tells beforehand what fits" + _gpu_advice()
    )


def _lost_connection(error: RuntimeError) -> str | None:
    """The message for a transfer that failed since another process is gone; None for other errors, or alone."""
    cluster = sys.modules.get("trainer.run.cluster")  # a command without JAX does not import it
    if (
        cluster is None
        or cluster.client() is None
        or not (any(library in str(error) for library in ("Gloo", "NCCL")) or is_transient(error))
    ):
        return None
    return (
        f"the connection to another process was lost ({str(error).splitlines()[0]}); once all processes are started again, "
        "the same command resumes from the last checkpoint"
    )


def _gpu_advice() -> str:
    """What else to do on a GPU whose share of memory nobody has set; "" elsewhere."""
    import jax

    from trainer.xla_flags import MEMORY_SHARE, OLD_MEMORY_SHARE

    if (
        jax.default_backend() != "gpu"
        or os.environ.get(MEMORY_SHARE)
        or os.environ.get(OLD_MEMORY_SHARE)
    ):
        return ""
    return (
        '; JAX takes 75% of a GPU and 64 GiB of its host by default; eval "$(python -m trainer.xla_flags gpu)" before the '
        "start allows more"
    )
