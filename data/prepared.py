"""A folder of prepared data: documents in array_record files, a small index, and a report."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int, Int32, Int64

from data import paths
from data.errors import UserError, first_line
from data.folders import check_files, record_files
from data.index import NewIndex, StoredIndex
from data.record_store import StoreRecords, open_records, readable
from data.report import Report, SourceReport
from data.shard_cache import ShardCache
from data.sources import Source
from data.untrusted_files import check_tree, read_json

DROPPED = "dropped.jsonl"
REPORT = "report.json"
DOCUMENTS = "documents"
SHARD = ".array_record-"  # occurs only in the names of shards
INDEX = "index.npz"  # written last: a folder with an index is complete


@dataclass(frozen=True)
class Document:
    """A tokenized document."""

    tokens: Int32[np.ndarray, " n"]
    loss_mask: Bool[np.ndarray, " n"]
    """Whether token i is trained on as a target."""
    source: int
    """The source's number in the recipe."""
    record_id: str


def _column(name: str) -> cached_property[Int32[np.ndarray, " N"]]:
    """Returns a property of `Documents`: a column of the index."""
    return cached_property(lambda documents: documents._index[name][documents._numbers])


class Documents:
    """The documents of one split, by number. Can be pickled; opens files on the first read.

    Columns are read on first use: for a hundred million documents, each takes 400 MB.
    """

    fingerprint: str
    """Changes when any document changes."""
    source_weights: Float64[np.ndarray, " S"]
    """For each source, how often its documents are used in an epoch, on average."""
    lengths = _column("length")
    """The number of tokens in each document."""
    trained = _column("trained")
    """The number of tokens in each document that are trained on."""
    sources = _column("source")
    """Each document's source number, in ascending order."""
    chosen = _column("chosen")
    """The number of tokens of the chosen of two completions, which comes first; 0 for documents
    without two."""
    chosen_trained = _column("chosen_trained")
    """The number of the chosen completion's tokens that are trained on."""
    labels = _column("label")
    """1 if the first of two completions is desirable, 0 if not, -1 if there is no label."""
    shared = _column("shared")
    """The number of leading tokens that two completions share, which rows store once."""

    def __init__(
        self,
        folder: Path,
        numbers: Int[np.ndarray, " N"],
        index: Mapping[str, Int32[np.ndarray, " D"]],
        weights: Float64[np.ndarray, " S"],
        name: str,
        cache: ShardCache | None = None,
    ):
        """Opens a split.

        Args:
          numbers: the numbers of the split's documents in the folder.
          index: the folder's index.
          weights: the weight of each source.
          name: the split's name.
          cache: the documents' shards, if they are in a store and `folder` has the other files.
        """
        self.folder, self.name, self.cache = folder, name, cache
        self.fingerprint = f"{folder.name}/{name}"
        self._numbers, self._index = numbers, index
        self.source_weights = weights

    @cached_property
    def row_lengths(self) -> Int32[np.ndarray, " N"]:
        """The number of tokens that each document takes in a row."""
        shared = self._index["shared"]
        return self.lengths - shared[self._numbers] if shared.any() else self.lengths

    @cached_property
    def source_starts(self) -> Int64[np.ndarray, " S+1"]:
        """The number of each source's first document, then N."""
        sources = self._index["source"][self._numbers]
        return np.searchsorted(sources, np.arange(len(self.source_weights) + 1)).astype(np.int64)

    @property
    def weights(self) -> Float64[np.ndarray, " N"]:
        """How often each document is used in an epoch, on average."""
        return self.source_weights[self.sources] if len(self) else np.zeros(0)

    @property
    def equally_often(self) -> bool:
        """Whether every document is used exactly once in an epoch."""
        has_documents = np.diff(self.source_starts) > 0
        return bool(np.all(self.source_weights[has_documents] == 1.0))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> Document:
        with readable(self.folder, "a document"):
            record = self._store[int(self._numbers[number])]
        return Document(
            record["tokens"],
            record["loss_mask"].astype(bool),
            int(record["source"]),
            record["record_id"].decode(),
        )

    @cached_property
    def _store(self) -> Sequence[dict]:
        if self.cache is not None:
            return StoreRecords(self.folder, DOCUMENTS, self.cache)
        return open_records(self.folder, DOCUMENTS)

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Starts to copy the shards of these documents from a store, if there is one."""
        if isinstance(self._store, StoreRecords):
            self._store.prefetch(self._numbers[np.asarray(numbers, np.int64)])

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_store"}


@dataclass(frozen=True)
class Prepared:
    """Prepared data."""

    folder: Path
    train: Documents
    held_out: Documents
    """May be empty."""
    report: Report
    """The outcome for every record."""
    context_length: int


class SplitCounts(NamedTuple):
    """The size of a split."""

    documents: int
    tokens: int
    trained_tokens: int


def counts(documents: Documents) -> SplitCounts:
    """Counts a split's documents, tokens and trained tokens."""
    return SplitCounts(len(documents), int(documents.lengths.sum()), int(documents.trained.sum()))


