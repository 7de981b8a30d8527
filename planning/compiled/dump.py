"""Reads a TPU step's text from the compiler's dump.

`compiled.as_text()` translates libtpu's program to jaxlib's own representation first, and jaxlib
0.10 cannot represent all that libtpu compiles for v5p and v6e (asynchronous operations with several
operands): it prints a stack trace and raises. The compiler's own dump is the same text, and needs
no translation. With jaxlib 0.12, which can, the dump is in a shorter notation.
"""

from __future__ import annotations

from pathlib import Path

import jax

NEEDED = jax.__version_info__ < (0, 12)
"""Whether `compiled.as_text()` may fail, so the dump must be read instead."""


def dump_flags(folder: Path) -> dict[str, str | bool]:
    """Returns compiler flags that dump compiled programs into `folder`."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def dumped_text(folder: Path) -> str | None:
    """Returns the text of the step compiled with `dump_flags(folder)`; None if there is none."""
    paths = list(folder.glob("*.after_optimizations.txt"))
    return paths[0].read_text(encoding="utf-8") if len(paths) == 1 else None
