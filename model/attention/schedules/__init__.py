"""Schedules: which ranks compute which blocks of attention when, and what travels; the contract is
in `schedule.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .all_gather import AllGather
from .attention2d import Attention2D
from .balanced import Balanced
from .local import Local
from .ranks import Ranks
from .ring import Ring
from .ring_self_attention import RingSelfAttention
from .schedule import Context, Payload, Schedule
from .ulysses import Ulysses

__all__ = [
    "SCHEDULES",
    "AllGather",
    "Attention2D",
    "Balanced",
    "Context",
    "Local",
    "Payload",
    "Ranks",
    "Ring",
    "RingSelfAttention",
    "Schedule",
    "Ulysses",
    "get_schedule",
    "in_any_layout",
]
SCHEDULES: dict[str, type[Schedule]] = {
    "local": Local,
    "ring": Ring,
    "all_gather": AllGather,
    "balanced": Balanced,
    "ulysses": Ulysses,
    "attention2d": Attention2D,
    "ring_self_attention": RingSelfAttention,
}


def get_schedule(
    schedule: str | Mapping[str, Any] | Schedule, size: int, layout: str = ""
) -> Schedule:
    """A schedule by name or by options, checked against the number of ranks; `Local` for a single
    rank.

    Args:
      schedule: a name, a mapping {name: ..., option: value}, or a schedule.
      size: the ranks of the sequence axis.
      layout: the layout of the arrays, if known. In a contiguous one `balanced` needs half the
        kernel calls, and `ring` and `balanced` skip ranks beyond a window's reach.

    Raises:
      ValueError: an unknown name or option, an invalid value, or a schedule, at any depth, that
        cannot serve `size` ranks.
    """
    schedule = _from_options(schedule)
    if layout == "contiguous":
        schedule = _ordered(schedule)
    if size == 1:
        return Local()
    schedule.check(size)
    return schedule


def in_any_layout(schedule: Any) -> Any:
    """Returns the schedule made exact for any layout; names and options are returned unchanged."""
    return _ordered(schedule, False) if isinstance(schedule, Schedule) else schedule


def _ordered(schedule: Any, ordered: bool = True) -> Schedule:
    """The schedule for shards that are runs of tokens in rank order, or else for any; likewise its
    inner schedule, if any."""
    changes: dict[str, Any] = {"ordered": ordered} if hasattr(schedule, "ordered") else {}
    if hasattr(schedule, "inner"):
        changes["inner"] = _ordered(schedule.inner, ordered)
    return dataclasses.replace(schedule, **changes)


def _from_options(schedule: Any, field: str = "schedule") -> Schedule:
    """A schedule from a name, a mapping or itself; `field` is its field in a recipe, for
    messages."""
    if isinstance(schedule, Schedule):
        return schedule
    options = dict(schedule) if isinstance(schedule, Mapping) else {"name": schedule}
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ValueError(f"{field}: found {name!r}; known: {', '.join(SCHEDULES)}")
    valid = [
        option.name
        for option in dataclasses.fields(SCHEDULES[name])  # type: ignore[arg-type]
        if option.name != "ordered"
    ]
    for option in options:
        if option not in valid:
            raise ValueError(
                f"{field}.{option}: {name} has no such option; it has: {', '.join(valid) or 'none'}"
            )
    if "inner" in options:
        options["inner"] = _from_options(options["inner"], f"{field}.inner")
    return SCHEDULES[name](**options)
