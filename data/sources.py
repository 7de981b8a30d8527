"""Where data come from: which sources there are, and how the records of each format are read, one at a time."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data import paths
from data.clean import CleanConfig, Cleaner, Drop
from data.conversation import Conversation, Text, Tokens
from data.errors import UserError
from data.paths import File
from data.records import read_records
from data.report import Report, SourceReport

Advance = Callable[[int], None] | None
Item = Conversation | Text | Tokens

# Of each format: the files that a folder is searched for, and what is told to a user whose file is none of it.
SUFFIXES = {
    "sharegpt": (".json", ".jsonl", ".parquet"),
    "text": (".txt", ".md", ".json", ".jsonl", ".parquet"),
    "tokens": (".npy", ".json", ".jsonl", ".parquet"),
}
FORMATS = tuple(SUFFIXES)
WOULD_WORK = {
    "sharegpt": "records with turns human, gpt, human, gpt, ... would work",
    "text": "a plain UTF-8 text, or JSON records with a string `text`, would work",
    "tokens": "a .npy array of integers, or JSON records with a list `tokens` and perhaps a `loss_mask`, would work",
}

EMPTY_TEXT = "empty text"
NO_TEXT = "no `text`"
NO_TOKENS = "no list of integers in `tokens` or `input_ids`"
BAD_MASK = "`loss_mask` or `labels` unlike its tokens"


@dataclass(frozen=True)
class Source:
    """One entry of a recipe's `data.sources`.

    path: a file, or a folder of files, here or in a store (gs://, s3://). format: `sharegpt` (records: `conversations` with
    from/value, or `messages` with role/content), `text` (a plain text is one document; records have `text`) or `tokens`
    (`.npy`, or records with `tokens`). Records are a JSON list, JSON lines or the rows of a Parquet file; JSON and texts may be
    packed as .gz. template: of conversations, a name of
    data.templates. weight: how often each of its documents is seen in an epoch, on average (0.5: half of them, other
    ones each epoch).
    """

    path: str
    format: str = "sharegpt"
    template: str = "vicuna_v1.1"
    weight: float = 1.0

    def __post_init__(self):
        if self.format not in FORMATS:
            raise UserError(f"data.sources: format {self.format!r} is unknown; {', '.join(FORMATS)} would work")
        if not 0 < self.weight < float("inf"):
            raise UserError(f"data.sources: weight {self.weight} of {self.path} must be a number above 0")

    def files(self) -> list[File]:
        """The source's file, or those of its folder, sorted; UserError for a folder without any."""
        suffixes = SUFFIXES[self.format]
        found = paths.find(self.path, suffixes)
        if not found:
            raise UserError(f"{self.path}: no {' or '.join(suffixes)} file in this folder; {WOULD_WORK[self.format]}")
        return found


def read(
    source: Source, report: Report, number: int = 0, advance: Advance = None, clean: CleanConfig = CleanConfig()
) -> Iterator[Item]:
    """Streams the source's usable records; `report` accounts for every record, used or not.

    number is the source's place in the recipe, advance(bytes) is told what was read. Raises UserError when a file
    is missing, empty or not of its format, and, at its end, when not one of its records was usable (with the reasons' counts).
    """
    account = report.open(str(source.path))
    take = {"sharegpt": _conversation(Cleaner(clean), account), "text": _text, "tokens": _tokens}[source.format]
    for file in source.files():
        for record in _records(file, source.format, account, advance):
            try:
                item = take(record, number, account.records + 1)
            except Drop as drop:
                account.drop(str(drop), None if isinstance(record, np.ndarray) else record)
            else:
                account.keep()
                yield item
    if not account.records:
        raise UserError(f"{source.path}: a JSON list without records; {WOULD_WORK[source.format]}")
    if not account.kept:
        raise UserError(
            f"{source.path}: none of its {account.records} records is a usable "
            f"{'conversation' if source.format == 'sharegpt' else source.format} ({account.reasons()}); "
            f"{WOULD_WORK[source.format]}"
        )


