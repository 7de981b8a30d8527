"""A schedule's plan as plain data: which rank computes which blocks in which round, and what
travels from which rank to which.

`Schedule.plan` returns one for `size` ranks that each hold one `Block`. Plans are independent of
devices: pictures, byte formulas and tests of compiled text use them. Bytes are those that a device
*receives*, by the usual algorithms: in an all-gather over n ranks the shards of the n - 1 others,
in a reduce-scatter n - 1 partial sums of one shard, in an all-to-all (n - 1) / n of the array, and
in an all-reduce what an all-gather and a reduce-scatter receive together.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

PERMUTE = "collective-permute"
GATHER = "all-gather"
SCATTER = "reduce-scatter"
EXCHANGE = "all-to-all"
REDUCE = "all-reduce"
Pairs = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """One rank's shard of q [B, T, Hq, D] and of k and v [B, T, Hkv, D].

    Attributes:
      batch, tokens, query_heads, kv_heads, head_dim: B, T, Hq, Hkv and D.
      itemsize: bytes per element of q, k and v.
      coordinates: arrays in a TokenCoords: 3 if the documents' starts travel for global tokens,
        otherwise 2.
      partial: bytes per element of a partial result or gradient on the wire. This project sends
        float32; other systems modelled with plans may not.
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
        """Bytes of one float32 number per query and head: of lse, or of delta."""
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
    """A kernel call, or a part of one.

    Attributes:
      rank: the rank that computes.
      queries, keys: the ranks that own the blocks of queries and keys, which are concatenated.
      part, key_part: (i, n), the i-th of n equal parts of these queries, of these keys.
      heads: (i, n), the i-th of n equal parts of the heads, padded if n does not divide them.
      products: (i, n), i of the n matrix products of a whole call.
      dense: no tile is skipped, not even hidden ones.
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
    """A transfer.

    Attributes:
      arrays: names of the arrays, for tables and pictures.
      kind: the collective.
      nbytes: the bytes that each pair moves.
      pairs: (source, target) ranks.
    """

    arrays: str
    kind: str
    nbytes: float
    pairs: Pairs


class Round(NamedTuple):
    """The kernel calls of a round, and the transfers that overlap with or follow them."""

    tasks: tuple[Task, ...]
    sends: tuple[Send, ...] = ()


class Plan(NamedTuple):
    """The rounds of both passes of a schedule."""

    forward: tuple[Round, ...]
    backward: tuple[Round, ...]


def received(rounds: Iterable[Round], size: int) -> Float[np.ndarray, " P"]:
    """The bytes that each rank receives."""
    total = np.zeros(size)
    for send in (send for each in rounds for send in each.sends):
        if send.pairs:
            total += send.nbytes * np.bincount([target for _, target in send.pairs], minlength=size)
    return total


def kinds(rounds: Iterable[Round]) -> set[str]:
    """Returns the kinds of the rounds' collectives as in compiled text: collective-permute, ..."""
    return {send.kind for each in rounds for send in each.sends if send.pairs}


def shift(size: int, by: int = 1, senders: Iterable[int] | None = None) -> Pairs:
    """Pairs from every sender (by default all ranks) to the rank `by` steps on round the ring."""
    return tuple(
        (rank, (rank + by) % size) for rank in (range(size) if senders is None else senders)
    )


def everyone(lines: Iterable[Iterable[int]]) -> Pairs:
    """Pairs from every rank to every other rank of its line."""
    return tuple((a, b) for line in map(tuple, lines) for a in line for b in line if a != b)


def groups(pairs: Pairs) -> tuple[tuple[int, ...], ...]:
    """The lines of ranks, in order, from which `everyone` made these pairs."""
    members: dict[int, set[int]] = {}
    for source, target in pairs:
        members.setdefault(source, {source}).add(target)
    return tuple(sorted({tuple(sorted(line)) for line in members.values()}))


def line_size(pairs: Pairs) -> int:
    """The size of the lines from which `everyone` made these pairs, all equal."""
    first = pairs[0][0]
    return 1 + sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == first, pairs))


def lines(size: int, inner: int) -> tuple[list[range], list[range]]:
    """(outer, inner) lines of ranks as in `Ranks.split`: the inner lines are of `inner` neighbours,
    a divisor of `size`.

    lines(8, 4) has the inner lines 0..3 and 4..7, and the outer lines (0, 4), (1, 5), (2, 6) and
    (3, 7).
    """
    return [range(i, size, inner) for i in range(inner)], [
        range(i, i + inner) for i in range(0, size, inner)
    ]


def side_by_side(rounds: Iterable[Round], degree: int) -> tuple[Round, ...]:
    """The rounds of `degree` equal lines at once: rank r of a line stands for the ranks r x degree
    + i, i < degree.

    The block of rank r is the blocks of all these ranks, and each of them computes its part of the
    heads, of which a task of the line may be a part again.
    """

    def blocks(owners):
        return tuple(owner * degree + i for owner in owners for i in range(degree))

    def spread(pairs):
        return tuple((a * degree + i, b * degree + i) for a, b in pairs for i in range(degree))

    return tuple(
        Round(
            tuple(
                task._replace(
                    rank=task.rank * degree + i,
                    queries=blocks(task.queries),
                    keys=blocks(task.keys),
                    heads=(i * task.heads[1] + task.heads[0], degree * task.heads[1]),
                )
                for task in each.tasks
                for i in range(degree)
            ),
            tuple(send._replace(pairs=spread(send.pairs)) for send in each.sends),
        )
        for each in rounds
    )
