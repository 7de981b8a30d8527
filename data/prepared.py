"""The folder of prepared data: documents in array_record files, a small index, and a report."""

import json
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int, Int32, Int64

from data import paths
from data.errors import UserError, first_line
from data.folders import check_files, record_files
from data.record_store import StoreRecords, open_records, readable
from data.report import Report, SourceReport
from data.shard_cache import ShardCache
from data.sources import Source
from data.within import check_tree, read_json

DROPPED = "dropped.jsonl"
REPORT = "report.json"
DOCUMENTS = "documents"
SHARD = ".array_record-"  # in the names of shards alone
INDEX = "index.npz"  # written last: a folder with an index is complete
MOST_DOCUMENTS = 2**31 - 1  # of a folder, whose documents are numbered in 32 bits


@dataclass(frozen=True)
class Document:
    """A tokenized document."""

    tokens: Int32[np.ndarray, " n"]
    loss_mask: Bool[np.ndarray, " n"]
    """Whether token i is trained on as a target."""
    source: int
    """Number of the source in the recipe."""
    record_id: str


class Documents:
    """The documents of one split, by number. Can be pickled; files are opened at the first read.

    Columns are read when they are first needed: of a hundred million documents, each has 400 MB.
    """

    fingerprint: str
    """Changes when any document changes."""
    source_weights: Float64[np.ndarray, " S"]
    """Average number of times that a document of each source is used in an epoch."""

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
          folder: the prepared folder.
          numbers: the numbers in the folder of the split's documents.
          index: the folder's index.
          weights: the weight of each source.
          name: the split's name.
          cache: the documents' shards, if a store holds them and `folder` the other files.
        """
        self.folder, self.name, self.cache = folder, name, cache
        self.fingerprint = f"{folder.name}/{name}"
        self._numbers, self._index = numbers, index
        self.source_weights = weights

    @cached_property
    def lengths(self) -> Int32[np.ndarray, " N"]:
        """Number of tokens of each document."""
        return self._index["length"][self._numbers]

    @cached_property
    def trained(self) -> Int32[np.ndarray, " N"]:
        """Number of tokens of each document that are trained on."""
        return self._index["trained"][self._numbers]

    @cached_property
    def sources(self) -> Int32[np.ndarray, " N"]:
        """Number of each document's source; they do not descend."""
        return self._index["source"][self._numbers]

    @cached_property
    def chosen(self) -> Int32[np.ndarray, " N"]:
        """Number of tokens of the chosen one of two completions, which stands first; 0 where there
        are not two."""
        return self._index["chosen"][self._numbers]

    @cached_property
    def chosen_trained(self) -> Int32[np.ndarray, " N"]:
        """Number of the chosen completion's tokens that are trained on."""
        return self._index["chosen_trained"][self._numbers]

    @cached_property
    def labels(self) -> Int32[np.ndarray, " N"]:
        """1 where the first of two completions is desirable, 0 where it is not, -1 where there is
        no label."""
        return self._index["label"][self._numbers]

    @cached_property
    def shared(self) -> Int32[np.ndarray, " N"]:
        """Number of tokens at the beginning of both of two completions' documents that rows hold
        once."""
        return self._index["shared"][self._numbers]

    @cached_property
    def row_lengths(self) -> Int32[np.ndarray, " N"]:
        """Number of tokens that each document takes in a row."""
        shared = self._index["shared"]
        return self.lengths - shared[self._numbers] if shared.any() else self.lengths

    @cached_property
    def source_starts(self) -> Int64[np.ndarray, " S+1"]:
        """Number of each source's first document, then N."""
        sources = self._index["source"][self._numbers]
        return np.searchsorted(sources, np.arange(len(self.source_weights) + 1)).astype(np.int64)

    @property
    def weights(self) -> Float64[np.ndarray, " N"]:
        """Average number of times that each document is used in an epoch."""
        return self.source_weights[self.sources] if len(self) else np.zeros(0)

    @property
    def equally_often(self) -> bool:
        """Whether every document is used once in an epoch."""
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
        """Starts to copy to this machine what these documents need of a store."""
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
    """What became of every record."""
    context_length: int


class SplitCounts(NamedTuple):
    """The size of a split."""

    documents: int
    tokens: int
    trained_tokens: int


def counts(documents: Documents) -> SplitCounts:
    """Returns the numbers of a split's documents, tokens and trained tokens."""
    return SplitCounts(len(documents), int(documents.lengths.sum()), int(documents.trained.sum()))


def check_count(count: int, what: str = "documents") -> None:
    """Checks that a folder can number its documents.

    Raises:
      UserError: there are more than MOST_DOCUMENTS.
    """
    if count > MOST_DOCUMENTS:
        raise UserError(
            f"data.sources: found {count:,} {what}, and a prepared folder holds at most "
            f"{MOST_DOCUMENTS:,} documents; several recipes, each with some of the files, would "
            "work"
        )


class Index:
    """The index of a folder: numbers of every document that are needed without reading it."""

    def __init__(self) -> None:
        names = ("length", "trained", "source", "held_out")
        of_pairs = ("chosen", "chosen_trained", "label", "shared")
        # Not lists, whose integers take 120 bytes a document.
        self._columns = {name: array("i") for name in (*names, *of_pairs)}

    def add(self, *values: int) -> int:
        """Adds a document; returns its number.

        Args:
          values: its length, trained tokens, source, whether it is held out, and, where it is a
            pair of completions, the length, trained tokens and label of the first, and how many
            tokens both share.

        Raises:
          UserError: there are too many, see `check_count`.
        """
        check_count(len(self) + 1)
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)
        return len(self) - 1

    def __len__(self) -> int:
        return len(self._columns["length"])

    def arrays(self) -> dict[str, Int32[np.ndarray, " D"]]:
        """Returns the columns of the index, each with an element for every document."""
        return {name: np.array(column, np.int32) for name, column in self._columns.items()}


