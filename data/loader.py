"""Rows of the packing plans as arrays, epoch after epoch; the step number is the only state."""

import hashlib
import json
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, cast

import numpy as np
from jaxtyping import Float64, Int, Int64

from data import blocks, packing
from data.batch import Batch, dtypes
from data.blocks import BlockedPlan
from data.errors import UserError
from data.packing import Piece
from data.prepared import Documents, Prepared

LOOK_AHEAD = 16  # steps for which documents are copied from a store in advance
RULES = "rows-1"  # part of the fingerprint: change it with every change to the rows of a plan


class PlanRow(NamedTuple):
    """A row of an epoch's plan."""

    epoch: int
    row: int


class Loader:
    """Loads batches of packed rows.

    Row r is a pure function of (documents, context_length, seed, r): the same in every process, on
    every mesh and after every resumption. len() is the number of rows of the first epoch.
    """

    fingerprint: str
    """Changes when any batch would change; a checkpoint stores it with the step."""
    end: int | None = None
    """The number of rows that are used, counted over all epochs: later ones are empty, so that the
    last batch may have fewer; None for all. It does not affect the fingerprint."""

    def __init__(
        self,
        prepared: Prepared | Documents,
        context_length: int,
        batch_size: int,
        seed: int,
        split: str = "train",
        with_sources: bool = False,
    ):
        """Makes a loader.

        Args:
          prepared: the prepared data, of which `split` is loaded; or the documents themselves.
          context_length: number of tokens L of a row.
          batch_size: number of rows B of a batch.
          seed: seed of the order.
          split: `train` or `held_out`.
          with_sources: whether rows contain source_ids.

        Raises:
          UserError: the split contains no document.
          ValueError: the batch size is below 1.
        """
        documents = getattr(prepared, split) if isinstance(prepared, Prepared) else prepared
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size} must be at least 1")
        if not len(documents):
            raise UserError(
                f"the split {documents.name} holds no document; a larger held_out_fraction would "
                "work"
            )
        self.documents = documents
        self.context_length, self.batch_size, self.seed = context_length, batch_size, seed
        self._dtypes = dtypes(with_sources)
        self._in_blocks = blocks.needed(documents.row_lengths)
        self._weights = self._weights_of(documents)
        # Without weights, every epoch has the same number of rows, because best fit depends only on
        # lengths; not in blocks, which differ between epochs.
        self._same_size = self._weights is None and not self._in_blocks
        # The training loop and grain's read-ahead threads use the plans at the same time.
        self._lock = threading.RLock()
        # Epoch 0, for the length of an epoch, and two more while reading ahead passes an epoch's
        # end.
        self._plans = lru_cache(maxsize=3)(self._make_plan)
        # The number of rows up to the end of each epoch so far; used only if epochs differ.
        self._epoch_ends: list[int] = []
        self.fingerprint = self._make_fingerprint()

    def _weights_of(self, documents: Documents) -> Float64[np.ndarray, " N"] | None:
        """Returns the weight of each document, or of each source for a plan in blocks; None if all
        are 1."""
        if documents.equally_often:
            return None
        return documents.source_weights if self._in_blocks else documents.weights

    def _make_fingerprint(self) -> str:
        rules = [RULES, packing.RULES, *([blocks.RULES] if self._in_blocks else [])]
        if self._weights is not None and (self._weights % 1).any():
            rules.append(packing.WEIGHT_RULES)
        parts = {
            "rules": rules,
            "documents": self.documents.fingerprint,
            "weights": None if self._weights is None else self._weights.tolist(),
            "context_length": self.context_length,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def _make_plan(self, epoch: int) -> packing.Plan | BlockedPlan:
        lengths, length = self.documents.row_lengths, self.context_length
        if not self._in_blocks:
            return packing.plan(lengths, length, self.seed, epoch, self._weights)
        starts = self.documents.source_starts
        return BlockedPlan(lengths, starts, length, self.seed, epoch, self._weights)

    def _plan(self, epoch: int) -> packing.Plan | BlockedPlan:
        with self._lock:  # lru_cache would let several threads compute the same plan
            return self._plans(epoch)

    def __len__(self) -> int:
        return len(self._plan(0))

    @property
    def padding_share(self) -> float:
        """Share of the first epoch's tokens that are padding, 0..1."""
        return self._plan(0).padding_share

    def locate(self, number: int) -> PlanRow:
        """Returns the epoch of a row, counted over all epochs, and its number in the plan."""
        if number < 0:
            raise ValueError(f"row {number} is below 0")
        if self._same_size:
            return PlanRow(*divmod(number, len(self)))
        with self._lock:
            ends = self._epoch_ends
            while not ends or ends[-1] <= number:
                ends.append((ends[-1] if ends else 0) + len(self._plan(len(ends))))
                if len(ends) > 100 and ends[-1] == 0:
                    weights = self.documents.source_weights
                    raise UserError(
                        f"data.sources: their weights, {weights.min():g} to "
                        f"{weights.max():g}, leave no document in 100 epochs; larger ones "
                        "would work"
                    )
            epoch = bisect_right(ends, number)
            return PlanRow(epoch, number - (ends[epoch - 1] if epoch else 0))

    def _pieces(self, number: int) -> tuple[Piece, ...]:
        """Returns the pieces of a row, counted over all epochs."""
        if self.end is not None and number >= self.end:
            return ()
        epoch, row = self.locate(number)
        return self._plan(epoch).row(row)

    def _numbers(self, step: int, rows: Sequence[int] | None = None) -> list[int]:
        """Returns the numbers of a step's rows, or of some of them, counted over all steps."""
        chosen = range(self.batch_size) if rows is None else rows
        return [step * self.batch_size + int(row) for row in chosen]

    def _step_pieces(self, step: int, rows: Sequence[int] | None = None) -> Iterator[Piece]:
        """Yields the pieces of a step's rows, or of some of them, in their order."""
        for number in self._numbers(step, rows):
            yield from self._pieces(number)

    def row(self, number: int, indices: Int[np.ndarray, " T"] | None = None) -> Batch:
        """Returns one row as arrays [L], or only some of its tokens as arrays [T].

        Args:
          number: the row's number, counted over all epochs.
          indices: indices in the row of the tokens to return, ascending; all if None. Documents
            entirely elsewhere are not read.
        """
        return self._row_arrays(self._pieces(number), indices)

    def _row_arrays(
        self, pieces: Sequence[Piece], indices: Int[np.ndarray, " T"] | None = None
    ) -> Batch:
        indices = np.arange(self.context_length) if indices is None else indices
        row = {name: np.zeros(len(indices), dtype) for name, dtype in self._dtypes.items()}
        row["index"][:] = indices
        piece_start = 0
        for segment, piece in enumerate(self._documents(pieces), 1):
            tokens_of_piece = slice(
                *np.searchsorted(indices, (piece_start, piece_start + piece.length))
            )
            positions = indices[tokens_of_piece] - piece_start
            piece_start += piece.length
            if len(positions):
                for name, values in self._piece_arrays(piece, positions).items():
                    row[name][tokens_of_piece] = values
                row["segment_ids"][tokens_of_piece] = segment
        return cast(Batch, row)

    def _documents(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        """Yields a row's pieces as separate documents, which cannot attend to each other."""
        yield from pieces

    def _piece_arrays(
        self, piece: Piece, positions: Int[np.ndarray, " t"]
    ) -> dict[str, np.ndarray | int]:
        """Returns the tokens at these positions of a piece, as values for a row's arrays."""
        document = self.documents[piece.document]
        tokens, trained = (
            x[piece.start : piece.start + piece.length]
            for x in (document.tokens, document.loss_mask)
        )
        following = np.minimum(positions + 1, piece.length - 1)
        has_target = following > positions
        arrays = {
            "tokens": tokens[positions],
            "targets": np.where(has_target, tokens[following], 0),
            "loss_weights": trained[following] & has_target,
            "positions": positions,
        }
        return {**arrays, "source_ids": document.source} if "source_ids" in self._dtypes else arrays

    def lengths(self, step: int) -> Int64[np.ndarray, " D"]:
        """Returns the tokens of each document, or piece of one, in the rows of a step (from 0).

        Reads only the plan, no document.
        """
        pieces = self._documents(list(self._step_pieces(step)))
        return np.array([piece.length for piece in pieces], np.int64)

    def record_ids(self, step: int) -> list[str]:
        """Returns the ids of the records in a step's rows (from 0), in order, each once."""
        documents = (self.documents[piece.document] for piece in self._step_pieces(step))
        return list(dict.fromkeys(document.record_id for document in documents))

    def batch(
        self,
        step: int,
        rows: Sequence[int] | None = None,
        indices: Int[np.ndarray, " T"] | None = None,
    ) -> Batch:
        """Returns the rows of a step as arrays [B, L].

        Args:
          step: number of the step, from 0.
          rows: which of the step's rows to return, ascending; all if None.
          indices: see `row`.
        """
        return _stack([self.row(number, indices) for number in self._numbers(step, rows)])

    def batches(
        self,
        start: int = 0,
        ahead: int = 4,
        rows: Sequence[int] | None = None,
        indices: Int[np.ndarray, " T"] | None = None,
    ) -> Iterator[Batch]:
        """Returns an endless iterator over batch(start, rows, indices), batch(start + 1, ...), ...

        Threads of grain make up to `ahead` batches in advance.
        """
        import grain

        self._prefetch(range(start, start + LOOK_AHEAD), rows)
        # Mapped over step numbers, the dataset's only state is the step.
        steps = grain.MapDataset.range(start, 2**31 - 1).map(
            partial(self._batch_and_prefetch, rows=rows, indices=indices)
        )
        options = grain.ReadOptions(num_threads=min(2, ahead), prefetch_buffer_size=ahead)
        return iter(steps.to_iter_dataset(options))

    def _batch_and_prefetch(
        self, step: int, rows: Sequence[int] | None, indices: Int[np.ndarray, " T"] | None
    ) -> Batch:
        self._prefetch([step + LOOK_AHEAD], rows)
        return self.batch(step, rows, indices)

    def _prefetch(self, steps: Iterable[int], rows: Sequence[int] | None) -> None:
        """Starts copying the documents of some steps' rows to this machine, if they are in a
        store."""
        if self.documents.cache is not None:
            pieces = [piece for step in steps for piece in self._step_pieces(step, rows)]
            self.documents.prefetch([piece.document for piece in pieces])

    def epoch_batches(
        self,
        epoch: int = 0,
        rows: Sequence[int] | None = None,
        indices: Int[np.ndarray, " T"] | None = None,
    ) -> Iterator[Batch]:
        """Yields every row of an epoch once, in batches; padding fills the last one.

        For the held-out loss; `rows` and `indices` as in `batch`.
        """
        plan = self._plan(epoch)
        for step in range(-(-len(plan) // self.batch_size)):
            pieces = [
                plan.row(number) if number < len(plan) else ()
                for number in self._numbers(step, rows)
            ]
            yield _stack([self._row_arrays(of_row, indices) for of_row in pieces])


def _stack(rows: Sequence[Batch]) -> Batch:
    arrays = cast("Sequence[dict[str, np.ndarray]]", rows)
    return cast(Batch, {name: np.stack([row[name] for row in arrays]) for name in arrays[0]})
