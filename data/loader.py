"""Rows of a packing plan as arrays, epoch after epoch; where it stands is a step number and nothing else."""

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache, partial

import numpy as np

from data import packing
from data.batch import ARRAYS
from data.errors import UserError
from data.prepare import Documents, Prepared

RULES = "rows-1"


class Loader:
    """Row r is a pure function of (documents, context_length, seed, r): the same on every process, mesh and resumption.

    prepared: a Prepared (its `split`) or Documents. fingerprint: text that changes when any row or
    batch would; a checkpoint stores (step, fingerprint). len: rows of the first epoch. with_sources: rows also hold
    `source_ids`, the number of each token's source (0 in padding). Raises UserError when the split is empty, ValueError
    for a batch size below 1.
    """

    def __init__(
        self,
        prepared: Prepared | Documents,
        context_length: int,
        batch_size: int,
        seed: int,
        split: str = "train",
        with_sources: bool = False,
    ):
        documents = getattr(prepared, split) if isinstance(prepared, Prepared) else prepared
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size} must be at least 1")
        if not len(documents):
            raise UserError(f"the split {documents.name} holds no document; a larger held_out_fraction would work")
        self.documents = documents
        self.context_length, self.batch_size, self.seed = context_length, batch_size, seed
        self.arrays = {**ARRAYS, **({"source_ids": np.int32} if with_sources else {})}
        # Once each is the common case, and then every epoch has the same number of rows (best fit sees lengths alone).
        self._weights = None if np.all(documents.weights == 1.0) else documents.weights
        self._plan = lru_cache(maxsize=2)(self._make_plan)
        self._ends: list[int] = []  # rows up to the end of each epoch, as far as known; only with weights
        parts = {
            "rules": [RULES, packing.RULES],
            "documents": documents.fingerprint,
            "weights": None if self._weights is None else self._weights.tolist(),
            "context_length": context_length,
            "batch_size": batch_size,
            "seed": seed,
        }
        self.fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def _make_plan(self, epoch: int) -> packing.Plan:
        return packing.plan(self.documents.lengths, self.context_length, self.seed, epoch, self._weights)

    def __len__(self) -> int:
        return len(self._plan(0))

    @property
    def padding_share(self) -> float:
        """Of the first epoch, 0..1."""
        return self._plan(0).padding_share

    def place(self, number: int) -> tuple[int, int]:
        """(epoch, row of its plan) of a global row number."""
        if number < 0:
            raise ValueError(f"row {number} is below 0")
        if self._weights is None:
            return divmod(number, len(self))
        while not self._ends or self._ends[-1] <= number:
            before = self._ends[-1] if self._ends else 0
            self._ends.append(before + len(self._plan(len(self._ends))))
            if len(self._ends) > 100 and self._ends[-1] == 0:
                raise UserError("the sources' weights leave no document in 100 epochs; larger weights would work")
        epoch = int(np.searchsorted(self._ends, number, side="right"))
        return epoch, number - (self._ends[epoch - 1] if epoch else 0)

    def row(self, number: int, whole: bool = True) -> dict[str, np.ndarray]:
        """Global row `number` (endless) as arrays [L] of data.batch.ARRAYS' dtypes, in natural order.

        Unless `whole`, only index and segment_ids are filled in, from the plan alone: another process reads its documents.

        targets: the next token of the same document, 0 with weight 0 where there is none. loss_weights: 1 where the
        *target* is trained on. positions restart per document, index is 0..L-1, segment_ids are 1.. and 0 for padding.
        """
        epoch, place = self.place(number)
        return self._row(self._plan(epoch).row(place), whole)

    def _row(self, pieces, whole: bool = True) -> dict[str, np.ndarray]:
        row = {name: np.zeros(self.context_length, dtype) for name, dtype in self.arrays.items()}
        row["index"][:] = np.arange(self.context_length)
        at = 0
        for segment, (number, start, length) in enumerate(pieces, 1):
            here, before_last = slice(at, at + length), slice(at, at + length - 1)
            row["segment_ids"][here] = segment
            at += length
            if not whole:
                continue
            document = self.documents[number]
            tokens = document.tokens[start : start + length]
            row["tokens"][here] = tokens
            row["targets"][before_last] = tokens[1:]
            row["loss_weights"][before_last] = document.loss_mask[start + 1 : start + length]
            row["positions"][here] = np.arange(length)
            if "source_ids" in row:
                row["source_ids"][here] = document.source
        return row

    def record_ids(self, step: int) -> list[str]:
        """Ids of the records that the rows of a step (0-based) are packed from, in the rows' order, each once."""
        rows = range(step * self.batch_size, (step + 1) * self.batch_size)
        places = [self.place(number) for number in rows]
        pieces = [piece for epoch, place in places for piece in self._plan(epoch).row(place)]
        return list(dict.fromkeys(self.documents[number].record_id for number, _, _ in pieces))

    def batch(self, step: int, rows: frozenset[int] | None = None) -> dict[str, np.ndarray]:
        """The rows of a step (0-based), stacked: arrays [B, L]. rows: those of 0..B-1 that are wanted whole (None: all)."""
        first = step * self.batch_size
        return _stack([self.row(first + place, rows is None or place in rows) for place in range(self.batch_size)])

    def batches(self, start: int = 0, ahead: int = 4, rows: frozenset[int] | None = None) -> Iterator[dict[str, np.ndarray]]:
        """batch(start, rows), batch(start + 1, rows), ... without end, read ahead in the background by grain's threads."""
        import grain

        # A map over step numbers, so that grain has no state worth keeping: the step is the state.
        steps = grain.MapDataset.range(start, 2**31 - 1).map(partial(self.batch, rows=rows))
        options = grain.ReadOptions(num_threads=min(2, ahead), prefetch_buffer_size=ahead)
        return iter(steps.to_iter_dataset(options))

    def epoch_batches(self, epoch: int = 0, rows: frozenset[int] | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Each row of one epoch once, for held-out loss; the last batch is filled up with rows of padding. rows: as batch's."""
        plan = self._plan(epoch)
        for first in range(0, len(plan), self.batch_size):
            chosen = [plan.row(number) for number in range(first, min(first + self.batch_size, len(plan)))]
            chosen += [()] * (self.batch_size - len(chosen))
            yield _stack([self._row(pieces, rows is None or place in rows) for place, pieces in enumerate(chosen)])


def _stack(rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