def write_index(
    folder: Path,
    arrays: dict[str, Int32[np.ndarray, " D"]],
    report: Report,
    shards: Mapping[str, Sequence[int | str]] | None = None,
) -> None:
    """Writes the report and the index, with size and sha256 of every file read later.

    Args:
      folder: the prepared folder.
      arrays: the columns of the index.
      report: the report.
      shards: size and sha256 of the shards by name, where they are known; they may be elsewhere.
    """
    source_reports = [source_report.to_dict() for source_report in report.sources]
    (folder / REPORT).write_text(json.dumps(source_reports, indent=1), encoding="ascii")
    files = json.loads(record_files(folder, [REPORT, DOCUMENTS])) if shards is None else {}
    if shards is not None:
        others = [path for path in sorted((folder / DOCUMENTS).iterdir()) if SHARD not in path.name]
        names = [REPORT, *(f"{DOCUMENTS}/{path.name}" for path in others)]
        files = {**json.loads(record_files(folder, names)), **shards}
    columns = {**arrays, "files": np.array(json.dumps(files))}
    np.savez(folder / INDEX, **columns)  # type: ignore[arg-type]  # by numpy's own types


def document_features(tfds: ModuleType) -> dict[str, Any]:
    """The fields of a stored document."""
    return {
        "tokens": tfds.features.Tensor(shape=(None,), dtype=np.int32),
        "loss_mask": tfds.features.Tensor(shape=(None,), dtype=np.uint8),
        "source": np.int32,
        "record_id": tfds.features.Text(),
    }


class StoredIndex(Mapping[str, Int32[np.ndarray, " D"]]):
    """The columns of an index, each read when it is asked for and not kept."""

    def __init__(self, file: Path):
        """Reads the names, and every column once to see that it is whole."""
        self._file = file
        with np.load(file) as stored:
            self._names = tuple(stored.files)
            self.files = str(stored["files"])
            for name in self._names:
                stored[name]

    def __getitem__(self, name: str) -> Int32[np.ndarray, " D"]:
        with np.load(self._file) as stored:
            return stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Stored(NamedTuple):
    """The small files of a prepared folder."""

    index: StoredIndex  # type: ignore[assignment]  # no use of tuple.index
    reports: list[SourceReport]
    shards: dict[str, tuple[int, str]]
    """Size and sha256 of each shard, by its path in the folder."""


def is_whole(folder: Path) -> bool:
    """Returns whether a prepared folder is complete and looks undamaged (not all is read)."""
    try:
        read(folder)
    except UserError:
        return False
    return True


def read_or_warn(folder: Path) -> Stored | None:
    """Returns what a prepared folder holds; None if it is missing or, with a warning, damaged."""
    if not (folder / INDEX).exists():
        return None
    try:
        return read(folder)
    except UserError as error:
        print(f"warning: {error}; it is made again", file=sys.stderr)
        return None


def read(folder: Path, with_shards: bool = True) -> Stored:
    """Reads the small files of a prepared folder and checks its files' sizes and hashes.

    Args:
      folder: the folder.
      with_shards: whether the shards must be there.

    Raises:
      UserError: a file is missing or damaged.
    """
    name = INDEX
    try:
        check_tree(folder)
        index = StoredIndex(folder / INDEX)
        files = json.loads(index.files)
        shards = {name: tuple(known) for name, known in files.items() if SHARD in name}
        here = files if with_shards else {name: files[name] for name in files.keys() - shards}
        check_files(folder, json.dumps(here))
        name = REPORT
        reports = [SourceReport.from_dict(state) for state in read_json(folder / REPORT)]
        return Stored(index, reports, shards)
    except (PermissionError, UserError):
        raise
    except Exception as error:  # zipfile, zlib, numpy, json and tensorflow-datasets raise their own
        raise UserError(f"{folder}: {name} is damaged ({first_line(error)})") from error


def read_from_store(shared: str, local: Path) -> Stored | None:
    """Reads the small files of a prepared folder in a store, which are copied to `local`; None if
    the store has no such folder."""

    def is_whole(folder: Path) -> bool:
        try:
            read(folder, with_shards=False)
        except UserError:
            return False
        return True

    if not is_whole(local):
        paths.download(shared, local, INDEX, is_whole, left_out=SHARD)
    return read(local, with_shards=False) if local.exists() else None


def open_folder(
    folder: Path,
    stored: Stored,
    sources: list[Source],
    context_length: int,
    cache: ShardCache | None = None,
) -> Prepared:
    """Returns the two splits of a prepared folder.

    Args:
      folder: the folder.
      stored: its small files.
      sources: those to train on, then the held-out ones.
      context_length: how many tokens a document has at most.
      cache: the shards, if a store holds them.
    """
    index = stored.index
    held_out = index["held_out"].astype(bool)
    weights = np.asarray([source.weight for source in sources], np.float64)
    report = Report(stored.reports, dropped_file=folder / DROPPED)
    for number, (source_report, source) in enumerate(zip(report.sources, sources, strict=True)):
        # The same contents may have been prepared from other paths.
        source_report.source, source_report.path = number, str(source.path)
    train = Documents(folder, _numbers(~held_out), index, weights, "train", cache)
    # Weights are for training; the held-out loss counts every document once.
    ones = np.ones_like(weights)
    measured = Documents(folder, _numbers(held_out), index, ones, "held_out", cache)
    return Prepared(folder, train, measured, report, context_length)


def _numbers(chosen: Bool[np.ndarray, " D"]) -> Int32[np.ndarray, " N"]:
    return np.flatnonzero(chosen).astype(np.int32)
