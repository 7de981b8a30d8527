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
    from .blocks import BackwardInputs, Gradients, Keys, Queries, StackedKeys
    from .coords import Mask, TokenCoords, document_starts
    from .kernels import get_kernel
    from .op import AttentionOp, attend, attention, name_for_remat, sink_gradient
    from .options import AttentionConfig
    from .partial import AttentionPartial, merge, with_sinks
    from .schedules import Payload, get_schedule

__all__ = [
    "AttentionConfig",
    "AttentionOp",
    "AttentionPartial",
    "BackwardInputs",
    "Gradients",
    "Keys",
    "Mask",
    "Payload",
    "Queries",
    "StackedKeys",
    "TokenCoords",
    "attend",
    "attention",
    "document_starts",
    "get_kernel",
    "get_schedule",
    "merge",
    "name_for_remat",
    "sink_gradient",
    "with_sinks",
]

_MODULES = {
    "blocks": ("BackwardInputs", "Gradients", "Keys", "Queries", "StackedKeys"),
    "coords": ("Mask", "TokenCoords", "document_starts"),
    "kernels": ("get_kernel",),
    "op": ("AttentionOp", "attend", "attention", "name_for_remat", "sink_gradient"),
    "options": ("AttentionConfig",),
    "partial": ("AttentionPartial", "merge", "with_sinks"),
    "schedules": ("Payload", "get_schedule"),
}


def __getattr__(name: str):
    """A public name, from the module that defines it (PEP 562)."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
