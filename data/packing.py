"""One packing plan for the whole data set: which documents share a row, a pure function of lengths, seed and epoch."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

RULES = "packing-1"  # part of the loader's fingerprint: change it with any change of what plan() gives


@dataclass(frozen=True)
class Plan:
    """pieces: int64 [N, 3] of (document, start, length), row after row; starts: int64 [rows + 1], where rows begin."""

    pieces: np.ndarray
    starts: np.ndarray
    context_length: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, number: int) -> tuple[tuple[int, int, int], ...]:
        """The row's pieces (document, start, length), in the order in which they stand in it."""
        return tuple(map(tuple, self.pieces[self.starts[number] : self.starts[number + 1]].tolist()))

    @cached_property
    def rows(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        return tuple(self.row(number) for number in range(len(self)))

    @property
    def padding_share(self) -> float:
        """The share of all places that hold no token, 0..1."""
        places = len(self) * self.context_length
        return 1.0 - float(self.pieces[:, 2].sum()) / places if places else 0.0


def plan(
    lengths: Sequence[int] | np.ndarray,
    context_length: int,
    seed: int,
    epoch: int,
    weights: Sequence[float] | np.ndarray | None = None,
) -> Plan:
    """Packs every token of every document into rows of context_length once (lengths: tokens per document, 0 is
    skipped).

    Documents longer than a row are cut into consecutive pieces. Best fit, the longest piece first, leaves the least
    padding; documents of equal length, the documents within a row and the rows are shuffled by (seed, epoch).
    weights: how often each document comes in an epoch, on average (None: once); 2.5 is twice or three times.
    Raises ValueError for a context length below 1.
    """
    if context_length < 1:
        raise ValueError(f"context_length {context_length} must be at least 1")
    lengths = np.asarray(lengths, np.int64)
    documents = np.arange(len(lengths), dtype=np.int64)
    if weights is not None:
        weights = np.asarray(weights, np.float64)
        chance = _hash(documents, seed, epoch, 3) / 2.0**64
        documents = np.repeat(documents, np.floor(weights + chance).astype(np.int64))
    pieces = _cut(documents, lengths[documents], context_length)
    shuffled = pieces[np.argsort(_hash(np.arange(len(pieces)), seed, epoch, 0), kind="stable")]
    pieces = shuffled[np.argsort(-shuffled[:, 2], kind="stable")]
    row_of, count = _best_fit(pieces[:, 2].tolist(), context_length)
    row_of = np.asarray(row_of, np.int64)
    rank = np.empty(count, np.int64)
    rank[np.argsort(_hash(np.arange(count), seed, epoch, 1), kind="stable")] = np.arange(count)
    order = np.lexsort((_hash(np.arange(len(pieces)), seed, epoch, 2), rank[row_of]))
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(rank[row_of], minlength=count), out=starts[1:])
    return Plan(pieces[order], starts, context_length)


def _cut(documents: np.ndarray, lengths: np.ndarray, context_length: int) -> np.ndarray:
    counts = -(-lengths // context_length)
    document = np.repeat(np.arange(len(documents)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * context_length
    length = np.minimum(lengths[document] - start, context_length)
    return np.stack([documents[document], start, length], axis=1)


def _best_fit(lengths: list[int], context_length: int) -> tuple[list[int], int]:
    """Row of each piece; lengths descend. Rows with room stand sorted by room, oldest first among equals."""
    room: list[tuple[int, int]] = []
    row_of, count = [], 0
    for length in lengths:
        at = bisect_left(room, (length, -1))
        if at < len(room):
            left, row = room.pop(at)
        else:
            left, row = context_length, count
            count += 1
        row_of.append(row)
        if left > length:
            insort(room, (left - length, row))
    return row_of, count


def _hash(numbers: np.ndarray, seed: int, epoch: int, purpose: int) -> np.ndarray:
    """uint64 per number, by splitmix64: numpy promises no stream across its versions, and a resumed run needs one."""
    value = np.asarray(numbers).astype(np.uint64)
    for salt in (purpose, epoch, seed):
        value = _mix(value ^ _mix(np.array([salt % 2**64], np.uint64)))
    return value


def _mix(value: np.ndarray) -> np.ndarray:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
