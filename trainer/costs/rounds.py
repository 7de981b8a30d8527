"""What each schedule computes and sends, round by round: the cost model's own short statement of the schedules.

A round is (tiles that each rank computes, moves, whether the moves run under the kernel). `rounds` is the only door: a
schedule that declares its plan itself can stand in for a function here.
"""
from __future__ import annotations

import dataclasses
import math

import numpy as np

from .hardware import Collective, Send
from .tiles import tile_counts

COORDS, LSE, PARTIAL = 8, 4, 4  # bytes: two int32 of a token; float32 of a query and head; float32 of an accumulator


@dataclasses.dataclass(frozen=True)
class Block:
    """What a rank holds of one layer's queries, keys and values.

    Attributes:
      tokens: in the rank's shard, of one row.
      query_heads, kv_heads, head_dim: of this rank (already split over `tensor`).
      itemsize: bytes of a number on the wire, 2 for bfloat16.
      partial: bytes of a number of a partial result or gradient on the wire; this project sends float32.
    """

    tokens: int
    query_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int = 2
    partial: int = PARTIAL

    @property
    def queries(self) -> float:
        return self.tokens * self.query_heads * self.head_dim * self.itemsize

    @property
    def keys_values(self) -> float:
        return 2 * self.tokens * self.kv_heads * self.head_dim * self.itemsize

    @property
    def coords(self) -> float:
        return self.tokens * COORDS

    @property
    def statistics(self) -> float:
        return self.tokens * self.query_heads * LSE

    @property
    def query_partial(self) -> float:
        """A partial output, or dQ."""
        return self.tokens * self.query_heads * self.head_dim * self.partial

    @property
    def key_value_partial(self) -> float:
        """dK and dV."""
        return 2 * self.tokens * self.kv_heads * self.head_dim * self.partial


@dataclasses.dataclass(frozen=True)
class Round:
    """tiles [ranks] (float: a rank may have a share of the heads), moves, and whether they overlap the kernel."""

    tiles: np.ndarray
    moves: tuple = ()
    hidden: bool = True


def rounds(schedule: str, ranks: int, layout: str, block: Block, tiles: tuple[int, int], *, causal: bool = True,
           bidirectional: bool = False, split: bool = False, degree: int = 0, columns: int = 0,
           overlap: bool = True) -> tuple[list[Round], list[Round]]:
    """Forward and backward rounds of one layer's attention.

    Args:
      schedule: a name in SCHEDULES; `local` for one rank.
      tiles: query and key tiles of a rank's block.
      bidirectional: ring: blocks travel both ways round. split: balanced, even ranks: the last round is shared.
      degree: ulysses: ranks that trade heads (0: all of them). columns: attention2d's grid (0: the fewest bytes).
      overlap: attention2d and ring_self_attention: transfers run under the kernel.

    Raises:
      ValueError: an unknown schedule, or a degree or number of columns that does not divide the ranks.
    """
    if ranks == 1:
        schedule = "local"
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: found {schedule!r}; the cost model knows {', '.join(SCHEDULES)}")
    for name, value in (("degree", degree), ("columns", columns)):
        if value and ranks % value:
            raise ValueError(f"{name}: {value} does not divide {ranks} sequence shards")
    counts = tile_counts(ranks, *tiles, layout, causal)
    options = {"bidirectional": bidirectional, "split": split, "degree": degree, "columns": columns, "overlap": overlap,
               "ordered": layout == "contiguous" and causal, "whole": tiles[0] * tiles[1]}
    return SCHEDULES[schedule](ranks, counts, block, options)


def _local(ranks, counts, block, options):
    return [Round(counts.sum(1))], [Round(counts.sum(1))]


def _shift(ranks: int, by: int, among=None) -> tuple[tuple[int, int], ...]:
    return tuple((p, (p + by) % ranks) for p in (range(ranks) if among is None else among))


