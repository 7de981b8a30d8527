"""Accounts for every record of every source: kept, dropped and why, repaired and how."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class SourceReport:
    """One file's account; `records == kept + sum(dropped.values())` at any moment between two records."""

    path: str
    records: int = 0
    kept: int = 0
    dropped: Counter = field(default_factory=Counter)
    repaired: Counter = field(default_factory=Counter)  # kept, after a change; one record may have several
    notes: list[str] = field(default_factory=list)

    def keep(self) -> None:
        self.records += 1
        self.kept += 1

    def drop(self, reason: str) -> None:
        self.records += 1
        self.dropped[reason] += 1

    def reject(self, reason: str) -> None:
        """Moves a record that was kept to the dropped ones (a later room could not use it)."""
        self.kept -= 1
        self.dropped[reason] += 1

    def reasons(self) -> str:
        """`3 x empty record, 1 x no human turn`, most frequent first."""
        return ", ".join(f"{count} x {reason}" for reason, count in self.dropped.most_common()) or "nothing dropped"

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
    """The accounts of all sources, in the recipe's order."""

    sources: list[SourceReport] = field(default_factory=list)

    def open(self, path: str) -> SourceReport:
        self.sources.append(SourceReport(path))
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
            lines += [f"  dropped {count} x {reason}" for reason, count in source.dropped.most_common()]
            lines += [f"  repaired {count} x {change}" for change, count in source.repaired.most_common()]
            lines += [f"  note: {note}" for note in source.notes]
        return "\n".join(lines)
