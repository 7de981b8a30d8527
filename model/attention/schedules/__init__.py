"""Schedules: who meets whom on the sequence axis, and what travels.

A schedule is a frozen dataclass with two methods over a kernel, run inside `shard_map`:

    forward (kernel, q, k, v, q_coords, kv_coords, *, ranks, mask, scale)                   -> AttentionPartial
    backward(kernel, q, k, v, dout, lse, delta, q_coords, kv_coords, *, ranks, mask, scale) -> dq, dk, dv (float32)

Arrays are a shard's own; `ranks` are the shards of the sequence (`ranks.py`). With one shard there is nobody to talk to,
and every schedule is `Local`.
"""
from __future__ import annotations

from .attention2d import Attention2D
from .balanced import Balanced
from .local import Local
from .ranks import Ranks
from .ring import Ring
from .ulysses import Ulysses

__all__ = ["SCHEDULES", "Attention2D", "Balanced", "Local", "Ranks", "Ring", "Ulysses", "get_schedule"]
SCHEDULES = {"local": Local, "ring": Ring, "balanced": Balanced, "ulysses": Ulysses, "attention2d": Attention2D}


def get_schedule(schedule, size: int):
    """The schedule of this name (or the given one), checked against the number of shards.

    Raises:
      ValueError: an unknown name, or `local` for a sequence axis longer than 1.
    """
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule: found {schedule!r}; known: {', '.join(SCHEDULES)}")
        schedule = SCHEDULES[schedule]()
    if size == 1:
        return Local()
    if isinstance(schedule, Local):
        raise ValueError(f"schedule: 'local' serves a sequence axis of 1, found {size}; 'ring' serves any")
    return schedule
