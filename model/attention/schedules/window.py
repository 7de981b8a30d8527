"""What sliding windows save with a schedule and layout, and what would save more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..coords import Mask
from . import get_schedule
from .plan import Block, Plan, received


def window_lines(
    schedule: str | Mapping[str, Any], layout: str, size: int, block: Block, masks: Sequence[Mask]
) -> list[str]:
    """Returns a line if keys beyond a window still travel, or hidden scores are still computed;
    else none.

    Args:
      schedule: a name or a mapping, as in `AttentionConfig`.
      size: devices on the sequence axis; block: each one's arrays.
      masks: one per kind of layer, in their repeating order.
    """
    windows = [mask.window for mask in masks if mask.window is not None]
    if not windows or size == 1:
        return []
    mask = Mask(window=max(windows), global_tokens=max(mask.global_tokens for mask in masks))
    layers = (
        "all layers"
        if len(windows) == len(masks)
        else f"{len(windows)} of every {len(masks)} layers"
    )
    name = f"the window of {mask.window:,} tokens in {layers}"
    plan = _plan(schedule, layout, size, block, mask)
    if any(task.dense for each in plan.forward for task in each.tasks):
        return [
            f"attention.schedule {schedule} also computes the scores that {name} hides; other "
            "schedules skip them"
        ]
    if _volume(plan, size) < _volume(_plan(schedule, layout, size, block, Mask()), size):
        return []
    line = f"{name} saves products but no communication"
    reach = mask.reach(block.tokens, size)
    if reach < size - 1 and _volume(_plan("ring", "contiguous", size, block, mask), size) < _volume(
        plan, size
    ):
        devices = "device" if reach == 1 else "devices"
        global_tokens = " and the global tokens" if mask.global_tokens else ""
        line += (
            f"; --attention.schedule ring --attention.layout contiguous receives those of {reach} "
            f"other {devices}{global_tokens} alone"
        )
        if len(windows) < len(masks):
            line += " there, but leaves the layers without a window unbalanced"
    return [line]


def _plan(
    schedule: str | Mapping[str, Any], layout: str, size: int, block: Block, mask: Mask
) -> Plan:
    return get_schedule(schedule, size, layout).plan(size, block, mask)


def _volume(plan: Plan, size: int) -> float:
    """The bytes that all ranks together receive in a forward pass."""
    return float(received(plan.forward, size).sum())
