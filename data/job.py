"""A prepared folder's content: the arguments that decide it, its name, and its documents."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import PurePosixPath

import numpy as np

from data import cards, near_duplicates, paths, tables
from data import sources as source_readers
from data.conversation import Record, Tokens, TurnOrder
from data.digests import file_digests
from data.encode import Encoded, Encoder, EncodingRules, TokenDocument, encode_all
from data.errors import TransientError, UserError
from data.exact_duplicates import Seen
from data.index import IndexEntry, NewIndex
from data.mismatched import with_mismatched
from data.near_duplicates import NEAR_DUPLICATE, NOTHING_DROPPED, Dropped
from data.paths import File
from data.records import Advance
from data.report import Report, SourceReport
from data.sources import FileReader, Source, Sources, Unit
from data.templates import jinja_template
from data.templates.alternation import order_of
from data.templates.sandbox import compile_template
from data.tokenizer import Tokenizer

# Change with every change to the documents, so that existing folders are not reused.
RULES = "prepare-20"
# Bytes of a source above which several processes, slow to start, encode it.
WORTH_PROCESSES = 1 << 23


@dataclass
class Job:
    """The arguments of `prepare` that decide what the folder contains."""

    sources: Sources
    tokenizer: Tokenizer
    rules: EncodingRules

    @cached_property
    def orders(self) -> list[TurnOrder]:
        """The order of turns that each source's template requires."""
        return [
            order_of(source.template, self.tokenizer) if source.has_turns else "any"
            for source in self.sources.all
        ]

    def key(self) -> str:
        """Returns the folder's name, a hash of contents that does not change if a file moves."""
        encoding = asdict(self.rules)
        if not self.rules.clean.near_duplicates:
            # As in the names of folders before this option.
            del encoding["clean"]["near_duplicates"]
        parts = {
            "rules": RULES,
            **encoding,
            "tokenizer": self.tokenizer.fingerprint,
            "held_out_fraction": self.sources.held_out_fraction,
            "train_sources": len(self.sources.train),
            "template_date": self._template_date(),
            "template_kwargs": dict(self.tokenizer.template_kwargs),
            "sources": [
                [
                    _content_hash(source),
                    source.format,
                    template_text(source, self.tokenizer),
                    dict(source.fields),
                    source.adds_bos(self.tokenizer),
                    *(["control_tokens"] if source.control_tokens else []),
                ]
                for source in self.sources.all
            ],
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]

    def _template_date(self) -> str | None:
        """Returns the date written by the templates, or None if none writes one."""
        texts = [template_text(source, self.tokenizer) or "" for source in self.sources.all]
        is_written = any("strftime_now" in text for text in texts)
        return self.tokenizer.template_date.date().isoformat() if is_written else None

    def all_files(self, number: int) -> Unit:
        """Returns all files of a source as one unit."""
        files = tuple(self.sources.all[number].files())
        return Unit(number, 0, files, len(files) > 1)

    def units(self) -> list[Unit]:
        """Returns the files of all sources, in order, grouped if they need each other."""
        sources = [self.all_files(number) for number in range(len(self.sources.all))]
        # Completions for the KL term come from the previous record, even in another file.
        if self.rules.unpaired:
            return sources
        return [
            replace(whole, first=first, files=(file,))
            for whole in sources
            for first, file in enumerate(whole.files)
        ]

    def reader(self, unit: Unit, seen: Seen) -> FileReader:
        """Returns a reader of a unit's records; `seen` has hashes of earlier records."""
        number = unit.source
        return FileReader(
            self.sources.all[number],
            number,
            self.rules.clean,
            self.orders[number],
            unit.among_others,
            seen,
        )

    def compared(self, units: Sequence[Unit]) -> list[Unit]:
        """Returns the units to search for near duplicates; none if they are kept."""
        if not self.rules.clean.near_duplicates:
            return []
        return [unit for unit in units if self.sources.all[unit.source].format != "tokens"]

    def sign(self, unit: Unit, seen: Seen, work: str, advance: Advance | None = None) -> tuple[()]:
        """Writes a unit's near-duplicate signatures, see `data.near_duplicates.sign`."""

        def records() -> Iterator[Record]:
            try:
                yield from self.reader(unit, seen).read(list(unit.files), SourceReport(""), advance)
            except TransientError:
                raise
            except UserError:
                pass  # `documents` meets the error again

        return near_duplicates.sign(records(), self.rules.clean.near_duplicates, unit, work)

    def near_duplicates(self, work: str, unit: Unit) -> Dropped:
        """Returns the near duplicates found in a unit."""
        return near_duplicates.dropped(work, unit) if self.compared([unit]) else NOTHING_DROPPED

    def documents(
        self,
        unit: Unit,
        report: SourceReport,
        index: NewIndex,
        seen: Seen,
        advance: Advance | None = None,
        processes: int = 1,
        near: Dropped = NOTHING_DROPPED,
    ) -> Iterator[dict]:
        """Yields the fields of each document of a unit, as they are stored.

        Args:
          report: receives the counts of records.
          index: receives an entry for each document.
          seen: hashes of the source's records before this unit; repetitions are dropped.
          advance: called with the number of bytes of each read.
          processes: the number of processes that encode records.
          near: the unit's near duplicates.
        """
        records = self.reader(unit, seen).read(list(unit.files), report, advance)
        records = _without_near_duplicates(records, near, report)
        for record, encoded in self._encoded(records, unit.source, processes):
            if encoded.drop_reason is not None:
                report.reject(encoded.drop_reason, record, _content(record))
                continue
            report.count_kept(encoded.changes)
            held_out = self.sources.is_held_out(unit.source, record.id)
            for document in encoded.documents:
                index.add(_index_entry(document, unit.source, held_out))
                yield {
                    "tokens": document.tokens,
                    "loss_mask": document.loss_mask,
                    "source": unit.source,
                    "record_id": record.id,
                }

    def _encoded(
        self, records: Iterator[Record], source: int, processes: int
    ) -> Iterator[tuple[Record, Encoded]]:
        """Yields the records of a source with their encodings."""
        encoder = Encoder(self.sources.all[source], self.tokenizer, self.rules)
        encoded_records = encode_all(encoder, records, processes)
        if not self.rules.unpaired:
            return encoded_records

        def is_held_out(record: Record) -> bool:
            return self.sources.is_held_out(source, record.id)

        return with_mismatched(encoded_records, is_held_out, self.rules)

    def finish_source(self, number: int, report: SourceReport) -> None:
        """Checks and completes the report of a source that has been read.

        Raises:
          UserError: no record can be used, or none has a field that the source's `fields` name.
        """
        source_readers.check_usable(self.sources.all[number], report)
        if number < len(self.sources.train):  # the held-out file has the first source's `fields`
            source_readers.check_fields(self.sources.all[number], report)
        self.note_path(number, report)

    def note_path(self, number: int, report: SourceReport) -> None:
        """Puts warnings about a source's path into its report."""
        source, is_held_out = self.sources.all[number], number >= len(self.sources.train)
        report.path_notes = source.notes(is_held_out)
        if not is_held_out:
            return
        trained = {_place(file) for source in self.sources.train for file in source.files()}
        places = [_place(file) for file in source.files()]
        if both := sum(place in trained for place in places):
            which = "this file is" if len(places) == 1 else f"{both} of its {len(places)} files are"
            report.path_notes.append(
                f"{which} trained on too, so its loss is not that of unseen data; other files, or "
                "data.held_out_fraction, would make it so"
            )

    def check_ids(self) -> None:
        """Raises UserError early for an array with ids that the tokenizer lacks."""
        size = self.tokenizer.vocab_size
        for file, array in chain.from_iterable(map(_local_arrays, self.sources.all)):
            if array.ndim == 1 and len(array) and not 0 <= array.min() <= array.max() < size:
                raise UserError(
                    f"{file}: holds ids from {array.min()} to {array.max()}, and the tokenizer has "
                    f"0 to {size - 1}; ids of this tokenizer would work"
                )

    def check_split(self, all_held_out: bool, report: Report) -> None:
        """Raises UserError if no document is left to train on."""
        if all_held_out:
            records = "the only record" if report.kept == 1 else f"all of {report.kept} records"
            raise UserError(
                f"data.held_out_fraction: found {self.sources.held_out_fraction}, which takes "
                f"{records} and leaves none to train on; a smaller one would work"
            )