def write_index(
    folder: Path,
    index: NewIndex,
    report: Report,
    shards: Mapping[str, tuple[int, str]] | None = None,
) -> None:
    """Writes the report and the index, including size and sha256 of every file read later.

    Args:
      shards: size and sha256 of the shards by name, if known; the shards may be elsewhere.
    """
    source_reports = [source_report.to_dict() for source_report in report.sources]
    (folder / REPORT).write_text(json.dumps(source_reports, indent=1), encoding="ascii")
    names = [f"{DOCUMENTS}/{path.name}" for path in sorted((folder / DOCUMENTS).iterdir())]
    if shards is not None:
        names = [name for name in names if SHARD not in name]
    files = {**record_files(folder, [REPORT, *names]), **(shards or {})}
    index.write(folder / INDEX, json.dumps(files))


def document_features(tfds: ModuleType) -> dict[str, Any]:
    """Returns the fields of a stored document."""
    return {
        "tokens": tfds.features.Tensor(shape=(None,), dtype=np.int32),
        "loss_mask": tfds.features.Tensor(shape=(None,), dtype=np.uint8),
        "source": np.int32,
        "record_id": tfds.features.Text(),
    }


class Stored(NamedTuple):
    """The small files of a prepared folder."""

    index: StoredIndex  # type: ignore[assignment]  # no use of tuple.index
    reports: list[SourceReport]
    shards: dict[str, tuple[int, str]]
    """Size and sha256 of each shard, by its path in the folder."""


def is_whole(folder: Path, with_shards: bool = True) -> bool:
    """Returns whether a prepared folder looks complete and undamaged (not all of it is read).

    Args:
      with_shards: whether its shards must be there too.
    """
    try:
        read(folder, with_shards)
    except UserError:
        return False
    return True


def read(folder: Path, with_shards: bool = True) -> Stored:
    """Reads the small files of a prepared folder and checks the sizes and hashes of its files.

    Args:
      with_shards: whether to check the shards too.

    Raises:
      UserError: a file is missing or damaged.
    """
    name = INDEX
    try:
        check_tree(folder)
        index = StoredIndex(folder / INDEX)
        files = json.loads(index.files)
        shards = {name: tuple(known) for name, known in files.items() if SHARD in name}
        expected = files if with_shards else {name: files[name] for name in files.keys() - shards}
        check_files(folder, expected)
        name = REPORT
        reports = [SourceReport.from_dict(state) for state in read_json(folder / REPORT)]
        return Stored(index, reports, shards)
    except (PermissionError, UserError):
        raise
    except Exception as error:  # zipfile, zlib, numpy, json and tensorflow-datasets raise their own
        raise UserError(f"{folder}: {name} is damaged ({first_line(error)})") from error


def read_from_store(shared: str, local: Path) -> Stored | None:
    """Copies the small files of a prepared folder from a store to `local` and reads them; None if
    the store has no such folder, even if `local` has been copied from one."""
    if not paths.File(f"{shared}/{INDEX}").exists():
        return None
    without_shards = partial(is_whole, with_shards=False)
    if not without_shards(local):
        paths.download(shared, local, INDEX, without_shards, left_out=SHARD)
    return read(local, with_shards=False) if local.exists() else None


def open_folder(
    folder: Path,
    stored: Stored,
    sources: Sequence[Source],
    context_length: int,
    cache: ShardCache | None = None,
) -> Prepared:
    """Opens the two splits of a prepared folder.

    Args:
      stored: its small files.
      sources: those to train on, then the held-out ones.
      context_length: the most tokens in a document.
      cache: the shards, if they are in a store.
    """
    index = stored.index
    held_out = index["held_out"].astype(bool)
    weights = np.asarray([source.weight for source in sources], np.float64)
    report = Report(stored.reports, dropped_file=folder / DROPPED)
    for number, (source_report, source) in enumerate(zip(report.sources, sources, strict=True)):
        # The same contents may have been prepared from different paths.
        source_report.source, source_report.path = number, str(source.path)
    train = Documents(folder, _numbers(~held_out), index, weights, "train", cache)
    # Weights apply to training only; the held-out loss counts every document once.
    ones = np.ones_like(weights)
    held_out_documents = Documents(folder, _numbers(held_out), index, ones, "held_out", cache)
    return Prepared(folder, train, held_out_documents, report, context_length)


def _numbers(selected: Bool[np.ndarray, " D"]) -> Int32[np.ndarray, " N"]:
    return np.arange(len(selected), dtype=np.int32)[selected]