def _ring(ranks, counts, block, options):
    """K, V round the ring, one hop a round; dK, dV one hop behind, and one hop home that nothing hides."""
    place = np.arange(ranks)
    met = [counts[place, (place - hop) % ranks] for hop in range(ranks)]
    there, back = _shift(ranks, 1), _shift(ranks, -1)
    kv, dkv = block.keys_values + block.coords, block.key_value_partial
    if options["bidirectional"]:  # half of each block each way: as many hops, of half the bytes on a link
        met = [(tiles + counts[place, (place + hop) % ranks]) / 2 for hop, tiles in enumerate(met)]

    def hop_of(size):
        return (Send(there, size / 2), Send(back, size / 2)) if options["bidirectional"] else (Send(there, size),)

    forward = [Round(tiles, hop_of(kv) if hop < ranks - 1 else ()) for hop, tiles in enumerate(met)]
    backward = []
    for hop, tiles in enumerate(met):
        size = (kv if hop < ranks - 1 else 0) + (dkv if hop > 0 else 0)
        backward.append(Round(tiles, hop_of(size)))
    return forward, [*backward, Round(np.zeros(ranks), hop_of(dkv), hidden=False)]


def _all_gather(ranks, counts, block, options):
    everyone = (tuple(range(ranks)),)
    gather = Collective("gather", everyone, block.keys_values + block.coords)
    nothing, work = np.zeros(ranks), counts.sum(1)
    scatter = Collective("scatter", everyone, block.key_value_partial)
    return ([Round(nothing, (gather,), hidden=False), Round(work)],
            [Round(nothing, (gather,), hidden=False), Round(work), Round(nothing, (scatter,), hidden=False)])


