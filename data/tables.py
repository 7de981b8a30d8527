"""Reads tables row by row (Parquet, Arrow, CSV), and arrays of token ids."""

import csv
import io
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
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
from data.table_values import decoders

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".parquet", ".arrow", ".feather", ".csv", ".tsv")
_ROWS = 256  # in memory at a time
# Bytes of rows in memory at a time, assuming that each may contain a dictionary's largest value.
_BYTES = 1 << 31
_DICTIONARY_BYTES = 1 << 26  # of the rows for which Arrow makes a dictionary
MORE_CELLS = "cells beyond the header's columns"


def read_table(file: File, report: SourceReport) -> Iterator[dict]:
    """Yields the rows of a table, with a few hundred in memory at a time.

    Columns of JSON are decoded, and structs are `data.table_values.Struct`. Values that Python
    cannot represent, such as a time in the year 50,000 or text that is not UTF-8, and JSON that is
    broken are left out of their rows, with a note in the report for each column affected.

    Raises:
      UserError: the file is damaged, is not the kind that its name says, or unpacks to far more
        than its size: a dictionary stores a value once for any number of rows.
    """
    if file.suffix in (".csv", ".tsv"):
        yield from _read_csv(file)
        return
    kind = "Parquet" if file.suffix == ".parquet" else "Arrow"
    unreadable: Counter[str] = Counter()
    most = most_unpacked(file.size())
    try:
        # On disk, because a first pass reads how much it unpacks to.
        with paths.on_disk(file) as path, path.open("rb") as opened:
            batches = (_parquet_batches if kind == "Parquet" else _arrow_batches)(opened, most)
            for part in _parts(batches, most, offsets_checked=kind == "Parquet"):
                yield from _rows(part, unreadable)
    except _Refused as error:
        raise UserError(f"{file}: {error}") from None
    except UserError:
        raise
    except Exception as error:  # a damaged page may raise any error of Arrow or Python
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
    """A table is refused; the message says why, and what would work."""


_OUT_OF_PROPORTION = (
    f"unpacks to more than {MOST_TIMES} times its size; JSON lines of the same would work"
)


