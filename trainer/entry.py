"""What every command does around its work: one line for an error that a user can mend, and compiled programs kept."""
from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from data.errors import UserError


def at_least_one(text: str) -> int:
    """A flag's type for what there is one of at least: devices, rows, tokens."""
    try:
        if (number := int(text)) >= 1:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"found {text}; a whole number, at least 1, is needed")


def keep_compiled(folder: str | None = None) -> None:
    """Keep compiled programs between starts, in `folder`, $LONGSTRIPE_CACHE/xla or ~/.cache/longstripe/xla."""
    import jax

    root = Path(os.environ.get("LONGSTRIPE_CACHE") or Path.home() / ".cache" / "longstripe")
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(folder or root / "xla"))


def _out_of_memory(error: RuntimeError) -> str | None:
    """What to do about it, with the compiler's or the runtime's own words on what is needed; None for other errors."""
    _, found, words = str(error).partition("RESOURCE_EXHAUSTED:")
    if not found:
        return None
    needed = words.strip().partition("\n")[0].rstrip(".")
    return (f"out of memory: {needed}; less is taken with memory.remat nothing, every_k or offload, with chunks "
            "(memory.query_chunks, memory.feed_forward_chunk, memory.loss_chunk) and over a larger mesh.sequence; "
            "python -m scripts.plan tells beforehand what fits")


def run(work: Callable[[], object]) -> int:
    """Runs a command's work; 2 and one line on standard error for an error that its user can mend, 130 after Ctrl-C, 143 after
    SIGTERM."""
    from trainer.run.preemption import Preempted

    # A Ctrl-C within a callback, from which Python lets no exception out, comes again a moment later.
    unraisable, sys.unraisablehook = sys.unraisablehook, _interrupt_again
    try:
        work()
    except Preempted as told:
        print(told, file=sys.stderr)
        return told.exit_code
    except (UserError, ValueError, OSError, RuntimeError) as error:
        said = _out_of_memory(error) if isinstance(error, RuntimeError) else error
        if said is None or os.environ.get("LONGSTRIPE_TRACEBACK"):
            raise
        print(f"error: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    finally:
        sys.unraisablehook = unraisable
    return 0


def leave(code: int) -> NoReturn:
    """Ends the process with what `run` gave; after Ctrl-C at once, without waiting for what other threads are writing."""
    if code == 128 + signal.SIGINT:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _interrupt_again(unraisable) -> None:
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)
