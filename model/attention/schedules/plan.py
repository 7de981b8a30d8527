"""A schedule's plan as plain data: who computes which blocks in which round, and what travels, from whom to whom.

Every schedule has a method

    plan(size, block, mask=Mask()) -> Plan

for `size` ranks that each hold one `Block`; the mask matters where a window lets a schedule leave ranks out. Nothing here
knows a device: pictures, byte formulas and the tests of compiled texts are made from it. Bytes are those that a device
*receives*, by the usual algorithms: of an all-gather over n ranks the n - 1 others' shards, of a reduce-scatter n - 1 partial
sums of one shard, of an all-to-all (n - 1) / n of the array, of an all-reduce both of the former two.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

PERMUTE, GATHER, SCATTER, EXCHANGE, REDUCE = (
    "collective-permute", "all-gather", "reduce-scatter", "all-to-all", "all-reduce")
Pairs = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """What one rank holds: sizes of its shard of q [B, T, Hq, D] and k, v [B, T, Hkv, D]; itemsize of these in bytes.

    coordinates: arrays in a TokenCoords, 3 where documents' starts travel for global tokens.
    partial: bytes of a number of a partial result or gradient on the wire; here these are float32, elsewhere not always.
    """

    batch: int
    tokens: int
    query_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int = 2
    coordinates: int = 2
    partial: int = 4

    @property
    def coords(self) -> int:
        """Bytes of the coordinates, int32."""
        return self.coordinates * 4 * self.batch * self.tokens

    @property
    def queries(self) -> int:
        """Bytes of q, and of dout."""
        return self.batch * self.tokens * self.query_heads * self.head_dim * self.itemsize

    @property
    def keys(self) -> int:
        """Bytes of k and v."""
        return 2 * self.batch * self.tokens * self.kv_heads * self.head_dim * self.itemsize

    @property
    def statistics(self) -> int:
        """Bytes of one float32 number for each query and head: lse, or delta."""
        return 4 * self.batch * self.tokens * self.query_heads

    @property
    def out(self) -> int:
        """Bytes of a partial output, and of dq."""
        return self.batch * self.tokens * self.query_heads * self.head_dim * self.partial

    @property
    def key_gradients(self) -> int:
        """Bytes of dk and dv."""
        return 2 * self.batch * self.tokens * self.kv_heads * self.head_dim * self.partial


class Task(NamedTuple):
    """One kernel call, or a part of one: the queries and keys of these blocks (named by the ranks that hold them), joined.

    Attributes:
      part, key_part: (i, n): the i-th of n equal parts of these queries, of these keys.
      heads: (i, n): the i-th of n equal parts of the heads, padded where n does not divide them.
      products: (i, n): i of the n matrix products of a whole call.
      dense: nothing is skipped, not even hidden tiles.
    """

    rank: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    part: tuple[int, int] = (0, 1)
    heads: tuple[int, int] = (0, 1)
    key_part: tuple[int, int] = (0, 1)
    products: tuple[int, int] = (1, 1)
    dense: bool = False


class Send(NamedTuple):
    """One transfer: every pair (source, target) moves `nbytes` bytes by a collective of this kind."""

    what: str
    kind: str
    nbytes: float
    pairs: Pairs


class Round(NamedTuple):
    """What happens at one time: kernel calls, and the transfers that are under way or follow from them."""

    tasks: tuple[Task, ...]
    sends: tuple[Send, ...] = ()


class Plan(NamedTuple):
    """Both passes of a schedule."""

    forward: tuple[Round, ...]
    backward: tuple[Round, ...]


def received(rounds: Iterable[Round], size: int) -> np.ndarray:
    """Bytes that each rank receives: float64 [size]."""
    total = np.zeros(size)
    for send in (send for one in rounds for send in one.sends):
        if send.pairs:
            total += send.nbytes * np.bincount([target for _, target in send.pairs], minlength=size)
    return total


def kinds(rounds: Iterable[Round]) -> set[str]:
    """The collectives that appear."""
    return {send.kind for one in rounds for send in one.sends if send.pairs}


def shift(size: int, by: int = 1, senders: Iterable[int] | None = None) -> Pairs:
    """From every one of the senders (all ranks) to the rank `by` places on, round the ring."""
    return tuple((rank, (rank + by) % size) for rank in (range(size) if senders is None else senders))


def everyone(lines: Iterable[Iterable[int]]) -> Pairs:
    """From every rank to every other of its line."""
    return tuple((a, b) for line in map(tuple, lines) for a in line for b in line if a != b)


def groups(pairs: Pairs) -> tuple[tuple[int, ...], ...]:
    """The lines of ranks, each in order, of which `everyone` made these pairs."""
    members: dict[int, set[int]] = {}
    for source, target in pairs:
        members.setdefault(source, {source}).add(target)
    return tuple(sorted({tuple(sorted(line)) for line in members.values()}))


def lines(size: int, inner: int) -> tuple[list[range], list[range]]:
    """(outer, inner) lines of ranks, as `Ranks.split` makes them: neighbours form lines of `inner` ranks."""
    return [range(i, size, inner) for i in range(inner)], [range(i, i + inner) for i in range(0, size, inner)]


def side_by_side(rounds: Iterable[Round], degree: int) -> tuple[Round, ...]:
    """The rounds of `degree` equal lines at once: rank r of such a line stands for the ranks r x degree + i, i < degree.

    What one rank of a line holds there are the blocks of all these ranks, of which each rank computes its part of the heads.
    """
    def blocks(owners):
        return tuple(owner * degree + i for owner in owners for i in range(degree))

    def spread(pairs):
        return tuple((a * degree + i, b * degree + i) for a, b in pairs for i in range(degree))

    return tuple(
        Round(tuple(task._replace(rank=task.rank * degree + i, queries=blocks(task.queries), keys=blocks(task.keys),
                                  heads=(i, degree))
                    for task in one.tasks for i in range(degree)),
              tuple(send._replace(pairs=spread(send.pairs)) for send in one.sends))
        for one in rounds)
