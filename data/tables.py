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
from data.packed_tables import ARROW_FILE, arrow_unpacked, parquet_chunks
from data.paths import File
from data.printable import printable
from data.records import MAX_BYTES
from data.report import SourceReport
from data.row_sizes import check_offsets, may_repeat, row_bytes, without_dictionaries

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".parquet", ".arrow", ".feather", ".csv", ".tsv")
_ROWS = 256  # in memory at a time
# Bytes of the rows in memory at a time, where a dictionary's largest value may stand in each.
_BYTES = 1 << 31
_DICTIONARY_BYTES = 1 << 26  # of the rows that Arrow makes a dictionary for
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
    _unpacked, most = 0.0, most_unpacked(file.size())
    try:
        # On the disk, since what it unpacks to is read first.
        with paths.on_disk(file) as path, path.open("rb") as opened:
            batches = (_parquet_batches if kind == "Parquet" else _arrow_batches)(opened, most)
            for part in _parts(batches, most, offsets_checked=kind == "Parquet"):
                yield from _rows(part, unreadable)
    except _Refused as error:
        raise UserError(f"{file}: {error}") from None
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


class _Refused(Exception):
    """What is wrong with a table, and what would work."""


_OUT_OF_PROPORTION = (
    f"unpacks to more than {MOST_TIMES} times its size; JSON lines of the same would work"
)


def _parquet_batches(opened: BinaryIO, most: int) -> "Iterator[pyarrow.RecordBatch]":
    """Yields batches of rows, each of as many as fit into _BYTES, one at least.

    Raises:
      _Refused: its pages unpack to more than `most` bytes, or how much a row takes is not told.
    """
    from pyarrow import parquet

    file = parquet.ParquetFile(opened)
    groups = parquet_chunks(opened, file.metadata)
    totals = [sum(chunk.in_memory for chunk in group) for group in groups]
    if sum(totals) > most:
        raise _Refused(_OUT_OF_PROPORTION)
    rows = min(_ROWS, max(1, _BYTES // max(1, *totals, 1)))
    repeated = {chunk.path: chunk for group in groups for chunk in group if chunk.at_most > _BYTES}
    for chunk in repeated.values():
        if chunk.refers_back:
            raise _Refused(
                f"the column {printable(chunk.path)} is encoded as DELTA_BYTE_ARRAY, of which a "
                "row may take any size; with another encoding it would work"
            )
    if repeated:
        # As a dictionary a column has each of its texts once, until `row_bytes` has counted them;
        # Arrow makes one for each batch, so that these are larger.
        file = parquet.ParquetFile(opened, read_dictionary=list(repeated))
        rows = max(1, file.metadata.num_rows * _DICTIONARY_BYTES // max(1, sum(totals)))
    yield from file.iter_batches(batch_size=rows)


def _arrow_batches(opened: BinaryIO, most: int) -> "Iterator[pyarrow.RecordBatch]":
    """Yields the batches as they are stored; errors as in `_parquet_batches`."""
    from pyarrow import ipc

    unpacked = 0
    for count in arrow_unpacked(opened):
        unpacked += count
        if unpacked > most:
            raise _Refused(_OUT_OF_PROPORTION)
    opened.seek(0)
    in_file_format = opened.read(len(ARROW_FILE)) == ARROW_FILE
    opened.seek(0)
    if in_file_format:
        reader = ipc.open_file(opened)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    else:
        batches = iter(ipc.open_stream(opened))
    for batch in batches:
        batch.validate()
        yield batch


def _parts(
    batches: "Iterator[pyarrow.RecordBatch]", most: int, offsets_checked: bool
) -> "Iterator[pyarrow.RecordBatch]":
    """Yields batches in parts of _ROWS at most, and of _BYTES where that is more than a row.

    Args:
      most: bytes that all rows may take.
      offsets_checked: whether Arrow made them, and did not find them in the file.

    Raises:
      _Refused: the rows so far take more.
    """
    unpacked, repeats = 0.0, None
    for batch in batches:
        repeats = may_repeat(batch.schema) if repeats is None else repeats
        unpacked += batch.num_rows + (0 if repeats else batch.nbytes)
        sizes = row_bytes(batch) if repeats and unpacked <= most else np.zeros(0)
        unpacked += float(sizes.sum())
        if not unpacked <= most:  # NaN too
            raise _Refused(_OUT_OF_PROPORTION)
        if not offsets_checked:  # now, since it reads a text as often as it occurs
            check_offsets(batch)
        start = 0
        while start < batch.num_rows:
            until = np.cumsum(sizes[start : start + _ROWS])
            count = max(1, int(np.searchsorted(until, _BYTES, side="right"))) if repeats else _ROWS
            part = batch.slice(start, count)
            yield _plain(part) if repeats else part
            start += count


def _plain(batch: "pyarrow.RecordBatch") -> "pyarrow.RecordBatch":
    """Returns a batch without dictionaries in lists, whose values Arrow takes out slowly."""
    import pyarrow

    form = pyarrow.schema(
        [
            field.with_type(without_dictionaries(field.type))
            if pyarrow.types.is_nested(field.type)
            else field
            for field in batch.schema
        ]
    )
    return batch if form.equals(batch.schema) else batch.cast(form)


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
