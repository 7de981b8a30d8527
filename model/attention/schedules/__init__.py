"""Schedules: who meets whom on the sequence axis, and what travels.

A schedule is a frozen dataclass with two methods over a kernel, run inside `shard_map`:

    forward (kernel, q, k, v, q_coords, kv_coords, *, axis, size, mask, scale)                   -> AttentionPartial
    backward(kernel, q, k, v, dout, lse, delta, q_coords, kv_coords, *, axis, size, mask, scale) -> dq, dk, dv (float32)

Arrays are a shard's own. `axis` is the mesh axis of the sequence and `size` its length; with size 1 there is no axis to
talk over, and every schedule is `Local`.
"""
from __future__ import annotations

from .all_gather import AllGather
from .local import Local
from .ring import Ring

SCHEDULES = {"local": Local, "ring": Ring, "all_gather": AllGather}


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
        raise ValueError(f"schedule: 'local' serves a sequence axis of 1, found {size}; 'ring' and 'all_gather' serve any")
    return schedule