def _parquet_batches(opened: BinaryIO, most: int) -> "Iterator[pyarrow.RecordBatch]":
    """Yields batches of as many rows as fit into _BYTES, at least one.

    Raises:
      _Refused: the pages unpack to more than `most` bytes, or the size of a row is unknown.
    """
    from pyarrow import parquet

    file = parquet.ParquetFile(opened)
    groups = parquet_chunks(opened, file.metadata)
    totals = [sum(chunk.in_memory for chunk in group) for group in groups]
    if sum(totals) > most:
        raise _Refused(_OUT_OF_PROPORTION)
    rows = min(_ROWS, max(1, _BYTES // max([1, *totals])))
    repeated = {chunk.path: chunk for group in groups for chunk in group if chunk.at_most > _BYTES}
    for chunk in repeated.values():
        if chunk.refers_back:
            raise _Refused(
                f"the column {printable(chunk.path)} is encoded as DELTA_BYTE_ARRAY, in which a "
                "row may have any size; another encoding would work"
            )
    if repeated:
        # As a dictionary, a column keeps each text once until `row_bytes` has counted the rows.
        # Arrow makes one dictionary per batch, so batches are larger here.
        file = parquet.ParquetFile(opened, read_dictionary=list(repeated))
        rows = max(1, file.metadata.num_rows * _DICTIONARY_BYTES // max(1, sum(totals)))
    yield from file.iter_batches(batch_size=rows)


def _arrow_batches(opened: BinaryIO, most: int) -> "Iterator[pyarrow.RecordBatch]":
    """Yields the batches as stored; raises like `_parquet_batches`."""
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
    """Splits batches into parts of at most _ROWS rows and, unless it is one row, _BYTES bytes.

    Args:
      most: the most bytes that all rows may take.
      offsets_checked: whether Arrow computed the offsets, rather than reading them from the file.

    Raises:
      _Refused: the rows so far take more than `most`.
    """
    unpacked, repeats = 0.0, None
    for batch in batches:
        repeats = may_repeat(batch.schema) if repeats is None else repeats
        unpacked += batch.num_rows + (0 if repeats else batch.nbytes)
        sizes = row_bytes(batch) if repeats and unpacked <= most else np.zeros(0)
        unpacked += float(sizes.sum())
        if not unpacked <= most:  # NaN too
            raise _Refused(_OUT_OF_PROPORTION)
        if not offsets_checked:  # only now, since it reads a text as often as it occurs
            check_offsets(batch)
        start = 0
        while start < batch.num_rows:
            ends = np.cumsum(sizes[start : start + _ROWS])
            count = max(1, int(np.searchsorted(ends, _BYTES, side="right"))) if repeats else _ROWS
            part = batch.slice(start, count)
            yield _plain(part) if repeats else part
            start += count


def _plain(batch: "pyarrow.RecordBatch") -> "pyarrow.RecordBatch":
    """Returns a batch without dictionaries in lists, which Arrow converts to Python slowly."""
    import pyarrow

    schema = pyarrow.schema(
        [
            field.with_type(without_dictionaries(field.type))
            if pyarrow.types.is_nested(field.type)
            else field
            for field in batch.schema
        ],
        batch.schema.metadata,
    )
    return batch if schema.equals(batch.schema) else batch.cast(schema)


def _rows(batch: "pyarrow.RecordBatch", unreadable: Counter[str]) -> list[dict]:
    """Returns the rows of a batch; leaves out and counts values that cannot be read."""
    decode = decoders(batch.schema)
    try:
        rows = batch.to_pylist()
        for name, decode_value in decode.items():
            for row in rows:
                row[name] = decode_value(row[name])
        return rows
    # ValueError, OverflowError, UnicodeDecodeError, ArrowException, ...: convert value by value.
    except Exception:
        rows = [{} for _ in range(batch.num_rows)]
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        decode_value = decode.get(name, lambda value: value)
        for row, value in zip(rows, column, strict=True):
            try:
                row[name] = decode_value(value.as_py())
            except Exception:
                unreadable[name] += 1
    return rows


def _read_csv(file: File) -> Iterator[dict]:
    """Yields the rows of a CSV file whose first line names the columns; empty cells are ""."""
    csv.field_size_limit(MAX_BYTES)
    try:
        with file.open_decompressed() as opened:
            text = io.TextIOWrapper(cast(Any, opened), encoding="utf-8-sig", newline="")
            first = text.readline(1 << 20)
            marks = "\t" if file.suffix == ".tsv" else ",;\t"
            delimiter = next((mark for mark in marks if mark in first), marks[0])
            reader = csv.reader(itertools.chain([first], text), delimiter=delimiter, strict=True)
            names = next(reader, [])
            if repeated := [name for name, count in Counter(names).items() if count > 1]:
                raise UserError(
                    f"{file}: two columns are called {printable(repeated[0])!r}; a first line that "
                    "names each column once would work"
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
            f"{file}: cannot be read as a text table (line {reader.line_num}: {error}); closed "
            "quotes would work"
        ) from None


def read_npy(file: File, would_work: str) -> Iterator[Int[np.ndarray, " n"]]:
    """Yields the array [tokens] itself, or the rows of an array [documents, tokens].

    Raises:
      UserError: the file is damaged, or contains something else.
    """
    array = open_npy(file, would_work)
    yield from (array,) if array.ndim == 1 else array


def _mapped(path: Path) -> Any:
    """Returns an array, memory-mapped, or an .npz archive; raises ValueError for other files, which
    NumPy would call pickled."""
    with path.open("rb") as opened:
        if not opened.read(8).startswith((np.lib.format.MAGIC_PREFIX, b"PK")):
            raise ValueError("it does not begin as one")
    return np.load(path, mmap_mode="r", allow_pickle=False)


def open_npy(file: File, would_work: str) -> np.ndarray:
    """Returns a file's array, memory-mapped, so that parts are read as they are used.

    A file in a store is first copied to this machine's cache, and removed when this process ends.

    Raises:
      UserError: the file is damaged, or is not an array [tokens] or [documents, tokens].
    """
    try:
        with paths.on_disk(file) as path:
            array = _mapped(path)
    except UserError:
        raise
    except Exception as error:  # ValueError, EOFError, SyntaxError, and those of zipfile
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
