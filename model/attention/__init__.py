"""Exact attention over a sharded sequence: any layout with any schedule, on one mask made from
token coordinates.

`attention` takes and returns global arrays; `attend` does the same for a rank's local arrays,
inside `shard_map`. Public names are imported on first use, so that recipes can be read
(`options.py`) without importing JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .blocks import Keys, Queries
    from .coords import Mask, TokenCoords, document_starts
    from .kernels import get_kernel
    from .layout import inverse, permutation
    from .op import AttentionOp, attend, attention
    from .partial import AttentionPartial
    from .schedules import get_schedule

__all__ = [
    "AttentionOp",
    "AttentionPartial",
    "Keys",
    "Mask",
    "Queries",
    "TokenCoords",
    "attend",
    "attention",
    "document_starts",
    "get_kernel",
    "get_schedule",
    "inverse",
    "permutation",
]

_MODULES = {
    "blocks": ("Keys", "Queries"),
    "coords": ("Mask", "TokenCoords", "document_starts"),
    "kernels": ("get_kernel",),
    "layout": ("inverse", "permutation"),
    "op": ("AttentionOp", "attend", "attention"),
    "partial": ("AttentionPartial",),
    "schedules": ("get_schedule",),
}


def __getattr__(name: str):
    """A public name, from the module that defines it (PEP 562)."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
