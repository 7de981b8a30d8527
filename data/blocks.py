"""The packing plan of very many documents, in blocks, so that memory does not grow with their
number.

Every source is cut into equal chunks of consecutive documents. A block takes the same number of
chunks from each source, in an order shuffled by (seed, epoch), and is packed separately. Rows are
those of one block after another. So sources are mixed as in the whole, and during a block only its
chunks, a few shards, are read.
"""

import threading
from bisect import bisect_left, insort
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from jaxtyping import Float64, Int, Int32, Int64

from data import packing
from data.packing import Piece, Plan

RULES = "blocks-1"  # part of the loader's fingerprint: change it with every change to the plans
# Up to these numbers, all documents are packed together.
MOST_DOCUMENTS, MOST_TOKENS = 1 << 22, 1 << 32
# In a block, before weights repeat documents: a few gigabytes on disk.
BLOCK, BLOCK_TOKENS = 1 << 20, 1 << 30
CHUNKS = 4  # of each source in a block
_CHUNK_ORDER, _BLOCK_SEED = 4, 5  # purposes of numbers, after those of `packing`


def needed(lengths: Int32[np.ndarray, " D"]) -> bool:
    """Returns whether documents of these lengths are packed in blocks."""
    return len(lengths) > MOST_DOCUMENTS or int(lengths.sum(dtype=np.int64)) > MOST_TOKENS


class BlockedPlan:
    """The rows of one epoch; keeps the plans of two blocks, some 200 MB each."""

    def __init__(
        self,
        lengths: Int32[np.ndarray, " D"],
        source_starts: Int64[np.ndarray, " S+1"],
        context_length: int,
        seed: int,
        epoch: int,
        weights: Float64[np.ndarray, " S"] | None = None,
    ):
        """Counts the rows of every block.

        Args:
          lengths: number of tokens of each document, source after source.
          source_starts: number of each source's first document, then D.
          context_length: number of tokens of a row.
          seed: seed of the order.
          epoch: number of the epoch, from 0.
          weights: average number of times each source's documents are used in an epoch, see
            `packing.visits`.
        """
        self.context_length = context_length
        self._lengths, self._starts, self._weights = lengths, source_starts, weights
        self._seed, self._epoch = seed, epoch
        tokens = int(lengths.sum(dtype=np.int64))
        self._blocks = max(-(-len(lengths) // BLOCK), -(-tokens // BLOCK_TOKENS))
        self._chunks = np.stack(
            [self._chunk_order(source) for source in range(len(source_starts) - 1)]
        )
        rows, self._tokens = [0], 0
        for block in range(self._blocks):
            block_lengths = lengths[self.documents_of(block)].astype(np.int64)
            self._tokens += int(block_lengths.sum())
            rows.append(count_rows(block_lengths, context_length))
        self._ends = np.cumsum(rows)  # of rows before each block, then of all
        self._lock = threading.Lock()  # against two threads that make the same plan
        self._plan = lru_cache(maxsize=2)(self._make_plan)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def row(self, number: int) -> tuple[Piece, ...]:
        """Returns the pieces of a row in their order."""
        block = int(np.searchsorted(self._ends, number, "right")) - 1
        with self._lock:
            plan = self._plan(block)
        return plan.row(number - int(self._ends[block]))

    @property
    def padding_share(self) -> float:
        """Share of the rows' tokens that are padding, 0..1."""
        size = len(self) * self.context_length
        return 1.0 - self._tokens / size if size else 0.0

    @property
    def documents(self) -> Int64[np.ndarray, " N"]:
        """The documents of all rows, in no particular order."""
        return np.concatenate([self.documents_of(block) for block in range(self._blocks)])

    def documents_of(self, block: int) -> Int64[np.ndarray, " N"]:
        """Returns the documents of a block, repeated by their weights."""
        return np.concatenate(list(self._document_chunks(block)))

    def _document_chunks(self, block: int) -> Iterator[Int64[np.ndarray, " n"]]:
        count = self._blocks * CHUNKS
        for source, order in enumerate(self._chunks):
            first, stop = self._starts[source : source + 2].tolist()
            for chunk in order[block * CHUNKS : (block + 1) * CHUNKS].tolist():
                bounds = [first + (stop - first) * edge // count for edge in (chunk, chunk + 1)]
                documents = np.arange(*bounds, dtype=np.int64)
                if self._weights is not None:
                    weight = float(self._weights[source])
                    counts = packing.visits(documents, weight, self._seed, self._epoch)
                    documents = np.repeat(documents, counts)
                yield documents

    def _chunk_order(self, source: int) -> Int64[np.ndarray, " chunks"]:
        count = self._blocks * CHUNKS
        numbers = np.arange(source * count, (source + 1) * count)
        hashes = packing.random_numbers(numbers, self._seed, self._epoch, _CHUNK_ORDER)
        return np.argsort(hashes, kind="stable")

    def _make_plan(self, block: int) -> Plan:
        seed = packing.random_numbers(np.array([block]), self._seed, self._epoch, _BLOCK_SEED)
        documents = self.documents_of(block)
        lengths = self._lengths[documents].astype(np.int64)
        return packing.packed(documents, lengths, self.context_length, int(seed[0]), self._epoch)


def count_rows(lengths: Int[np.ndarray, " N"], context_length: int) -> int:
    """Returns how many rows `packing.plan` makes of documents of these lengths.

    Best fit fills one row after another with pieces of the same length, so equal pieces and rows
    with equal space are counted together.
    """
    whole, rest = np.divmod(lengths, context_length)
    rows = int(whole.sum())
    counts = np.bincount(rest, minlength=1)
    counts[0] = 0
    space = _Space()
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            free, available = space.smallest(length) or (context_length, left)
            fits = free // length
            filled, partly = min(available, left // fits), 0
            left -= filled * fits
            if filled < available and left:  # so fewer than fit
                partly, left = left, 0
            used = filled + bool(partly)
            if free == context_length:
                rows += used
            else:
                space.add(free, -used)
            space.add(free - fits * length, filled)
            space.add(free - partly * length, bool(partly))
    return rows


class _Space:
    """The number of rows by space left."""

    def __init__(self) -> None:
        self._sizes: list[int] = []  # sorted
        self._rows: dict[int, int] = {}

    def smallest(self, least: int) -> tuple[int, int] | None:
        """Returns the smallest space of at least this size, and the number of such rows."""
        index = bisect_left(self._sizes, least)
        if index == len(self._sizes):
            return None
        return self._sizes[index], self._rows[self._sizes[index]]

    def add(self, size: int, rows: int) -> None:
        """Adds rows with this space, or removes them."""
        if not size or not rows:
            return
        if size not in self._rows:
            insort(self._sizes, size)
        self._rows[size] = self._rows.get(size, 0) + rows
        if not self._rows[size]:
            del self._rows[size]
            self._sizes.remove(size)
