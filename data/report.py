"""Counts records per source: kept, dropped, repaired; and unread fields."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from data.conversation import Record

MOST_DROPPED = 100_000  # records that dropped.jsonl lists
LONGEST_CONTENT = 100_000  # characters of a record's JSON in it
MOST_NAMES = 200  # reasons, changes and fields that a report counts separately
OTHER_FIELDS = "other fields"
_COUNTERS = ("dropped", "repaired", "unread")  # of a SourceReport


class DroppedRecord(NamedTuple):
    """An unused record; a line of dropped.jsonl holds these fields."""

    source: int
    """Number of the source in the recipe."""
    record: int
    """Number of the record in the source, from 1."""
    reason: str
    content: object
    """The record as far as it could be read, cut to a text if long; None for token ids."""
    file: str = ""
    """The file that it was read from."""
    line: int = 0
    """Its line in JSON lines, its row in a table, or its number in a list, from 1."""
    near_duplicate_of: Mapping[str, Any] | None = None
    """For a near duplicate: `file` and `line` of the kept record, and their similarity."""

    def to_json(self) -> str:
        """Returns the line of dropped.jsonl; values that JSON lacks, such as dates, become text."""
        fields = self._asdict()
        if self.near_duplicate_of is None:
            del fields["near_duplicate_of"]
        try:
            content = json.dumps(self.content, default=_as_text)
            if len(content) <= LONGEST_CONTENT:
                return json.dumps(fields, default=_as_text)
            cut: str | None = f"{content[:LONGEST_CONTENT]} ... (cut, {len(content)} characters)"
        except RecursionError:  # nested almost as deeply as Python reads
            cut = None
        return json.dumps({**fields, "content": cut})


def _as_text(value: object) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


OnDrop = Callable[[DroppedRecord], object]
_NUMBERS = re.compile(r'\{"source": (\d+), "record": (\d+)')  # the beginning of to_json's result


@contextmanager
def dropped_file(path: Path) -> Iterator[OnDrop]:
    """Yields a function that adds a record to a file of JSON lines, up to MOST_DROPPED.

    At the end the lines are sorted by source and record, since reading is ahead of encoding by a
    number of records that depends on the number of processes.
    """
    locations: list[tuple[int, int, int]] = []  # source, record, offset of the line
    with path.open("w+", encoding="ascii") as file:

        def add(record: DroppedRecord) -> None:
            if len(locations) < MOST_DROPPED:
                locations.append((record.source, record.record, file.tell()))
                file.write(record.to_json() + "\n")

        yield add
        if locations == sorted(locations):
            return
        with path.with_suffix(".sorted").open("w", encoding="ascii") as ordered:
            for _, _, offset in sorted(locations):
                file.seek(offset)
                ordered.write(file.readline())
    path.with_suffix(".sorted").replace(path)


def renumbered(line: str, before: int) -> str:
    """Returns a line of dropped.jsonl whose record comes after `before` others of its source."""
    return _NUMBERS.sub(
        lambda match: f'{{"source": {match[1]}, "record": {int(match[2]) + before}', line, count=1
    )


@dataclass
class SourceReport:
    """The counts of one source; between two records, `records == kept + sum(dropped.values())`."""

    path: str
    records: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of dropped records for each reason."""
    repaired: Counter[str] = field(default_factory=Counter)
    """Number of records kept after each kind of change; a record may have several."""
    unread: Counter[str] = field(default_factory=Counter)
    """Number of kept records with each unread field, such as "record field `source`"."""
    found: set[str] = field(default_factory=set)
    """Names in the source's `fields` that a record or turn has."""
    notes: list[str] = field(default_factory=list)
    """Warnings, such as for a file that ends within a record."""
    path_notes: list[str] = field(default_factory=list)
    """Warnings about the path: files that are not read, or of other splits."""
    source: int = 0
    """Number of the source in the recipe."""
    on_drop: OnDrop | None = field(default=None, repr=False, compare=False)
    """Called with each dropped record."""
    file: str = field(default="", repr=False, compare=False)
    """The file that is being read."""
    line: int = field(default=0, repr=False, compare=False)
    """Line, row or number in the file of the last record read; see DroppedRecord.line."""
    most_names: int = field(default=MOST_NAMES, repr=False, compare=False)
    """Reasons, changes and fields counted separately."""

    def keep(self, changes: Iterable[str], unread: Iterable[str]) -> None:
        """Counts the next record as kept, with its changes and unread fields."""
        self.records += 1
        self.kept += 1
        self.count_kept(changes, unread)

    def drop(self, reason: str, content: object = None) -> None:
        """Counts the next record as dropped."""
        self.records += 1
        self._count_dropped(
            DroppedRecord(self.source, self.records, reason, content, self.file, self.line)
        )

    def reject(
        self,
        reason: str,
        record: Record,
        content: object = None,
        near_duplicate_of: Mapping[str, Any] | None = None,
    ) -> None:
        """Counts as dropped a record previously counted as kept: it could not be encoded, or is a
        near duplicate."""
        self.kept -= 1
        location = (record.file, record.line)
        self._count_dropped(
            DroppedRecord(self.source, record.record, reason, content, *location, near_duplicate_of)
        )

    def count_kept(self, changes: Iterable[str], unread: Iterable[str] = ()) -> None:
        """Counts the changes and unread fields of a kept record."""
        # Sorted, since only the first names are counted separately.
        for change in sorted(changes):
            self._count("repaired", change)
        for name in sorted(unread):
            self._count("unread", name)

    def add(self, part: "SourceReport") -> None:
        """Adds the counts of the source's next files, which count every name separately."""
        self.records += part.records
        self.kept += part.kept
        self.notes += part.notes
        self.found |= part.found
        for kind in _COUNTERS:
            for name, count in getattr(part, kind).items():
                self._count(kind, name, count)

    def _count_dropped(self, record: DroppedRecord) -> None:
        self._count("dropped", record.reason)
        if self.on_drop:
            self.on_drop(record)

    def _count(self, kind: str, name: str, count: int = 1) -> None:
        """Adds to a name's count in a counter, or to that of all others if the counter is full."""
        counter: Counter[str] = getattr(self, kind)
        if name not in counter and len(counter) >= self.most_names:
            name = OTHER_FIELDS if kind == "unread" else name.split(":")[0]
        counter[name] += count

    def reasons(self) -> str:
        """Returns reasons for drops by frequency, such as `3 x empty record, 1 x no human turn`."""
        return (
            ", ".join(f"{count} x {reason}" for reason, count in self.dropped.most_common())
            or "nothing dropped"
        )

    def table(self) -> str:
        """Returns a line per rule or field: outcome, count, share, name."""
        rows = [("kept", self.kept, "")]
        rows += [("dropped", count, rule) for rule, count in self.dropped.most_common()]
        rows += [("  repaired", count, rule) for rule, count in self.repaired.most_common()]
        rows += [("  not read", count, name) for name, count in self.unread.most_common()]
        percent = 100 / max(self.records, 1)
        return "\n".join(
            f"  {outcome:10} {count:9,} {count * percent:6.2f} %  {rule}".rstrip()
            for outcome, count, rule in rows
        )

    def to_dict(self, in_order: bool = False) -> dict[str, Any]:
        """Returns the counts as JSON, as report.json stores them.

        Args:
          in_order: whether names are in the order in which `add` must count them, not sorted.
        """
        counters = {name: getattr(self, name).items() for name in _COUNTERS}
        return {
            "path": self.path,
            "records": self.records,
            "kept": self.kept,
            **{name: dict(c if in_order else sorted(c)) for name, c in counters.items()},
            "notes": list(self.notes),
            **({"path_notes": list(self.path_notes)} if self.path_notes else {}),
            **({"found": sorted(self.found)} if self.found else {}),
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "SourceReport":
        """Returns the report that `to_dict` was called on, without `source` and `on_drop`."""
        # Reports of earlier versions lack some of these.
        counters = {name: Counter(state.get(name, {})) for name in _COUNTERS}
        return cls(**{**state, **counters, "found": set(state.get("found", ()))})


@dataclass
class Report:
    """The reports of all sources, in the recipe's order."""

    sources: list[SourceReport] = field(default_factory=list)
    dropped_file: Path | None = None
    """The file of all dropped records, if it was written."""
    on_drop: OnDrop | None = field(default=None, repr=False, compare=False)
    """Called with each dropped record."""

    def add_source(self, path: str) -> SourceReport:
        """Adds an empty report for the next source and returns it."""
        self.sources.append(SourceReport(path, source=len(self.sources), on_drop=self.on_drop))
        return self.sources[-1]

    @property
    def records(self) -> int:
        """Number of records of all sources."""
        return sum(source.records for source in self.sources)

    @property
    def kept(self) -> int:
        """Number of kept records of all sources."""
        return sum(source.kept for source in self.sources)

    @property
    def dropped(self) -> Counter[str]:
        """Number of dropped records of all sources, for each reason."""
        return sum((source.dropped for source in self.sources), Counter())

    @property
    def repaired(self) -> Counter[str]:
        """Number of changed records of all sources, for each kind of change."""
        return sum((source.repaired for source in self.sources), Counter())

    @property
    def notes(self) -> list[str]:
        """The warnings of all sources."""
        return [note for source in self.sources for note in source.notes + source.path_notes]

    def summary(self) -> str:
        """Returns a few lines for the terminal: counts, the file of dropped records, warnings."""
        lines = []
        for source in self.sources:
            records = "1 record" if source.records == 1 else f"{source.records} records"
            lines.append(f"{source.path}: {records}, {source.kept} kept")
            lines += [source.table()] if source.dropped or source.repaired or source.unread else []
        if self.dropped and self.dropped_file:
            count = self.dropped.total()
            which = (
                f"the first {MOST_DROPPED:,} of {count:,} dropped records"
                if count > MOST_DROPPED
                else "dropped records"
            )
            lines.append(f"{which}, each with its file, line and reason: {self.dropped_file}")
        lines += [
            f"warning: {source.path}: {note}"
            for source in self.sources
            for note in source.notes + source.path_notes
        ]
        return "\n".join(lines)