def _index_entry(document: TokenDocument, source: int, held_out: bool) -> IndexEntry:
    tokens, mask, chosen, label, shared = document
    return IndexEntry(
        length=len(tokens),
        trained=int(mask[1:].sum()),
        source=source,
        held_out=held_out,
        chosen=chosen,
        chosen_trained=int(mask[1:chosen].sum()),
        label=label,
        shared=shared,
    )


def _without_near_duplicates(
    records: Iterator[Record], near: Dropped, report: SourceReport
) -> Iterator[Record]:
    """Yields the records of a unit that are not near duplicates, and counts the others."""
    report.notes += [near.note] if near.note else []
    for row, record in enumerate(records):
        if kept := near.rows.get(row):
            report.reject(NEAR_DUPLICATE, record, _content(record), kept._asdict())
        else:
            yield record


def _content(record: Record) -> object:
    """Returns a record for dropped.jsonl, without its location, which precedes it; None for token
    ids."""
    if isinstance(record, Tokens):
        return None
    location = ("source", "record", "file", "line")
    return {name: value for name, value in asdict(record).items() if name not in location}


def processes_for(source: Source) -> int:
    """Returns how many processes encode a source: one per core, or a single one for little work."""
    size = sum(file.size() for file in source.files())
    return _cores() if source.format != "tokens" and size >= WORTH_PROCESSES else 1


