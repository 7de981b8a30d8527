"""Rows of a packing plan as arrays, epoch after epoch; where it stands is a step number and nothing else."""

import hashlib
import json
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
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
        # The loop asks while grain's threads read ahead: one at a time makes a plan, or tells where epochs end.
        self._lock = threading.RLock()
        # Epoch 0, which tells an epoch's length, and two more where what is read ahead has passed the end of one.
        self._plans = lru_cache(maxsize=3)(self._make_plan)
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

    def _plan(self, epoch: int) -> packing.Plan:
        with self._lock:  # lru_cache lets each thread that misses make the plan
            return self._plans(epoch)

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
        with self._lock:
            while not self._ends or self._ends[-1] <= number:
                before = self._ends[-1] if self._ends else 0
                self._ends.append(before + len(self._plan(len(self._ends))))
                if len(self._ends) > 100 and self._ends[-1] == 0:
                    raise UserError("the sources' weights leave no document in 100 epochs; larger weights would work")
            epoch = bisect_right(self._ends, number)
            return epoch, number - (self._ends[epoch - 1] if epoch else 0)

    def row(self, number: int, places: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Global row `number` (endless) as arrays [L] of data.batch.ARRAYS' dtypes, in natural order; or only these of its
        `places`, ascending, [len(places)]: the others are neither made nor, where a document lies in them alone, read.

        targets: the next token of the same document, 0 with weight 0 where there is none. loss_weights: 1 where the
        *target* is trained on. positions restart per document, index is 0..L-1, segment_ids are 1.. and 0 for padding.
        """
        epoch, place = self.place(number)
        return self._row(self._plan(epoch).row(place), places)

    def _row(self, pieces, places: np.ndarray | None = None) -> dict[str, np.ndarray]:
        places = np.arange(self.context_length) if places is None else places
        row = {name: np.zeros(len(places), dtype) for name, dtype in self.arrays.items()}
        row["index"][:] = places
        at = 0
        for segment, (number, start, length) in enumerate(pieces, 1):
            here = slice(*np.searchsorted(places, (at, at + length)))
            inside = places[here] - at
            at += length
            if not len(inside):
                continue
            document = self.documents[number]
            tokens, trained = (x[start : start + length] for x in (document.tokens, document.loss_mask))
            following = np.minimum(inside + 1, length - 1)
            row["segment_ids"][here] = segment
            row["tokens"][here] = tokens[inside]
            row["targets"][here] = np.where(following > inside, tokens[following], 0)
            row["loss_weights"][here] = trained[following] & (following > inside)
            row["positions"][here] = inside
            if "source_ids" in row:
                row["source_ids"][here] = document.source
        return row

    def lengths(self, step: int) -> np.ndarray:
        """Tokens of each document in the rows of a step (0-based), or of each piece of one: int64, from the plan alone."""
        places = [self.place(number) for number in range(step * self.batch_size, (step + 1) * self.batch_size)]
        return np.array([length for epoch, place in places for _, _, length in self._plan(epoch).row(place)], np.int64)

    def record_ids(self, step: int) -> list[str]:
        """Ids of the records that the rows of a step (0-based) are packed from, in the rows' order, each once."""
        rows = range(step * self.batch_size, (step + 1) * self.batch_size)
        places = [self.place(number) for number in rows]
        pieces = [piece for epoch, place in places for piece in self._plan(epoch).row(place)]
        return list(dict.fromkeys(self.documents[number].record_id for number, _, _ in pieces))

    def batch(self, step: int, rows: Sequence[int] | None = None, places: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """The rows of a step (0-based), stacked: arrays [B, L]. rows, places: those that are wanted, ascending (None: all)."""
        first = step * self.batch_size
        return _stack([self.row(first + int(row), places) for row in (range(self.batch_size) if rows is None else rows)])

    def batches(self, start: int = 0, ahead: int = 4, rows: Sequence[int] | None = None, places: np.ndarray | None = None,
                ) -> Iterator[dict[str, np.ndarray]]:  # fmt: skip
        """batch(start, rows, places), ... of step after step without end, read ahead in the background by grain's threads."""
        import grain

        # A map over step numbers, so that grain has no state worth keeping: the step is the state.
        steps = grain.MapDataset.range(start, 2**31 - 1).map(partial(self.batch, rows=rows, places=places))
        options = grain.ReadOptions(num_threads=min(2, ahead), prefetch_buffer_size=ahead)
        return iter(steps.to_iter_dataset(options))

    def epoch_batches(self, epoch: int = 0, rows: Sequence[int] | None = None, places: np.ndarray | None = None,
                      ) -> Iterator[dict[str, np.ndarray]]:  # fmt: skip
        """Each row of one epoch once, for held-out loss; the last batch is filled up with rows of padding. Else as `batch`."""
        plan = self._plan(epoch)
        for first in range(0, len(plan), self.batch_size):
            numbers = range(first, first + self.batch_size) if rows is None else [first + row for row in rows]
            yield _stack([self._row(plan.row(number) if number < len(plan) else (), places) for number in numbers])


def _stack(rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
