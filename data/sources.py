"""A recipe's data sources, and readers that yield the records of each format one at a time."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from data import hub, paths
from data.clean import CleanConfig, Cleaner, Drop, own_id
from data.conversation import Conversation, Record, Text, Tokens
from data.errors import UserError, first_line
from data.paths import File
from data.records import MAX_BYTES, Advance, read_records, would_fit
from data.report import Report, SourceReport

if TYPE_CHECKING:
    import pyarrow

EMPTY_TEXT = "empty text"
NO_TEXT = "no `text`, nor `prompt` and `completion`"
NO_TOKENS = "no list of integers in `tokens` or `input_ids`"
BAD_MASK = "`loss_mask` or `labels` unlike its tokens"
IGNORED_LABEL = -100  # transformers' label for a token that is not trained on


class Format(NamedTuple):
    """A format of records."""

    suffixes: tuple[str, ...]
    """Suffixes of the files that are read from a folder."""
    would_work: str
    """For messages about a file that is not in this format: what would work."""


FORMATS = {
    "sharegpt": Format(
        (".json", ".jsonl", ".parquet"),
        "records with turns human, gpt, human, gpt, ... would work",
    ),
    "text": Format(
        (".txt", ".md", ".json", ".jsonl", ".parquet"),
        "a plain UTF-8 text, or JSON records with a string `text`, would work",
    ),
    "tokens": Format(
        (".npy", ".json", ".jsonl", ".parquet"),
        "a .npy array of integers, or JSON records with a list `tokens` and perhaps a `loss_mask`, would work",
    ),
}


@dataclass(frozen=True)
class Source:
    """One entry of a recipe's `data.sources`.

    Records are the elements of a JSON list, JSON lines or the rows of a Parquet file; JSON and text files may be compressed
    as .gz.
    """

    path: str
    """A file, or a folder of files, on this machine or in a store (gs://, s3://)."""
    format: str = "sharegpt"
    """`sharegpt` (records with `conversations` of from/value, or `messages` of role/content), `text` (a plain text file is
    one document; records have `text`, or `prompt` and `completion`) or `tokens` (a .npy file, or records with `tokens`)."""
    template: str = "vicuna_v1.1"
    """Name of the conversations' chat template, one of data.templates.NAMES."""
    weight: float = 1.0
    """How often each document is seen in an epoch, on average: with 0.5, each epoch sees another half of them."""

    def __post_init__(self):
        if self.format not in FORMATS:
            raise UserError(f"data.sources: format {self.format!r} is unknown; {', '.join(FORMATS)} would work")
        if not 0 < self.weight < float("inf"):
            raise UserError(f"data.sources: weight {self.weight} of {self.path} must be a number above 0")

    @property
    def would_work(self) -> str:
        """For messages about a file that is not in the source's format: what would work."""
        return FORMATS[self.format].would_work

    def files(self) -> list[File]:
        """Returns the source's file, or those of its folder, sorted by path.

        Raises:
            UserError: the folder contains no file of the format.
        """
        suffixes = FORMATS[self.format].suffixes
        files = paths.find_files(self.path, suffixes)
        if not files:
            raise UserError(f"{self.path}: no {' or '.join(suffixes)} file in this folder; {self.would_work}")
        return files

    def other_splits(self) -> list[str]:
        """Returns the files of a data set of the hub that are named as a split to measure on, read beside others.

        What lies in a folder of the user's own is there for a purpose, whatever its name.
        """
        return hub.other_splits([str(file) for file in self.files()]) if hub.is_hub_dataset(self.path) else []


def read(
    source: Source,
    report: Report,
    number: int = 0,
    advance: Advance | None = None,
    clean: CleanConfig = CleanConfig(),
) -> Iterator[Record]:
    """Yields the usable records of a source, and counts every record in `report`.

    Args:
        source: the source.
        report: receives a new SourceReport.
        number: number of the source in the recipe.
        advance: called with the number of bytes of each read.
        clean: the cleaning rules for conversations.

    Raises:
        UserError: a file is missing, empty or not in the source's format; at the end, if no record was usable.
    """
    source_report = report.add_source(str(source.path))
    parse = _parser(source.format, clean, source_report)
    for file in source.files():
        source_report.file, source_report.line = str(file), 0
        for raw in _raw_records(file, source, source_report, advance):
            try:
                record = parse(raw, number, source_report.records + 1)
            except Drop as drop:
                source_report.drop(str(drop), None if isinstance(raw, np.ndarray) else raw)
            else:
                source_report.keep()
                yield replace(record, file=source_report.file, line=source_report.line)
    if not source_report.records:
        raise UserError(f"{source.path}: holds no records; {source.would_work}")
    if not source_report.kept:
        kind = "conversation" if source.format == "sharegpt" else source.format
        raise UserError(
            f"{source.path}: none of its {source_report.records} records is a usable {kind} "
            f"({source_report.reasons()}); {source.would_work}"
        )


def _raw_records(
    file: File, source: Source, report: SourceReport, advance: Advance | None
) -> Iterator[object]:
    """Yields JSON values, one string for a plain text file, or arrays [n] of token ids."""
    if file.suffix != ".parquet" and (source.format == "sharegpt" or file.suffix in (".json", ".jsonl")):
        yield from read_records(file, report, advance)
        return
    if not file.exists():
        raise UserError(f"{file}: no such file; {source.would_work}")
    if file.suffix == ".parquet":
        records: Iterator[object] = _read_parquet(file, report)
    elif source.format == "text":
        records = iter([_read_text(file, source)])
    else:
        records = _read_npy(file, source)
    for report.line, record in enumerate(records, 1):
        yield record
    if advance:
        advance(file.size())


def _read_parquet(file: File, report: SourceReport) -> Iterator[dict]:
    """Yields the rows of a Parquet file, with a few hundred in memory at a time.

    Values that Python cannot represent, such as a time in the year 50,000 or text that is not UTF-8, are left out of their
    rows, with a note in the report for each column that has some.
    """
    from pyarrow import parquet

    unreadable: Counter[str] = Counter()
    try:
        with file.open() as opened:
            for batch in parquet.ParquetFile(opened).iter_batches(batch_size=256):
                yield from _rows(batch, unreadable)
    except UserError:
        raise
    except Exception as error:  # a damaged page may raise any of Arrow's errors and of Python's
        raise UserError(f"{file}: cannot be read as Parquet ({first_line(error)}); a whole file would work") from None
    finally:
        report.notes += [f"{file}: {count} values of the column {name} cannot be read and are left out"
                         for name, count in unreadable.items()]


def _rows(batch: "pyarrow.RecordBatch", unreadable: Counter[str]) -> list[dict]:
    """Returns the rows of a batch without the values that cannot be read, which are counted by column."""
    try:
        return batch.to_pylist()
    except Exception:  # ValueError, OverflowError, UnicodeDecodeError, ArrowException, ...; now value by value
        rows: list[dict] = [{} for _ in range(batch.num_rows)]
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for row, value in zip(rows, column, strict=True):
            try:
                row[name] = value.as_py()
            except Exception:
                unreadable[name] += 1
    return rows


def _read_text(file: File, source: Source) -> str:
    try:
        with file.open_decompressed() as opened:
            content = opened.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(f"{file}: more than {MAX_BYTES >> 20} MiB in one text; {would_fit('several files')}")
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: byte {error.start} is not UTF-8 text; {source.would_work}") from None


def _read_npy(file: File, source: Source) -> Iterator[Int[np.ndarray, " n"]]:
    """Yields the array [tokens] itself, or the rows of an array [documents, tokens]."""
    try:
        if paths.is_remote(file.path):
            with file.open() as opened:
                array = np.load(opened, allow_pickle=False)
        else:
            array = np.load(Path(file.path).expanduser(), mmap_mode="r", allow_pickle=False)
    except UserError:
        raise
    except Exception as error:  # numpy raises ValueError, EOFError, SyntaxError and others of its own, and those of zipfile
        raise UserError(f"{file}: cannot be read as .npy ({first_line(error)}); {source.would_work}") from None
    if not isinstance(array, np.ndarray):
        raise UserError(f"{file}: is an .npz archive, not a single array; {source.would_work}")
    if array.ndim not in (1, 2):
        raise UserError(f"{file}: has shape {list(array.shape)}; [tokens] or [documents, tokens] would work")
    yield from (array,) if array.ndim == 1 else array


def _parser(format: str, clean: CleanConfig, report: SourceReport) -> Callable[[object, int, int], Record]:
    """Returns a function of (raw record, source number, record number) that returns the record or raises Drop."""
    if format == "text":
        return _parse_text
    if format == "tokens":
        return _parse_tokens
    cleaner = Cleaner(clean)

    def parse_conversation(raw: object, source: int, number: int) -> Conversation:
        cleaned = cleaner.clean(raw)
        report.repaired.update(cleaned.changes)
        return Conversation(cleaned.id, cleaned.messages, source, number, cleaned.tools)

    return parse_conversation


def _parse_text(raw: object, source: int, number: int) -> Text:
    text, prompt = raw.get("text") if isinstance(raw, dict) else raw, ""
    if isinstance(raw, dict) and text is None and isinstance(raw.get("prompt"), str) and isinstance(raw.get("completion"), str):
        if not raw["completion"].strip():
            raise Drop(EMPTY_TEXT)
        prompt = raw["prompt"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        text = prompt + raw["completion"]
    if not isinstance(text, str):
        raise Drop(NO_TEXT)
    if not text.strip():
        raise Drop(EMPTY_TEXT)
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # no tokenizer accepts lone surrogates
    return Text(_record_id(raw, text.encode()), text, source, number, len(prompt))


def _parse_tokens(raw: object, source: int, number: int) -> Tokens:
    """Reads token ids, alone or with a loss mask or labels beside them."""
    fields = raw if isinstance(raw, dict) else {"tokens": raw}
    tokens = _int32(fields.get("tokens", fields.get("input_ids")))
    if tokens is None:
        raise Drop(NO_TOKENS)
    mask = np.ones(len(tokens), bool)
    if fields.get("loss_mask") is not None:
        mask = _int32(fields["loss_mask"], allow_bool=True)
    elif fields.get("labels") is not None:  # as transformers' collators write them, not shifted
        labels = _int32(fields["labels"])
        mask = None if labels is None else labels != IGNORED_LABEL
    if mask is None or len(mask) != len(tokens):
        raise Drop(BAD_MASK)
    return Tokens(_record_id(raw, tokens.tobytes()), tokens, mask.astype(bool), source, number)


def _int32(values: object, allow_bool: bool = False) -> Int32[np.ndarray, " n"] | None:
    """Returns the values as an array, or None if they are not a non-empty list or array of 32-bit integers."""
    if not isinstance(values, list | np.ndarray) or len(values) == 0:
        return None
    if not allow_bool and isinstance(values, list) and any(isinstance(value, bool) for value in values):
        return None  # among integers, numpy would convert them to 0 and 1
    try:
        array = np.asarray(values)
    except ValueError:
        return None
    if array.ndim != 1 or array.dtype.kind not in ("iub" if allow_bool else "iu"):
        return None
    if array.min() < -(2**31) or array.max() >= 2**31:  # not abs(), whose value for the lowest int64 is negative
        return None
    return array.astype(np.int32)


def _record_id(raw: object, content: bytes) -> str:
    """Returns the record's own id, or a hash of its content; never a path, since files may be moved."""
    return (own_id(raw) if isinstance(raw, dict) else None) or hashlib.sha256(content).hexdigest()[:16]
