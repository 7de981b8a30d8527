"""Rows of preference pairs: both completions of a pair in one row, each a document after its
prompt.

If documents share the prompt (`data.prepared.Documents.shared`), the row has it once: the second
document begins with the prompt's last token, sees the beginning of the first one, and continues its
positions. For a labelled completion the second document is its prompt with another record's
completion.
"""

from collections.abc import Iterator, Sequence
from typing import NotRequired, cast

import numpy as np
from jaxtyping import Float32, Int, Int32, Int64

from data.batch import Batch
from data.loader import Loader
from data.packing import Piece
from data.prepared import Documents


class PairBatch(Batch):
    """A batch with arrays for each row's P slots for pairs; completion c of pair p is document 2 p
    + c + 1."""

    shared: NotRequired[Int32[np.ndarray, "*B L"]]
    """For shared prompts: the pair's number, from 1, for a prompt's tokens, minus that for the
    second document's, 0 for others; see `model.attention.TokenCoords`."""
    pairs: Float32[np.ndarray, "*B P"]
    """1 if there is a pair, otherwise 0."""
    references: NotRequired[Float32[np.ndarray, "*B P 2"]]
    """Log-likelihoods of the chosen and the rejected completion under the reference."""
    chosen_shares: NotRequired[Float32[np.ndarray, "*B P"]]
    """The whole batch's pairs over its trained tokens of chosen completions: the weight that turns
    a sum over a completion's tokens into a mean over the batch's tokens, given that losses are
    divided by the number of pairs."""

    labels: NotRequired[Float32[np.ndarray, "*B P"]]
    """1 if a labelled completion is desirable, otherwise 0."""
    label_shares: NotRequired[Float32[np.ndarray, "*B P 2"]]
    """The weights that turn values of labelled completions into means over the whole batch's
    desirable, and undesirable, ones, given that sums are divided by the number of pairs; NaN if the
    batch has none."""


PAIR_ARRAYS = ("pairs", "references", "chosen_shares", "labels", "label_shares")


class PairLoader(Loader):
    """Loads pairs; see `Loader`. Its batches are of type `PairBatch`.

    Attributes:
        max_pairs: P, the most pairs per row.
        references: float32 [documents, 2], see `PairBatch.references`; None leaves the array out.
        labelled: whether the documents are labelled completions.
        shares: whether batches have `PairBatch.shared`.
    """

    references: Float32[np.ndarray, "documents 2"] | None = None

    def __init__(
        self, documents: Documents, context_length: int, batch_size: int, seed: int, shares: bool
    ):
        """Makes a loader of pairs, which all fit a row; arguments as in `Loader`.

        Args:
          shares: whether batches say which prompts are shared, which documents that share any need.
        """
        super().__init__(documents, context_length, batch_size, seed)
        self.max_pairs = context_length // int(documents.row_lengths.min())
        self.labelled = bool((documents.labels >= 0).all())
        self.shares = shares

    def _documents(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            chosen = int(self.documents.chosen[piece.document])
            start = chosen + int(self.documents.shared[piece.document])
            yield Piece(piece.document, 0, chosen)
            yield Piece(piece.document, start, piece.length - chosen)

    def _piece_arrays(
        self, piece: Piece, positions: Int[np.ndarray, " t"]
    ) -> dict[str, np.ndarray | int]:
        arrays = super()._piece_arrays(piece, positions)
        # A second document continues after the shared prompt.
        begins = int(self.documents.shared[piece.document]) if piece.start else 0
        return {**arrays, "positions": positions + begins}

    def shared_lengths(self, step: int) -> Int64[np.ndarray, " D"]:
        """Returns how many tokens of an earlier document each document of `lengths` also sees."""
        numbers = [piece.document for piece in self._step_pieces(step)]
        shared = np.zeros((len(numbers), 2), np.int64)
        shared[:, 1] = self.documents.shared[numbers]
        return shared.ravel()

    def _row_arrays(
        self, pieces: Sequence[Piece], indices: Int[np.ndarray, " T"] | None = None
    ) -> PairBatch:
        row = cast(PairBatch, super()._row_arrays(pieces, indices))
        numbers = [piece.document for piece in pieces]
        if self.shares:
            row["shared"] = self._shared(row, numbers)
        row["pairs"] = np.zeros(self.max_pairs, np.float32)
        row["pairs"][: len(numbers)] = 1
        if self.references is not None:
            row["references"] = np.zeros((self.max_pairs, 2), np.float32)
            row["references"][: len(numbers)] = self.references[numbers]
        if self.labelled:
            row["labels"] = np.zeros(self.max_pairs, np.float32)
            row["labels"][: len(numbers)] = self.documents.labels[numbers]
        return row

    def _shared(self, row: Batch, numbers: Sequence[int]) -> Int32[np.ndarray, " T"]:
        """Returns `PairBatch.shared` of a row."""
        pair = (row["segment_ids"] + 1) // 2
        lengths = np.append(0, self.documents.shared[numbers])[pair]
        is_first = row["segment_ids"] % 2 == 1
        in_prompt = is_first & (row["positions"] < lengths)
        behind_it = ~is_first & (lengths > 0)
        return np.where(in_prompt, pair, np.where(behind_it, -pair, 0)).astype(np.int32)

    def row_pairs(self, number: int) -> Int64[np.ndarray, " n"]:
        """Returns the documents of a row, counted over all epochs, in the order of its slots."""
        return np.array([piece.document for piece in self._pieces(number)], np.int64)

    def batch(
        self,
        step: int,
        rows: Sequence[int] | None = None,
        indices: Int[np.ndarray, " T"] | None = None,
    ) -> PairBatch:
        """Returns the rows of a step, see `Loader.batch`, with `chosen_shares`."""
        batch = cast(PairBatch, super().batch(step, rows, indices))
        numbers = [piece.document for piece in self._step_pieces(step)]
        return self._with_shares(batch, np.array(numbers, np.int64))

    def _with_shares(self, batch: PairBatch, numbers: Int[np.ndarray, " n"]) -> PairBatch:
        tokens = int(self.documents.chosen_trained[numbers].sum())
        batch["chosen_shares"] = batch["pairs"] * np.float32(len(numbers) / max(tokens, 1))
        if self.labelled:
            batch["label_shares"] = self._label_shares(batch, numbers)
        return batch

    def _label_shares(
        self, batch: PairBatch, numbers: Int[np.ndarray, " n"]
    ) -> Float32[np.ndarray, "B P 2"]:
        desirable = np.stack([batch["labels"], 1 - batch["labels"]], -1) * batch["pairs"][..., None]
        first = self.documents.labels[numbers].sum()
        counts = np.array([first, len(numbers) - first], np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):  # 0 x infinity is NaN
            return desirable * (np.float32(len(numbers)) / counts)

    def epoch_batches(
        self,
        epoch: int = 0,
        rows: Sequence[int] | None = None,
        indices: Int[np.ndarray, " T"] | None = None,
    ) -> Iterator[PairBatch]:
        """Yields the rows of an epoch, see `Loader.epoch_batches`, with `chosen_shares` computed
        over the whole epoch."""
        numbers = self._plan(epoch).documents
        for batch in super().epoch_batches(epoch, rows, indices):
            yield self._with_shares(cast(PairBatch, batch), numbers)