def _cores() -> int:
    """Returns the cores that this process may use; Slurm, containers and taskset may limit them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def template_text(source: Source, tokenizer: Tokenizer) -> str | None:
    """Returns a source's Jinja chat template, or None if it has no conversations.

    Raises:
      UserError: there is no such template, or it uses something not allowed.
    """
    if not source.has_turns:
        return None
    text = jinja_template(source.template, tokenizer)
    compile_template(text)
    return text


def check_arrays(source: Source) -> None:
    """Raises UserError early for arrays that are not token ids; reads only their headers."""
    for file, array in _local_arrays(source):
        if array.dtype.kind not in "iu":
            raise UserError(f"{file}: holds {array.dtype}, not integers; {source.would_work}")


def _place(file: File) -> str:
    """A file's path without links; in a store, as written."""
    return file.path if paths.is_remote(file.path) else os.path.realpath(file.path)


def _local_arrays(source: Source) -> Iterator[tuple[File, np.ndarray]]:
    """Yields the .npy files of a source of tokens that are on this machine, memory-mapped."""
    for file in source.files() if source.format == "tokens" else ():
        if file.suffix == ".npy" and not paths.is_remote(file.path) and file.exists():
            yield file, tables.open_npy(file, source.would_work)


def _content_hash(source: Source) -> str:
    """Returns a hash of the contents of the source's files, in order, and of their kinds."""
    files = source.files()
    if not all(file.exists() for file in files):
        next(source_readers.read(source, Report()), None)  # raises the error about the missing file
    digest = hashlib.sha256()
    for file, content in zip(files, file_digests(files, source.path), strict=True):
        digest.update(bytes.fromhex(content))
        digest.update(_reader(file, source).encode())
    return digest.hexdigest()


def _reader(file: File, source: Source) -> str:
    """Returns the part of a file's name that decides how its bytes are read.

    A table's rows are cut at commas or at tabs, a text may be JSON or a data set's card.
    """
    if PurePosixPath(file.path).name == cards.NAME:
        return cards.NAME
    is_text = source.format == "text" and file.suffix not in (
        *source_readers.JSON,
        *tables.SUFFIXES,
    )
    return ".txt" if is_text else file.suffix if file.suffix == ".tsv" else ""
