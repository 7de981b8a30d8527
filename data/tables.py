"""Reads rows of tables one at a time (Parquet, Arrow, CSV), and arrays of token ids."""

import csv
import io
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
from jaxtyping import Int

from data import paths
from data.compression import MOST_TIMES, most_unpacked
from data.errors import UserError, first_line
from data.paths import File
from data.printable import printable
from data.records import MAX_BYTES
from data.report import SourceReport

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".parquet", ".arrow", ".feather", ".csv", ".tsv")
_ROWS = 256  # in memory at a time
# Bytes of the rows in memory at a time, where a dictionary's largest value may stand in each.
_BYTES = 1 << 31
_IN_FILE_FORMAT = (
    b"ARROW1"  # which Arrow's format for files begins with, and that for streams does not
)
MORE_CELLS = "cells beyond the header's columns"


def read_table(file: File, report: SourceReport) -> Iterator[dict]:
    """Yields the rows of a table, with a few hundred in memory at a time.

    Values that Python cannot represent, such as a time in the year 50,000 or text that is not
    UTF-8, are left out of their rows, with a note in the report for each column that has some.

    Raises:
      UserError: the file is damaged, of another kind than its name says, or holds out of proportion
        to its size: a dictionary's value is in the file once, for any number of rows.
    """
    if file.suffix in (".csv", ".tsv"):
        yield from _read_csv(file)
        return
    kind = "Parquet" if file.suffix == ".parquet" else "Arrow"
    unreadable: Counter[str] = Counter()
    unpacked, most = 0, most_unpacked(file.size())
    out_of_proportion = UserError(
        f"{file}: unpacks to more than {MOST_TIMES} times its size; JSON lines of the same would "
        "work"
    )
    try:
        with file.open() as opened:
            if kind == "Parquet":
                largest, batches = _parquet_batches(opened)
                if largest > most:
                    raise out_of_proportion
            else:
                batches = _arrow_batches(opened)
            for batch in batches:
                unpacked += sum(map(_size, batch.columns))
                if unpacked > most:
                    raise out_of_proportion
                yield from _rows(batch, unreadable)
    except UserError:
        raise
    except Exception as error:  # a damaged page may raise any of Arrow's errors and of Python's
        raise UserError(
            f"{file}: cannot be read as {kind} ({first_line(error)}); a whole file would work"
        ) from None
    finally:
        report.notes += [
            f"{file}: {count} values of the column {printable(name)} cannot be read and are left "
            "out"
            for name, count in unreadable.items()
        ]


def _parquet_batches(opened: BinaryIO) -> "tuple[int, Iterator[pyarrow.RecordBatch]]":
    """Returns the bytes of the largest group of rows as it is stored before it is compressed, and
    the batches."""
    from pyarrow import parquet

    file = parquet.ParquetFile(opened)
    groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
    largest = max((group.total_byte_size for group in groups), default=0)
    return largest, file.iter_batches(batch_size=min(_ROWS, max(1, _BYTES // max(1, largest))))


def _size(column: "pyarrow.Array") -> int:
    """Returns a column's bytes, with those of a dictionary's texts as often as they occur."""
    import pyarrow
    from pyarrow import compute

    if not pyarrow.types.is_dictionary(column.type):
        return column.nbytes
    try:
        lengths = compute.binary_length(column.dictionary)
    except pyarrow.ArrowNotImplementedError:  # no texts
        return column.indices.nbytes
    return compute.sum(lengths.take(column.indices)).as_py() or 0


def _arrow_batches(opened: BinaryIO) -> "Iterator[pyarrow.RecordBatch]":
    from pyarrow import ipc

    in_file_format = opened.read(len(_IN_FILE_FORMAT)) == _IN_FILE_FORMAT
    opened.seek(0)
    if in_file_format:
        reader = ipc.open_file(opened)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    else:
        batches = iter(ipc.open_stream(opened))
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS):
            yield batch.slice(start, _ROWS)


def _rows(batch: "pyarrow.RecordBatch", unreadable: Counter[str]) -> list[dict]:
    """Returns the rows of a batch without values that cannot be read, which are counted."""
    try:
        return batch.to_pylist()
    except (
        Exception
    ):  # ValueError, OverflowError, UnicodeDecodeError, ArrowException, ...; now value by value
        rows: list[dict] = [{} for _ in range(batch.num_rows)]
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for row, value in zip(rows, column, strict=True):
            try:
                row[name] = value.as_py()
            except Exception:
                unreadable[name] += 1
    return rows


def _read_csv(file: File) -> Iterator[dict]:
    """Yields the rows of a text table, whose first line names the columns; empty cells are ""."""
    csv.field_size_limit(MAX_BYTES)
    try:
        with file.open_decompressed() as opened:
            text = io.TextIOWrapper(cast(Any, opened), encoding="utf-8-sig", newline="")
            first = text.readline(1 << 20)
            delimiter = (
                "\t"
                if file.suffix == ".tsv"
                else next((mark for mark in ",;\t" if mark in first), ",")
            )
            reader = csv.reader(itertools.chain([first], text), delimiter=delimiter, strict=True)
            names = next(reader, [])
            if repeated := [name for name, count in Counter(names).items() if count > 1]:
                raise UserError(
                    f"{file}: two of its columns are called {printable(repeated[0])!r}; a first "
                    "line that names each column once would work"
                )
            for cells in reader:
                if cells:
                    row = dict(zip(names, cells, strict=False))
                    yield row | (
                        {MORE_CELLS: cells[len(names) :]} if len(cells) > len(names) else {}
                    )
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: byte {error.start} of a line is not UTF-8 text; a table in UTF-8 would work"
        ) from None
    except csv.Error as error:
        raise UserError(
            f"{file}: cannot be read as a table in text (line {reader.line_num}: {error}); quotes "
            "that are closed would work"
        ) from None


def read_npy(file: File, would_work: str) -> Iterator[Int[np.ndarray, " n"]]:
    """Yields the array [tokens] itself, or the rows of an array [documents, tokens].

    Raises:
      UserError: the file is damaged, or holds something else.
    """
    array = open_npy(file, would_work)
    yield from (array,) if array.ndim == 1 else array


def open_npy(file: File, would_work: str) -> np.ndarray:
    """Returns the array of a file, memory-mapped: parts of it are read where they are used.

    A file in a store is copied to this machine's cache first, from where it goes when this process
    ends.

    Raises:
      UserError: the file is damaged, or holds something else than [tokens] or [documents, tokens].
    """
    try:
        with paths.on_disk(file) as path:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except UserError:
        raise
    except (
        Exception
    ) as error:  # numpy raises ValueError, EOFError, SyntaxError and zipfile's errors
        raise UserError(
            f"{file}: cannot be read as .npy ({first_line(error)}); {would_work}"
        ) from None
    if not isinstance(array, np.ndarray):
        raise UserError(f"{file}: is an .npz archive, not a single array; {would_work}")
    if array.ndim not in (1, 2):
        raise UserError(
            f"{file}: has shape {list(array.shape)}; [tokens] or [documents, tokens] would work"
        )
    return array
