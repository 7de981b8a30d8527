"""A layer's attention as the cost model sees it, round by round: read from the plan that the schedule itself declares."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from model.attention.coords import Mask
from model.attention.schedules import get_schedule, plan

from .tiles import tile_counts

RESULTS = ("out, lse", "dQ", "dK, dV")


class Round(NamedTuple):
    """Tiles that each rank computes, float [ranks]; the transfers that run under them, and those that are waited for."""

    tiles: np.ndarray
    hidden: tuple[plan.Send, ...]
    exposed: tuple[plan.Send, ...]


def rounds(schedule, ranks: int, layout: str, block: plan.Block, tiles: tuple[int, int],
           causal: bool = True) -> tuple[list[Round], list[Round]]:
    """Forward and backward rounds of one layer's attention.

    A round's permutes run under its kernels, as the schedules' loops are written. What travels in a round without kernels,
    and every other collective, is waited for.

    Args:
      schedule: as `model.attention.attention` takes it; a name, a mapping, or a schedule.
      block: what a rank holds; tiles: query and key tiles of it.

    Raises:
      ValueError: what `get_schedule` and the schedule's plan refuse.
    """
    counts = tile_counts(ranks, *tiles, layout, causal)
    forward, backward = get_schedule(schedule, ranks, layout).plan(ranks, block, Mask(causal))
    return tuple([_round(one, counts, block, tiles) for one in _ahead(passes)] for passes in (forward, backward))


def _ahead(rounds: Sequence[plan.Round]) -> list[plan.Round]:
    """The rounds, each with the permutes that run in it.

    `balanced` lists what a round needs and finds with that round: it is fetched in the round before, and brought home in the
    one after. Such a plan shows by a first round that computes and sends nothing.
    """
    computing = [number for number, one in enumerate(rounds) if one.tasks]
    if len(computing) == 1 or rounds[computing[0]].sends:
        return list(rounds)
    running = [[] for _ in (*rounds, None)]
    for number, one in enumerate(rounds):
        for send in one.sends:
            move = 0 if send.kind != plan.PERMUTE else 1 if send.what in RESULTS else -1
            running[number + move].append(send)
    return [one._replace(sends=tuple(sends)) for one, sends in zip((*rounds, plan.Round(())), running, strict=True)]


def _round(one: plan.Round, counts: np.ndarray, block: plan.Block, tiles: tuple[int, int]) -> Round:
    hidden = tuple(send for send in one.sends if send.kind == plan.PERMUTE and one.tasks)
    return Round(_computed(one.tasks, counts, block, tiles), hidden, tuple(send for send in one.sends if send not in hidden))


def _computed(tasks: Iterable[plan.Task], counts: np.ndarray, block: plan.Block, tiles: tuple[int, int]) -> np.ndarray:
    """Tiles of each rank's tasks, of all heads; the parts of a block are taken to be equal."""
    found = np.zeros(len(counts))
    for task in tasks:
        single = len(task.queries) == len(task.keys) == 1
        met = counts[task.queries[0], task.keys[0]] if single else counts[np.ix_(task.queries, task.keys)].sum()
        if task.dense:
            met = len(task.queries) * len(task.keys) * tiles[0] * tiles[1]
        heads = -(-block.query_heads // task.heads[1]) / block.query_heads  # of padded ones, as many as of others
        found[task.rank] += met * heads * task.products[0] / task.products[1] / task.part[1] / task.key_part[1]
    return found