def _records(file: File, format: str, account: SourceReport, advance: Advance) -> Iterator[object]:
    """JSON values, one string for a plain text, or arrays [n]."""
    if file.suffix != ".parquet" and (format == "sharegpt" or file.suffix in (".json", ".jsonl")):
        yield from read_records(file, account, advance)
        return
    if not file.exists():
        raise UserError(f"{file}: no such file; {WOULD_WORK[format]}")
    if file.suffix == ".parquet":
        yield from _rows(file)
    elif format == "text":
        try:
            with file.unpacked() as opened:
                yield opened.read().decode("utf-8-sig").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: byte {error.start} is not UTF-8 text; {WOULD_WORK[format]}") from None
    else:
        yield from _array(file)
    if advance:
        advance(file.size())


def _rows(file: File) -> Iterator[dict]:
    """A Parquet file's rows, a few hundred in memory at a time; UserError for one that cannot be read."""
    import pyarrow
    from pyarrow import parquet

    try:
        with file.open() as opened:
            for batch in parquet.ParquetFile(opened).iter_batches(batch_size=256):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{file}: cannot be read as Parquet ({str(error).splitlines()[0]})") from None


def _array(file: File) -> Iterator[np.ndarray]:
    try:
        if paths.is_remote(file.path):
            with file.open() as opened:
                array = np.load(opened, allow_pickle=False)
        else:
            array = np.load(Path(file.path).expanduser(), mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"{file}: cannot be read as .npy ({error}); {WOULD_WORK['tokens']}") from None
    if array.ndim not in (1, 2):
        raise UserError(f"{file}: has shape {list(array.shape)}; [tokens] or [documents, tokens] would work")
    yield from (array,) if array.ndim == 1 else array


def _conversation(cleaner: Cleaner, account: SourceReport):
    def take(record: object, source: int, number: int) -> Conversation:
        identity, messages, changes = cleaner.clean(record)
        account.repaired.update(changes)
        return Conversation(identity, messages, source, number)

    return take


def _text(record: object, source: int, number: int) -> Text:
    text = record.get("text") if isinstance(record, dict) else record
    if not isinstance(text, str):
        raise Drop(NO_TEXT)
    if not text.strip():
        raise Drop(EMPTY_TEXT)
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # no tokenizer takes half a character
    return Text(_identity(record, text.encode()), text, source, number)


def _tokens(record: object, source: int, number: int) -> Tokens:
    fields = record if isinstance(record, dict) else {"tokens": record}
    tokens = _integers(fields.get("tokens", fields.get("input_ids")))
    if tokens is None:
        raise Drop(NO_TOKENS)
    mask = np.ones(len(tokens), bool)
    if fields.get("loss_mask") is not None:
        mask = _integers(fields["loss_mask"], bools=True)
    elif fields.get("labels") is not None:  # as transformers' collators write them: unshifted, -100 is left out
        labels = _integers(fields["labels"])
        mask = None if labels is None else labels != -100
    if mask is None or len(mask) != len(tokens):
        raise Drop(BAD_MASK)
    return Tokens(_identity(record, tokens.tobytes()), tokens, mask.astype(bool), source, number)


def _integers(values: object, bools: bool = False) -> np.ndarray | None:
    """int32 [n], or None where the values are anything else."""
    if not isinstance(values, list | np.ndarray) or len(values) == 0:
        return None
    if not bools and isinstance(values, list) and any(isinstance(value, bool) for value in values):
        return None  # beside integers, numpy makes 0 and 1 of them
    try:
        array = np.asarray(values)
    except ValueError:
        return None
    if array.ndim != 1 or array.dtype.kind not in ("iub" if bools else "iu"):
        return None
    if array.min() < -(2**31) or array.max() >= 2**31:  # not abs(): that of the lowest int64 is itself
        return None
    return array.astype(np.int32)


def _identity(record: object, content: bytes) -> str:
    """The record's own id, else a hash of its content: never a path, which may change."""
    identity = record.get("id") if isinstance(record, dict) else None
    if isinstance(identity, (str, int)) and identity != "":
        return str(identity)
    return hashlib.sha256(content).hexdigest()[:16]