def _balanced(ranks, counts, block, options):
    """DistFlashAttn: owners fetch K, V, helpers fetch queries and send a partial back; dQ, dK, dV likewise.

    A round's results travel under the next round's kernel (Algorithm 2); the last round's under nothing.
    """
    place = np.arange(ranks)
    kv = block.keys_values + block.coords
    forward = [Round(counts[place, place])], block.queries + block.coords, block.query_partial + block.statistics, 0.0
    backward = ([Round(counts[place, place])], 2 * block.queries + 2 * block.statistics + block.coords, block.query_partial,
                block.key_value_partial)
    for done, queries, found, for_keys in (forward, backward):
        late: tuple = ()
        for t in range(1, ranks // 2 + 1):
            fetches, tiles, back = _balanced_round(ranks, counts, t, kv, queries, found, for_keys, options)
            # What the kernel of round t needs is fetched under the kernel of round t - 1.
            done[-1] = dataclasses.replace(done[-1], moves=late + fetches)
            done.append(Round(tiles))
            late = back
        done.append(Round(np.zeros(ranks), late, hidden=False))
    return forward[0], backward[0]


def _balanced_round(ranks, counts, t, kv, queries, found, for_keys, options):
    place, last = np.arange(ranks), 2 * t == ranks
    owned = counts[place, (place - t) % ranks]
    if not options["ordered"]:  # both blocks of a pair of ranks may hold work
        fetches = (Send(_shift(ranks, t), kv),)
        back = (Send(_shift(ranks, -t), for_keys),)
        if last:
            return fetches, owned, back
        return ((*fetches, Send(_shift(ranks, t), queries)), owned + counts[(place - t) % ranks, place],
                (*back, Send(_shift(ranks, -t), found)))
    owners, helpers = range(ranks - t), range(ranks - t, ranks)
    helped = counts[(place - t) % ranks, place]
    tiles = np.where(place >= t, owned, helped)
    fetches = (Send(_shift(ranks, t, owners), kv),)
    back = (Send(_shift(ranks, -t, range(t, ranks)), for_keys),)
    if last and not options["split"]:
        return fetches, np.where(place >= t, owned, 0), back
    share = 0.5 if last else 1.0
    return ((*fetches, Send(_shift(ranks, t, helpers), share * queries)), share * tiles,
            (*back, Send(_shift(ranks, -t, range(t)), share * found)))


def _ulysses(ranks, counts, block, options):
    """Heads for sequence by all-to-all among neighbours; with a degree below the ranks, a ring joins the groups (USP)."""
    degree = options["degree"] or ranks
    outer = ranks // degree
    groups = tuple(tuple(range(first, first + degree)) for first in range(0, ranks, degree))
    # Query heads are padded to a multiple of the degree, key heads replicated as often as the ranks' query heads need.
    here = math.ceil(block.query_heads / degree)
    key_heads = degree * here // math.gcd(here, block.query_heads // block.kv_heads)
    wide = dataclasses.replace(block, query_heads=degree * here, kv_heads=max(block.kv_heads, key_heads))
    inner = dataclasses.replace(wide, tokens=block.tokens * degree, query_heads=here, kv_heads=max(1, wide.kv_heads // degree))
    # A rank has the tiles of its whole group, for its heads only.
    grouped = counts.reshape(outer, degree, outer, degree).sum((1, 3)) * here / block.query_heads
    if outer == 1:
        forward = backward = [Round(np.full(ranks, grouped[0, 0]))]
    else:
        forward, backward = (
            [Round(np.repeat(r.tiles, degree), _spread(r.moves, degree), r.hidden) for r in passes]
            for passes in _ring(outer, grouped, inner, options))
    coords = Collective("gather", groups, block.coords)
    before = wide.queries + wide.keys_values
    before_backward = before + wide.queries + 2 * wide.statistics
    after, gradients = wide.queries + wide.statistics, wide.query_partial + wide.key_value_partial
    nothing = np.zeros(ranks)

    def trade(size, *more):
        return Round(nothing, (Collective("exchange", groups, size), *more), hidden=False)

    return ([trade(before, coords), *forward, trade(after)],
            [trade(before_backward, coords), *backward, trade(gradients)])


def _spread(moves, degree):
    """Moves between groups as moves between their members of one place."""
    return tuple(Send(tuple((s * degree + i, t * degree + i) for s, t in move.pairs for i in range(degree)), move.size)
                 for move in moves)


def _attention2d(ranks, counts, block, options):
    """A grid: queries along rows, K and V along columns, partials back. Rank p stands in row p // C, column p % C."""
    columns = options["columns"] or fewest_bytes(ranks, block)
    lines = ranks // columns
    grid = np.arange(ranks).reshape(lines, columns)
    rows, cols = tuple(map(tuple, grid.tolist())), tuple(map(tuple, grid.T.tolist()))
    # tiles[r, c]: queries of all ranks in row r against keys of all ranks in column c.
    tiles = counts.reshape(lines, columns, ranks).sum(1).reshape(lines, lines, columns).sum(1).reshape(-1)
    kv = Collective("gather", cols, block.keys_values + block.coords)
    queries = Collective("gather", rows, block.queries + block.coords)
    seen = Collective("gather", rows, 2 * block.queries + 2 * block.statistics + block.coords)
    partial = Collective("scatter", rows, block.query_partial + block.statistics)
    dq, dkv = Collective("scatter", rows, block.query_partial), Collective("scatter", cols, block.key_value_partial)
    if options["overlap"]:  # tiled and double-buffered (section 3.4): all of it under the kernel
        return [Round(tiles, (queries, kv, partial))], [Round(tiles, (seen, kv, dq, dkv))]
    nothing = np.zeros(ranks)
    return ([Round(nothing, (queries, kv), hidden=False), Round(tiles), Round(nothing, (partial,), hidden=False)],
            [Round(nothing, (seen, kv), hidden=False), Round(tiles), Round(nothing, (dq, dkv), hidden=False)])


def fewest_bytes(ranks: int, block: Block) -> int:
    """The number of columns for which a rank receives the fewest bytes, forward and backward."""
    def received(columns):
        along_row = 3 * block.queries + 2 * block.query_partial
        along_column = 2 * block.keys_values + block.key_value_partial
        return (columns - 1) * along_row + (ranks // columns - 1) * along_column

    return min((c for c in range(1, ranks + 1) if ranks % c == 0), key=received)


def _ring_self_attention(ranks, counts, block, options):
    """RSA: keys round the ring, then values; every score is computed and kept. Their way through memory is not counted."""
    half = (block.keys_values + block.coords) / 2
    full = np.full(ranks, options["whole"] / 2)  # of one of the two products
    there = _shift(ranks, 1)
    trip = [Round(full, (Send(there, half),) if hop < ranks - 1 else (), hidden=options["overlap"]) for hop in range(ranks)]
    home = Collective("scatter", (tuple(range(ranks)),), block.key_value_partial)
    return 2 * trip, [*2 * trip, Round(np.zeros(ranks), (home,), hidden=False)]


SCHEDULES = {
    "local": _local, "ring": _ring, "all_gather": _all_gather, "balanced": _balanced, "ulysses": _ulysses,
    "attention2d": _attention2d, "ring_self_attention": _ring_self_attention,
}
