"""The data sources of a recipe, and the readers of each format; `data.tables` reads tables."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np

from data import cards, hub, preference, source_files, tables
from data.clean import CleanConfig, Cleaner
from data.conversation import DEFAULT_TEMPLATE, Conversation, Record, Text, Tokens, TurnOrder
from data.errors import UserError
from data.exact_duplicates import Seen
from data.fields import RECORD_TARGETS, ROLE_TARGETS, TURN_TARGETS, FieldMap, shown_fields
from data.paths import File
from data.plain_records import NO_TEXT, NO_TOKENS, parse_text, parse_tokens
from data.preference import PreferenceReader
from data.printable import printable
from data.reasons import MISSING, NO_SHAPE, TREE_MESSAGE, Drop
from data.records import (
    BEGINNING,
    MAX_BYTES,
    TAR,
    Advance,
    EmptyFile,
    OnlyObject,
    kind_of,
    no_such_file,
    read_records,
    with_whether_alone,
    would_fit,
)
from data.report import Report, SourceReport
from data.shapes import records_of
from data.templates.alternation import order_of
from data.tokenizer import Tokenizer
from data.trees import Forest, is_row

# Reasons to drop what is not a record.
_NO_RECORD = (NO_SHAPE, NO_TEXT, NO_TOKENS, MISSING, preference.NO_PREFERENCE)
# Targets of a source's `fields`.
_FIELDS = {
    "sharegpt": (*ROLE_TARGETS, *TURN_TARGETS, *RECORD_TARGETS),
    "text": ("text", "prompt", "completion", "id"),
    "tokens": ("tokens", "loss_mask", "labels", "id"),
    "preference": preference.TARGETS,
}
TURN_FORMATS = ("sharegpt", "preference")
"""Formats whose records a chat template renders."""


class Format(NamedTuple):
    """A format of records."""

    suffixes: tuple[str, ...]
    """Suffixes of the files that are read from a folder."""
    would_work: str
    """What would work, for messages about a file not in this format."""


JSON = (".json", ".jsonl", ".jsonlines", ".ndjson")
"""Suffixes of files read as JSON or JSON lines."""
MOST_NAMED = 5  # files in a message
MOST_WEIGHT = 1_000_000
FORMATS = {
    "sharegpt": Format(
        (*JSON, *tables.SUFFIXES),
        "records with `messages`, `conversations`, `instruction` and `output`, `prompt` and "
        "`completion`, `question` and `answer` and others (docs/data.md), or the source's "
        "`fields`, such as {question: user, answer: assistant}, would work",
    ),
    "text": Format(
        (".txt", ".md", *JSON, *tables.SUFFIXES),
        "a plain UTF-8 text, or JSON records with a string `text`, or the source's `fields`, such "
        "as {content: text}, would work",
    ),
    "preference": Format(
        (*JSON, *tables.SUFFIXES),
        "records with `prompt`, `chosen` and `rejected`, or conversations `chosen` and `rejected` "
        "that begin alike, or `prompt`, `completion` and `label`, or the source's `fields`, such "
        "as {question: prompt, better: chosen, worse: rejected}, would work",
    ),
    "tokens": Format(
        (".npy", *JSON, ".parquet", ".arrow"),
        "a .npy array of integers, or JSON records with a list `tokens` and perhaps a "
        "`loss_mask`, would work",
    ),
}


@dataclass(frozen=True)
class Source:
    """One entry of a recipe's `data.sources`.

    Records are the elements of a JSON list, JSON lines or the rows of a table (Parquet, Arrow,
    CSV); files of text may be compressed.
    """

    path: str
    """A file, or a folder of files, on this machine or in a store (gs://, s3://); the last part may
    be a pattern."""
    format: str = "sharegpt"
    """`sharegpt` (records with `conversations` of from/value, or `messages` of role/content),
    `text` (a plain text file is one document; records have `text`, or `prompt` and `completion`),
    `tokens` (a .npy file, or records with `tokens`) or `preference` (records with `prompt`,
    `chosen` and `rejected`, or `prompt`, `completion` and `label`)."""
    template: str = DEFAULT_TEMPLATE
    """Name of the conversations' chat template, one of data.templates.NAMES."""
    weight: float = 1.0
    """How often each document is used per epoch, on average, up to MOST_WEIGHT: with 0.5 in every
    second epoch, and each epoch has half of the documents."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Maps the records' field names to roles or fields that are read, see `data.fields`."""
    add_bos: bool | None = None
    """Whether a text begins with BOS; None follows the tokenizer's default."""
    control_tokens: bool = False
    """Whether control tokens written in a text are read as such instead of as plain text."""
    left_out: tuple[str, ...] = ()
    """Folders in which no file is read, such as that of prepared data."""

    def __post_init__(self):
        if self.format not in FORMATS:
            raise UserError(
                f"data.sources: format {self.format!r} is unknown; {', '.join(FORMATS)} would work"
            )
        if not 0 < self.weight <= MOST_WEIGHT:
            raise UserError(
                f"data.sources: weight {self.weight} of {self.path} must be a number above 0, up "
                f"to {MOST_WEIGHT:,}"
            )
        valid = _FIELDS[self.format]
        for name, target in self.fields.items():
            if target not in valid:
                raise UserError(
                    f"data.sources: fields of {self.path}: {name!r} stands for {target!r}; "
                    f"{', '.join(valid)} would work"
                )
        if self.add_bos is not None and self.format != "text":
            raise UserError(
                f"data.sources: add_bos of {self.path}: is for format: text; of conversations the "
                "template writes BOS, and tokens are used as they are"
            )
        if self.control_tokens and self.format != "text":
            raise UserError(
                f"data.sources: control_tokens of {self.path}: is for format: text; in turns the "
                "tags named in data.text_tokens are read as tokens"
            )

    @property
    def has_turns(self) -> bool:
        """Whether its records consist of turns, rendered by a chat template."""
        return self.format in TURN_FORMATS

    def adds_bos(self, tokenizer: Tokenizer) -> bool:
        """Returns whether its texts begin with BOS."""
        adds_bos = tokenizer.adds_bos if self.add_bos is None else self.add_bos
        return self.format == "text" and adds_bos

    @property
    def would_work(self) -> str:
        """What would work, for messages about a file not in the source's format."""
        return FORMATS[self.format].would_work

    def files(self) -> list[File]:
        """Returns the source's file, or those of its folder or pattern, sorted by path, as of the
        first call.

        Raises:
          UserError: the folder contains no file of the format, or has several configurations and no
            default one.
        """
        found = self._found
        if not found.files:
            suffixes = FORMATS[self.format].suffixes
            apart = f" apart from {', '.join(self.left_out)}" if self.left_out else ""
            unread = f" (found {_named(found.unread)})" if found.unread else ""
            remedy = self.would_work
            if ".txt" not in suffixes and any(
                name.lower().endswith(".txt") for name in found.unread
            ):
                remedy = (
                    f"for texts --data.sources '[{{path: {self.path}, format: text}}]' would work"
                )
            raise UserError(
                f"{self.path}: no {' or '.join(suffixes)} file {found.where}{apart}{unread}; "
                f"{remedy}"
            )
        return found.files

    @cached_property
    def _found(self) -> source_files.SourceFiles:
        return source_files.find(self.path, FORMATS[self.format].suffixes, self.left_out)

    def notes(self, is_held_out: bool) -> list[str]:
        """Returns warnings about its path: which files are not read, or of other splits.

        Args:
          is_held_out: whether the source is not trained on.
        """
        found = self._found
        notes = [*found.notes]
        if found.unread:
            notes.append(
                f"not read: {_named(found.unread)}; files whose names end in "
                f"{', '.join(FORMATS[self.format].suffixes)}, perhaps compressed, are read unless "
                "a part of the path begins with a dot or is a link to a folder"
            )
        others = [] if is_held_out else hub.other_splits([str(file) for file in found.files])
        if others:
            notes.append(
                f"also reads {_named(others)}; the path of the training split's folder, file or "
                "files, such as 'FOLDER/train*', leaves them out"
            )
        return notes


def _named(names: Sequence[str]) -> str:
    """Returns the first of some files' names, for a message."""
    others = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return printable(", ".join(names[:MOST_NAMED])) + others


@dataclass(frozen=True)
class Sources:
    """The sources of prepared data, and which of their records are held out."""

    train: tuple[Source, ...]
    """The sources to train on."""
    held_out: tuple[Source, ...] = ()
    """Sources that belong to the split held_out entirely."""
    held_out_fraction: float = 0.0
    """The fraction of records of `train`, chosen by a hash of their ids, for the split held_out."""

    def __post_init__(self) -> None:
        if not self.train:
            raise UserError("no data: data.sources is empty; --data.path FILE.json would work")
        if not 0.0 <= self.held_out_fraction < 1.0:
            raise UserError(
                f"data.held_out_fraction: found {self.held_out_fraction}; a number from 0 to less "
                "than 1 would work"
            )

    @property
    def all(self) -> tuple[Source, ...]:
        """All sources, by number: those to train on, then the held-out ones."""
        return (*self.train, *self.held_out)

    def is_held_out(self, source: int, record_id: str) -> bool:
        """Returns whether a record of a source belongs to the split held_out."""
        if source >= len(self.train):
            return True
        digest = hashlib.sha256(f"held-out\0{record_id}".encode()).digest()
        number = int.from_bytes(digest[:8], "big")
        return number < self.held_out_fraction * 2**64

    def leaving_out(self, folder: str) -> "Sources":
        """Returns the sources without the files in a folder."""
        train, held_out = (
            tuple(replace(source, left_out=(folder,)) for source in sources)
            for sources in (self.train, self.held_out)
        )
        return replace(self, train=train, held_out=held_out)


def read(
    source: Source,
    report: Report,
    number: int = 0,
    advance: Advance | None = None,
    clean: CleanConfig = CleanConfig(),
    order: TurnOrder | None = None,
) -> Iterator[Record]:
    """Yields the usable records of a source, and counts every record in `report`.

    Args:
      report: receives a new SourceReport.
      number: number of the source in the recipe.
      advance: called with the number of bytes of each read.
      clean: the cleaning rules for conversations.
      order: the order of turns that the template requires; by default any.

    Raises:
      UserError: a file is missing, empty or not in the source's format; at the end, if no record
        was usable.
    """
    source_report = report.add_source(str(source.path))
    reader = FileReader(source, number, clean, order)
    yield from reader.read(source.files(), source_report, advance)
    check_usable(source, source_report)
    check_fields(source, source_report)


@dataclass(frozen=True)
class Unit:
    """Files of a source that one worker reads in order."""

    source: int
    """Number of the source in the recipe."""
    first: int
    """Number of the first file in the source."""
    files: tuple[File, ...]
    among_others: bool
    """Whether the source has several files."""

    @property
    def name(self) -> str:
        """The unit's name in the folder that workers share."""
        return f"{self.source}-{self.first}"


@dataclass
class FileReader:
    """Reads some or all files of a source, in order; other processes may read the others."""

    source: Source
    number: int = 0
    """Number of the source in the recipe."""
    clean: CleanConfig = CleanConfig()
    order: TurnOrder | None = None
    """See `read`."""
    among_others: bool | None = None
    """Whether the source has several files; by default whether several are read."""
    seen: Seen = field(default_factory=set[bytes])
    """Hashes of records in earlier files; those of the records read are added."""
    has_tree_rows: bool = False
    """Whether rows of trees of messages were among the records; they need all files at once."""

    def read(
        self, files: list[File], report: SourceReport, advance: Advance | None = None
    ) -> Iterator[Record]:
        """Yields the usable records of files, and counts every record in `report`."""
        parser = _RecordParser(self, report)
        among_others = len(files) > 1 if self.among_others is None else self.among_others
        for file in files:
            report.file, report.line = str(file), 0
            raw_records = _raw_records(file, self.source, report, advance)
            if among_others:
                raw_records = _without_metadata(raw_records, parser, report)
            for raw in raw_records:
                yield from parser.records(raw)
        self.has_tree_rows = parser.forest.has_rows
        for tree in parser.forest.trees(report):
            yield from parser.records(tree)


def check_usable(source: Source, report: SourceReport) -> None:
    """Raises UserError if no record of a source can be used."""
    if not report.records:
        raise UserError(f"{source.path}: holds no records; {source.would_work}")
    if not report.kept:
        kind = "conversation" if source.format == "sharegpt" else source.format
        found = f"none of its {report.records} records is"
        raise UserError(
            f"{source.path}: {'its only record is not' if report.records == 1 else found} a usable "
            f"{kind} ({report.reasons()}); {source.would_work}"
        )


def check_fields(source: Source, report: SourceReport) -> None:
    """Raises UserError if no record of a source has a field that its `fields` name."""
    if missing := [name for name in source.fields if name not in report.found]:
        raise UserError(
            printable(
                f"data.sources: fields of {source.path}: none of its {report.records} records has "
                f"{' or '.join(f'`{name}`' for name in missing)}; names that its records have, as "
                "they are written there, would work"
            )
        )


_Reader = Callable[[object], tuple[Record, Set[str], Set[str]]]
"""A function from a raw record to the record, its changes and its unread fields; raises Drop."""


class _RecordParser:
    """Makes records of a source's raw ones, in their order, and counts them in a report.

    Attributes:
      forest: rows of message trees, whose records come after those of all files.
    """

    def __init__(self, reader: FileReader, report: SourceReport):
        order = reader.order or order_of(reader.source.template)
        self._new_reader = partial(_reader_of, reader.source, reader.clean, order)
        self._read = self._new_reader(reader.seen, report.found)
        self._number, self._report, self._noted = reader.number, report, set[str]()
        self.forest = Forest(reader.clean.replies == "all")

    def records(self, raw: object) -> Iterator[Record]:
        """Yields a raw record's records: itself, those of its tree, or of a list within it.

        Counts drops.
        """
        for record in self.forest.records(raw):
            yield from self._records(record)

    def _records(self, raw: object) -> Iterator[Record]:
        report = self._report
        if isinstance(raw, OnlyObject):
            name = records_of(raw)
            if name and any(self.accepts(entry) for entry in raw[name]):
                yield from self._inner_records(raw, name)
                return
        try:
            record, changes, unread = self._read(raw)
        except Drop as drop:
            if str(drop) == TREE_MESSAGE and isinstance(raw, dict) and is_row(raw):
                self.forest.add(raw, report)
                return
            name = self.wrapped_list(raw) if str(drop).startswith(_NO_RECORD) else None
            if name is None or not isinstance(raw, dict):
                report.drop(str(drop), None if isinstance(raw, np.ndarray) else raw)
                return
            yield from self._inner_records(raw, name)
            return
        report.keep(changes, unread)
        yield replace(
            record, source=self._number, record=report.records, file=report.file, line=report.line
        )

    def _inner_records(self, raw: dict, name: str) -> Iterator[Record]:
        """Yields the records in a field of an object, and notes which fields are not read."""
        report, others = self._report, sorted(raw.keys() - {name})
        note = f"{report.file}: the records are the list in its field `{printable(name)}`"
        note += f"; not read: {shown_fields(dict.fromkeys(others, ''))}" if others else ""
        if note not in self._noted:  # each line of a file may be such an object
            self._noted.add(note)
            report.notes.append(note)
        for position, inner in enumerate(raw[name], 1):
            if isinstance(raw, OnlyObject):
                report.line = position
            yield from self.records(inner)

    def wrapped_list(self, raw: object) -> str | None:
        """Returns the field with the list of records in an object such as {"data": [...]}; None
        for others."""
        if not isinstance(raw, dict):
            return None
        lists = [
            name
            for name, value in raw.items()
            if isinstance(value, list) and value and isinstance(value[0], dict)
        ]
        return lists[0] if len(lists) == 1 and self.accepts(raw[lists[0]][0]) else None

    def accepts(self, raw: object) -> bool:
        """Returns whether a value is meant as a record, even a faulty one; nothing is counted or
        remembered."""
        try:
            self._new_reader(set(), set())(raw)
        except Drop as drop:
            return not str(drop).startswith(_NO_RECORD)
        return True


def _reader_of(
    source: Source, clean: CleanConfig, order: TurnOrder, seen: Seen, found: set[str]
) -> _Reader:
    """Returns a function that reads a source's raw records; `seen` receives their hashes, `found`
    the names in the source's `fields` that they have."""
    if source.format == "preference":
        return PreferenceReader(clean, order, source.fields, seen, found).read
    if source.format == "sharegpt":
        return partial(_read_conversation, Cleaner(clean, order, source.fields, seen, found))
    return partial(_read_plain, source.format, FieldMap(source.fields, found))


def _read_conversation(
    cleaner: Cleaner, raw: object
) -> tuple[Conversation, set[str], frozenset[str]]:
    cleaned = cleaner.clean(raw)
    read = Conversation(cleaned.id, cleaned.messages, cleaned.tools, cleaned.template_kwargs)
    return read, cleaned.changes, cleaned.unread


def _read_plain(
    format: str, names: FieldMap, raw: object
) -> tuple[Text | Tokens, set[str], set[str]]:
    if isinstance(raw, dict):
        raw = names.record(raw)
    if format == "tokens":
        return parse_tokens(raw)
    return parse_text(raw)


def _without_metadata(
    raw_records: Iterator[object], parser: _RecordParser, report: SourceReport
) -> Iterator[object]:
    """Yields the records of one file among others, unless it is empty or a single object that is
    not a record."""
    try:
        for raw, is_alone in with_whether_alone(raw_records, report):
            if not is_alone or not (problem := _metadata_in(raw, parser, report.file)):
                yield raw
            else:
                report.notes.append(f"{report.file}: skipped: it {problem}")
    except EmptyFile:
        report.notes.append(f"{report.file}: skipped: the file is empty")


def _metadata_in(raw: object, parser: _RecordParser, file: str) -> str | None:
    """Returns what the only value of a file is if it is about a data set, for a message."""
    if isinstance(raw, dict) and not (parser.accepts(raw) or parser.wrapped_list(raw)):
        return f"holds a single object that is not a record, with {shown_fields(raw)}"
    name = PurePosixPath(file).name
    if isinstance(raw, str) and name == cards.NAME and cards.has_fields(raw):
        return "is the card of a data set"
    return None


def _raw_records(
    file: File, source: Source, report: SourceReport, advance: Advance | None
) -> Iterator[object]:
    """Yields JSON values, one string for a plain text file, or arrays [n] of token ids."""
    if file.suffix not in (*tables.SUFFIXES, ".npy") and (source.has_turns or file.suffix in JSON):
        yield from read_records(file, report, advance)
        return
    if not file.exists():
        raise no_such_file(file, source.would_work)
    if file.suffix in tables.SUFFIXES:
        records: Iterator[object] = tables.read_table(file, report)
    elif source.format == "text":
        text = _read_text(file, source)
        if _begins_with_record(text, source):
            report.notes.append(
                f"{file}: begins with a record in JSON and is read as one plain text; under a name "
                "that ends in .jsonl its records would be read"
            )
        records = iter([text])
    else:
        records = tables.read_npy(file, source.would_work)
    for report.line, record in enumerate(records, 1):
        yield record
    if advance:
        advance(file.size())


def _begins_with_record(text: str, source: Source) -> bool:
    """Returns whether the first line of a plain text is a record in JSON."""
    if not text.startswith("{"):
        return False
    try:
        raw = json.loads(text.partition("\n")[0])
        _read_plain("text", FieldMap(source.fields, set()), raw)
    except (ValueError, RecursionError, Drop):
        return False
    return True


def _read_text(file: File, source: Source) -> str:
    try:
        with file.open_decompressed() as opened:
            content = opened.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(
                f"{file}: more than {MAX_BYTES >> 20} MiB in one text; {would_fit('several files')}"
            )
        if kind_of(content[:BEGINNING]) == TAR:
            raise UserError(f"{file}: is {TAR}; {source.would_work}")
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: byte {error.start} is not UTF-8 text; {source.would_work}"
        ) from None
