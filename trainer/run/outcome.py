"""How a command ends: an error's exit code and message. docs/clusters.md has the table.

A launcher decides by the code alone whether to restart the command. WRONG_INPUT is for errors
before the work, or that would recur exactly, such as a non-finite loss; TRY_AGAIN is for everything
that a restart may cure.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NamedTuple

from data.errors import (
    TransientError,
    UserError,
    causes,
    file_size_limit,
    is_transient,
    missing_package,
)

SUCCESS = 0
UNEXPECTED = 1  # a bug, with a traceback
WRONG_INPUT = 2  # an error the user can fix, which would recur
# 75: a lost connection or process, a mount, a full disk, a lock, a time-out.
TRY_AGAIN = os.EX_TEMPFAIL
STOPPED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

MAX_MESSAGE = 4000  # characters of an error; the recipe values in it may have any size


class Outcome(NamedTuple):
    """How a command ends."""

    code: int
    """Its exit code."""
    message: str | None
    """Its last line on standard error, without a prefix; None for a bug with a traceback."""


def outcome_of(error: BaseException) -> Outcome:
    """Returns the exit code and message of an error that ends a command."""
    from trainer.run.preemption import Preempted

    if isinstance(error, Preempted):
        return Outcome(error.exit_code, str(error))
    if _wraps_an_interrupt(error):
        return Outcome(STOPPED, "stopped")
    if isinstance(error, MemoryError):
        return Outcome(
            WRONG_INPUT,
            f"out of memory: {str(error) or 'the host has no more'}; a host with more memory, or "
            "fewer other programs on it, would help",
        )
    if isinstance(error, RuntimeError) and (message := _out_of_memory(error)):
        return Outcome(WRONG_INPUT, message)
    if isinstance(error, RuntimeError) and (message := _lost_connection(error)):
        return Outcome(TRY_AGAIN, message)
    if is_transient(error):
        return Outcome(TRY_AGAIN, one_line(str(error) or type(error).__name__))
    if isinstance(error, (UserError, ValueError, OSError)):
        return Outcome(WRONG_INPUT, one_line(_with_limit(error)))
    if missing := missing_package(error):
        return Outcome(WRONG_INPUT, missing)
    return Outcome(UNEXPECTED, None)


def error_with(code: int, message: str) -> UserError:
    """Returns an error with another process's code: WRONG_INPUT, or else TRY_AGAIN."""
    return UserError(message) if code == WRONG_INPUT else TransientError(message)


def one_line(message: str) -> str:
    """Returns the message on one line, without its middle if longer than MAX_MESSAGE."""
    line, half = " ".join(message.split("\n")), MAX_MESSAGE // 2
    return line if len(line) <= MAX_MESSAGE else f"{line[:half]} ... {line[-half:]}"


def _with_limit(error: Exception) -> str:
    """The message of an error; with the limit, if it is about a file above a size limit."""
    message, limit = str(error), file_size_limit(error)
    return f"{message}; {limit}" if limit and limit not in message else message


def _wraps_an_interrupt(error: BaseException) -> bool:
    """Whether a Ctrl-C caused the error: interrupted imports of modules raise ImportError."""
    return any(isinstance(link, KeyboardInterrupt) for link in causes(error))


def _out_of_memory(error: RuntimeError) -> str | None:
    """The message, with advice, for a compiler's or runtime's out-of-memory error, or None."""
    # The status code; the details are passed on unchanged.
    _, status, details = str(error).partition("RESOURCE_EXHAUSTED:")
    if not status:
        return None
    needed = details.strip().partition("\n")[0].rstrip(".")
    return (
        f"out of memory: {needed}; memory.remat nothing, every_k or offload, chunks "
        "(memory.query_chunks, memory.feed_forward_chunk, memory.loss_chunk) and a larger "
        "mesh.sequence take less; python -m scripts.plan says what fits" + _gpu_advice()
    )


def _lost_connection(error: RuntimeError) -> str | None:
    """The message for a transfer that failed because another process is gone, or None."""
    cluster = sys.modules.get("trainer.run.cluster")  # a command without JAX does not import it
    if (
        cluster is None
        or cluster.client() is None
        or not (any(library in str(error) for library in ("Gloo", "NCCL")) or is_transient(error))
    ):
        return None
    return (
        f"the connection to another process was lost ({str(error).splitlines()[0]}); start all "
        "processes again: the same command resumes from the last checkpoint"
    )


def _gpu_advice() -> str:
    """Further advice on a GPU with the default share of memory; "" elsewhere."""
    import jax

    from trainer.xla_flags import MEMORY_SHARE, OLD_MEMORY_SHARE

    if (
        jax.default_backend() != "gpu"
        or os.environ.get(MEMORY_SHARE)
        or os.environ.get(OLD_MEMORY_SHARE)
    ):
        return ""
    return (
        "; JAX takes 75% of a GPU and 64 GiB of its host by default; "
        'eval "$(python -m trainer.xla_flags gpu)" before the start allows more'
    )
