"""Accounts for every record of every source: kept, dropped and why, repaired and how."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class SourceReport:
    """One source's account; `records == kept + sum(dropped.values())` at any moment between two records.

    sink(entry) is given every dropped record: a dict of record (its place, from 1), reason and content.
    """

    path: str
    records: int = 0
    kept: int = 0
    dropped: Counter = field(default_factory=Counter)
    repaired: Counter = field(default_factory=Counter)  # kept, after a change; one record may have several
    notes: list[str] = field(default_factory=list)
    sink: Callable[[dict], None] | None = field(default=None, repr=False, compare=False)

    def keep(self) -> None:
        self.records += 1
        self.kept += 1

    def drop(self, reason: str, content: object = None) -> None:
        self.records += 1
        self._drop(self.records, reason, content)

    def reject(self, reason: str, record: int, content: object = None) -> None:
        """Moves a record that was kept to the dropped ones (a later room could not use it)."""
        self.kept -= 1
        self._drop(record, reason, content)

    def _drop(self, record: int, reason: str, content: object) -> None:
        self.dropped[reason] += 1
        if self.sink:
            self.sink({"record": record, "reason": reason, "content": content})

    def reasons(self) -> str:
        """`3 x empty record, 1 x no human turn`, most frequent first."""
        return ", ".join(f"{count} x {reason}" for reason, count in self.dropped.most_common()) or "nothing dropped"

    def table(self) -> str:
        """What each rule did, a line for each: dropped or repaired, records, their share, the rule."""
        rows = [("kept", self.kept, "")]
        rows += [("dropped", count, rule) for rule, count in self.dropped.most_common()]
        rows += [("  repaired", count, rule) for rule, count in self.repaired.most_common()]
        share = 100 / max(self.records, 1)
        return "\n".join(f"  {what:10} {count:9,} {count * share:6.2f} %  {rule}".rstrip() for what, count, rule in rows)

    def to_dict(self) -> dict:
        return {
            "path": self.path,
            "records": self.records,
            "kept": self.kept,
            "dropped": dict(self.dropped),
            "repaired": dict(self.repaired),
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, state: dict) -> "SourceReport":
        return cls(**{**state, "dropped": Counter(state["dropped"]), "repaired": Counter(state["repaired"])})


@dataclass
class Report:
    """The accounts of all sources, in the recipe's order; dropped_file: where the dropped records are, if anywhere."""

    sources: list[SourceReport] = field(default_factory=list)
    dropped_file: Path | None = None
    sink: Callable[[dict], None] | None = field(default=None, repr=False, compare=False)

    def open(self, path: str) -> SourceReport:
        number, sink = len(self.sources), self.sink
        self.sources.append(SourceReport(path, sink=sink and (lambda entry: sink({"source": number, **entry}))))
        return self.sources[-1]

    @property
    def records(self) -> int:
        return sum(source.records for source in self.sources)

    @property
    def kept(self) -> int:
        return sum(source.kept for source in self.sources)

    @property
    def dropped(self) -> Counter:
        return sum((source.dropped for source in self.sources), Counter())

    @property
    def repaired(self) -> Counter:
        return sum((source.repaired for source in self.sources), Counter())

    @property
    def notes(self) -> list[str]:
        return [note for source in self.sources for note in source.notes]

    def summary(self) -> str:
        """A few lines for the terminal."""
        lines = []
        for source in self.sources:
            lines.append(f"{source.path}: {source.records} records, {source.kept} kept")
            lines += [source.table()] if source.dropped or source.repaired else []
        if self.dropped and self.dropped_file:
            lines.append(f"dropped records, each with its reason: {self.dropped_file}")
        lines += [f"warning: {source.path}: {note}" for source in self.sources for note in source.notes]
        return "\n".join(lines)
