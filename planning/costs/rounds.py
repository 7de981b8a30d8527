"""One layer's attention, round by round, from the schedule's plan: tiles and transfers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from model.attention.coords import Mask
from model.attention.schedules import Schedule, get_schedule, plan

from .tiles import tile_counts

# Plans' names for transfers that return results.
RESULTS = ("out, lse", "dQ", "dK, dV")


class Round(NamedTuple):
    """One round of a layer's attention.

    Attributes:
      tiles: float [ranks], the tiles that each rank computes; a tile of all its heads counts as
        one.
      hidden: transfers that run while the kernels do.
      exposed: transfers that are waited for.
    """

    tiles: np.ndarray
    hidden: tuple[plan.Send, ...]
    exposed: tuple[plan.Send, ...]


def rounds(
    schedule: str | Mapping[str, Any] | Schedule,
    ranks: int,
    layout: str,
    block: plan.Block,
    tiles: tuple[int, int],
    mask: Mask = Mask(),
) -> tuple[list[Round], list[Round]]:
    """The forward and the backward rounds of one layer's attention.

    A round's permutes run under its kernels, as in the schedules' loops. All transfers of a round
    without kernels, and all other collectives, are waited for.

    Args:
      schedule: a name, a mapping of a name and options, or a schedule.
      block: the shapes of a rank's arrays.
      tiles: (query tiles, key tiles) of a block.

    Raises:
      ValueError: what `get_schedule` and the schedule's plan refuse.
    """
    return _rounds(get_schedule(schedule, ranks, layout), ranks, layout, block, tiles, mask)


@functools.lru_cache(maxsize=16)
def _rounds(
    schedule: Schedule,
    ranks: int,
    layout: str,
    block: plan.Block,
    tiles: tuple[int, int],
    mask: Mask,
) -> tuple[list[Round], list[Round]]:
    """`rounds`, once for all rates and loads that a step is estimated with."""
    tokens = None if mask.window is None else block.tokens
    counts = tile_counts(ranks, *tiles, layout, mask, tokens)
    forward, backward = schedule.plan(ranks, block, mask)
    return (
        [_round(planned, counts, block, tiles) for planned in _shifted(forward)],
        [_round(planned, counts, block, tiles) for planned in _shifted(backward)],
    )


def _shifted(rounds: Sequence[plan.Round]) -> list[plan.Round]:
    """The rounds, each with the permutes that run in it.

    `balanced` lists a round's inputs and results with it; inputs are fetched one round earlier, and
    results returned one round later. Such a plan is recognized by a first computing round without
    sends.
    """
    computing = [number for number, planned in enumerate(rounds) if planned.tasks]
    if len(computing) == 1 or rounds[computing[0]].sends:
        return list(rounds)
    running: list[list[plan.Send]] = [[] for _ in (*rounds, None)]
    for number, planned in enumerate(rounds):
        for send in planned.sends:
            shift = 0 if send.kind != plan.PERMUTE else 1 if send.arrays in RESULTS else -1
            running[number + shift].append(send)
    return [
        planned._replace(sends=tuple(sends))
        for planned, sends in zip((*rounds, plan.Round(())), running, strict=True)
    ]


def _round(
    planned: plan.Round, counts: np.ndarray, block: plan.Block, tiles: tuple[int, int]
) -> Round:
    hidden = tuple(send for send in planned.sends if send.kind == plan.PERMUTE and planned.tasks)
    exposed = tuple(send for send in planned.sends if send not in hidden)
    return Round(_computed(planned.tasks, counts, block, tiles), hidden, exposed)


def _computed(
    tasks: Iterable[plan.Task], counts: np.ndarray, block: plan.Block, tiles: tuple[int, int]
) -> np.ndarray:
    """The tiles of each rank's tasks, float [ranks]; the parts of a block are taken as equal."""
    computed = np.zeros(len(counts))
    for task in tasks:
        single = len(task.queries) == len(task.keys) == 1
        count = (
            counts[task.queries[0], task.keys[0]]
            if single
            else counts[np.ix_(task.queries, task.keys)].sum()
        )
        if task.dense:
            count = len(task.queries) * len(task.keys) * tiles[0] * tiles[1]
        # Padded heads are computed like others.
        heads = -(-block.query_heads // task.heads[1]) / block.query_heads
        computed[task.rank] += (
            count * heads * task.products[0] / task.products[1] / task.part[1] / task.key_part[1]
        )
    return computed
