"""Schedules: who meets whom on the sequence axis, and what travels.

The contract is `schedule.py`; what a schedule does is also told as plain data (`plan.py`).

Arrays are a shard's own; `ranks` are the shards of the sequence (`ranks.py`). With one shard there is nobody to talk to,
and every schedule is `Local`.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .all_gather import AllGather
from .attention2d import Attention2D
from .balanced import Balanced
from .local import Local
from .ranks import Ranks
from .ring import Ring
from .ring_self_attention import RingSelfAttention
from .schedule import Context, Payload, Schedule
from .ulysses import Ulysses

__all__ = ["SCHEDULES", "AllGather", "Attention2D", "Balanced", "Context", "Local", "Payload", "Ranks", "Ring",
           "RingSelfAttention", "Schedule", "Ulysses", "get_schedule"]
SCHEDULES = {
    "local": Local, "ring": Ring, "all_gather": AllGather, "balanced": Balanced, "ulysses": Ulysses, "attention2d": Attention2D,
    "ring_self_attention": RingSelfAttention,
}


def get_schedule(schedule, size: int, layout: str = "") -> Schedule:
    """The schedule of this name (or the given one), checked against the number of shards.

    Args:
      schedule: a name, a mapping {name: ..., option: value}, or a schedule.
      layout: the layout of the arrays, where it is known; where it is contiguous, `balanced` does half the kernel calls, and
        `ring` and `balanced` leave out ranks beyond a window's reach.

    Raises:
      ValueError: an unknown name or option, an option that makes no sense, or a schedule, at any depth, that cannot serve as
        many shards (`local` serves one alone).
    """
    schedule = _from_options(schedule)
    if layout == "contiguous":
        schedule = _ordered(schedule)
    if size == 1:
        return Local()
    schedule.check(size)
    return schedule


def _ordered(schedule):
    """The schedule, told that shards hold runs of tokens in the order of ranks; so do the groups of an inner schedule."""
    told = {"ordered": True} if hasattr(schedule, "ordered") else {}
    inner = {"inner": _ordered(schedule.inner)} if hasattr(schedule, "inner") else {}
    return dataclasses.replace(schedule, **told, **inner)


def _from_options(schedule, where: str = "schedule") -> Schedule:
    """A schedule from its name, from a mapping, or as it is; `where` it stands in a recipe."""
    if isinstance(schedule, Schedule):
        return schedule
    options = dict(schedule) if isinstance(schedule, Mapping) else {"name": schedule}
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ValueError(f"{where}: found {name!r}; known: {', '.join(SCHEDULES)}")
    known = [field.name for field in dataclasses.fields(SCHEDULES[name]) if field.name != "ordered"]
    for option in options:
        if option not in known:
            raise ValueError(f"{where}.{option}: {name} has no such option; it has: {', '.join(known) or 'none'}")
    if "inner" in options:
        options["inner"] = _from_options(options["inner"], f"{where}.inner")
    return SCHEDULES[name](**options)
