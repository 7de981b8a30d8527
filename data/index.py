"""The index of a prepared folder: numbers about documents, needed without reading them."""

from __future__ import annotations

import struct
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from data.errors import UserError

MOST_DOCUMENTS = 2**31 - 1  # in a folder: document numbers have 32 bits
FILES = "files"  # in an index: size and sha256 of the other files, as JSON
_ROWS_AT_A_TIME = 1 << 16


class IndexEntry(NamedTuple):
    """The numbers of a document; each field is a column of the index."""

    length: int
    """Its tokens."""
    trained: int
    """How many of them are trained on as targets."""
    source: int
    """Number of its source; held-out sources come after those to train on."""
    held_out: bool
    """Whether it is in the split held_out."""
    chosen: int = 0
    """Of a pair of completions, the tokens of the first with its prompt; 0 for other documents."""
    chosen_trained: int = 0
    """How many of these are trained on."""
    label: int = -1
    """1 for a desirable completion, 0 for an undesirable one, -1 for what has no label."""
    shared: int = 0
    """Tokens of a prompt that both completions share, which a row holds once."""


_COLUMNS = IndexEntry._fields
_ROW = struct.Struct(f"={len(_COLUMNS)}i")


def check_count(count: int, what: str = "documents") -> None:
    """Checks that a folder can number its documents.

    Raises:
      UserError: there are more than MOST_DOCUMENTS.
    """
    if count > MOST_DOCUMENTS:
        raise UserError(
            f"data.sources: found {count:,} {what}, but a prepared folder holds at most "
            f"{MOST_DOCUMENTS:,} documents; several recipes, each with some of the files, would "
            "work"
        )


class NewIndex:
    """An index to be written; its numbers, int32, are in a temporary file, not in memory."""

    def __init__(self, folder: Path):
        """Creates the temporary file in a folder."""
        self._rows = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - as long as the index
        self._count = 0
        self.all_held_out = True
        """Whether no document is in the split train."""

    def add(self, entry: IndexEntry) -> None:
        """Adds a document.

        Raises:
          UserError: there are too many; see `check_count`.
        """
        check_count(self._count + 1)
        self._rows.write(_ROW.pack(*entry))
        self.all_held_out &= bool(entry.held_out)
        self._count += 1

    def extend(self, path: Path) -> None:
        """Adds the documents of another index, which `write` wrote to `path`."""
        with np.load(path) as stored:
            rows = np.stack([stored[name] for name in _COLUMNS], axis=1)
            self.all_held_out &= bool(stored["held_out"].all())
        self._rows.write(rows.astype("=i4").tobytes())
        self._count += len(rows)

    def __len__(self) -> int:
        return self._count

    def write(self, path: Path, other_files: str | None = None) -> None:
        """Writes the index to `path`, as `numpy.savez` would.

        Args:
          path: an .npz file.
          other_files: size and sha256 of the folder's other files, as JSON.
        """
        header = {"descr": "<i4", "fortran_order": False, "shape": (self._count,)}
        with zipfile.ZipFile(path, "w") as archive:
            for number, name in enumerate(_COLUMNS):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as column:
                    np.lib.format.write_array_header_1_0(column, header)
                    for rows in self._blocks():
                        column.write(rows[:, number].astype("<i4").tobytes())
            if other_files is not None:
                with archive.open(f"{FILES}.npy", "w", force_zip64=True) as column:
                    np.lib.format.write_array(column, np.array(other_files), allow_pickle=False)

    def _blocks(self) -> Iterator[Int32[np.ndarray, "n C"]]:
        """Yields the numbers of all documents, some rows at a time."""
        self._rows.seek(0)
        while content := self._rows.read(_ROWS_AT_A_TIME * _ROW.size):
            yield np.frombuffer(content, "=i4").reshape(-1, len(_COLUMNS))


class StoredIndex(Mapping[str, Int32[np.ndarray, " D"]]):
    """The columns of an index, read from the file at each access."""

    def __init__(self, file: Path):
        """Reads the names, and every column once to check that it is complete."""
        self._file = file
        with np.load(file) as stored:
            self._names = tuple(stored.files)
            self.files = str(stored[FILES])
            for name in self._names:
                stored[name]

    def __getitem__(self, name: str) -> Int32[np.ndarray, " D"]:
        with np.load(self._file) as stored:
            return stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
