"""The packing plan of an epoch: a pure function of lengths, seed and epoch to rows of pieces."""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int64, UInt64

from data.splitmix import splitmix64

RULES = "packing-1"  # part of the loader's fingerprint: change it with every change to the plans
# Part of it only if a weight is not whole: change it with every change to `visits`.
WEIGHT_RULES = "weights-2"
# 2^64 divided by the golden ratio: modulo 2^64, its multiples by consecutive numbers are spread
# almost evenly.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Piece(NamedTuple):
    """Consecutive tokens of a document."""

    document: int
    start: int
    length: int


@dataclass(frozen=True)
class Plan:
    """The rows of one epoch."""

    pieces: Int64[np.ndarray, "N 3"]
    """(document, start, length) of each Piece, row after row."""
    starts: Int64[np.ndarray, " R+1"]
    """Index of each row's first piece, then N."""
    context_length: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, number: int) -> tuple[Piece, ...]:
        """Returns the pieces of a row in their order."""
        return tuple(
            map(Piece._make, self.pieces[self.starts[number] : self.starts[number + 1]].tolist())
        )

    @property
    def documents(self) -> Int64[np.ndarray, " N"]:
        """The document of each piece."""
        return self.pieces[:, 0]

    @property
    def padding_share(self) -> float:
        """Share of the rows' tokens that are padding, 0..1."""
        size = len(self) * self.context_length
        return 1.0 - float(self.pieces[:, 2].sum()) / size if size else 0.0


def plan(
    lengths: Sequence[int] | Int[np.ndarray, " D"],
    context_length: int,
    seed: int,
    epoch: int,
    weights: Sequence[float] | Float[np.ndarray, " D"] | None = None,
) -> Plan:
    """Packs all tokens of the documents into rows of context_length, repeated by their weights.

    Documents longer than a row are cut into consecutive pieces, which are packed best fit
    decreasing, leaving little padding. (seed, epoch) shuffle documents of equal length, the pieces
    within a row, and the rows.

    Args:
      lengths: number of tokens of each of D documents; documents of 0 tokens are skipped.
      context_length: number of tokens of a row.
      seed: seed of the order.
      epoch: number of the epoch, from 0.
      weights: average number of times each document is used in an epoch, see `visits`.

    Raises:
      ValueError: context_length is below 1.
    """
    if context_length < 1:
        raise ValueError(f"context_length {context_length} must be at least 1")
    lengths = np.asarray(lengths, np.int64)
    documents = np.arange(len(lengths), dtype=np.int64)
    if weights is not None:
        weights, counts = np.asarray(weights, np.float64), np.zeros(len(documents), np.int64)
        for weight in np.unique(weights).tolist():
            same = np.flatnonzero(weights == weight)
            counts[same] = visits(same, weight, seed, epoch)
        documents = np.repeat(documents, counts)
    return packed(documents, lengths[documents], context_length, seed, epoch)


def visits(
    documents: Int64[np.ndarray, " D"], weight: float, seed: int, epoch: int
) -> Int64[np.ndarray, " D"]:
    """Returns how many times an epoch uses each of these documents.

    The first E epochs together use a document E * weight times, rounded up or down: with 0.5 in
    every second epoch, with 2.5 two and three times in turn. Each document has a phase, which says
    where in this pattern it begins. Phases of consecutive documents are spread evenly, so every
    epoch has the same share, to within a few documents, of any stretch of them, such as a source.
    """
    phases = documents.astype(np.uint64) * _GOLDEN + random_numbers(np.arange(1), seed, 0, 3)
    # The decimal that the user wrote: binary fractions would err after many epochs.
    exact = Fraction(repr(weight))
    return _visits_before(epoch + 1, exact, phases) - _visits_before(epoch, exact, phases)


def _visits_before(
    epoch: int, weight: Fraction, phases: UInt64[np.ndarray, " D"]
) -> Int64[np.ndarray, " D"]:
    """Returns floor(weight * epoch + phase / 2^64) for each phase, computed exactly."""
    whole, rest = divmod(weight * epoch, 1)
    return whole + (phases > math.ceil((1 - rest) * 2**64) - 1).astype(np.int64)


def packed(
    documents: Int64[np.ndarray, " D"],
    lengths: Int64[np.ndarray, " D"],
    context_length: int,
    seed: int,
    epoch: int,
) -> Plan:
    """Packs documents, each of which may occur several times; see `plan`."""
    pieces = _cut(documents, lengths, context_length)
    shuffled = pieces[
        np.argsort(random_numbers(np.arange(len(pieces)), seed, epoch, 0), kind="stable")
    ]
    pieces = shuffled[np.argsort(-shuffled[:, 2], kind="stable")]
    rows, count = _best_fit(pieces[:, 2].tolist(), context_length)
    shuffled_rows = np.empty(count, np.int64)
    shuffled_rows[np.argsort(random_numbers(np.arange(count), seed, epoch, 1), kind="stable")] = (
        np.arange(count)
    )
    row_of_piece = shuffled_rows[np.asarray(rows, np.int64)]
    order = np.lexsort((random_numbers(np.arange(len(pieces)), seed, epoch, 2), row_of_piece))
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(row_of_piece, minlength=count), out=starts[1:])
    return Plan(pieces[order], starts, context_length)


def _cut(
    documents: Int64[np.ndarray, " D"], lengths: Int64[np.ndarray, " D"], context_length: int
) -> Int64[np.ndarray, "N 3"]:
    """Returns (document, start, length) of consecutive pieces of at most context_length tokens."""
    counts = -(-lengths // context_length)
    entry = np.repeat(np.arange(len(documents)), counts)
    number_in_document = np.arange(len(entry)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number_in_document * context_length
    length = np.minimum(lengths[entry] - start, context_length)
    return np.stack([documents[entry], start, length], axis=1)


def _best_fit(lengths: list[int], context_length: int) -> tuple[list[int], int]:
    """Puts each piece into the row where it leaves the least space; ties go to the oldest.

    Args:
      lengths: lengths of the pieces, in descending order.
      context_length: number of tokens of a row.

    Returns:
      The row of each piece, and the number of rows.
    """
    free: list[tuple[int, int]] = []  # (free tokens, row), sorted
    rows, count = [], 0
    for length in lengths:
        index = bisect_left(free, (length, -1))
        if index < len(free):
            available, row = free.pop(index)
        else:
            available, row = context_length, count
            count += 1
        rows.append(row)
        if available > length:
            insort(free, (available - length, row))
    return rows, count


def random_numbers(
    numbers: Int[np.ndarray, " N"], seed: int, epoch: int, purpose: int
) -> UInt64[np.ndarray, " N"]:
    """Returns a pseudorandom number for each number.

    Uses splitmix64: numpy does not promise the same random stream in all versions, which a resumed
    run needs.
    """
    value = np.asarray(numbers).astype(np.uint64)
    for salt in (purpose, epoch, seed):
        value = splitmix64(value ^ splitmix64(np.array([salt % 2**64], np.uint64)))
    return value
