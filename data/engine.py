"""Engines that prepare data: this machine's processes, or the workers of Apache Beam.

An engine applies steps to items. Steps do not depend on the engine: reading, cleaning, tokenizing
and writing are in `data.job` and `data.parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

GROUP: Literal["group"] = "group"
"""A step from pairs (key, value) to pairs (key, values). Keys consist of texts, bytes and
numbers."""
Step = Callable[[Any], Iterable[Any]] | Literal["group"]
"""A function from an item to items, or GROUP. Functions can be pickled, may run twice, and must be
repeatable."""


class Engine(Protocol):
    """Runs steps on items."""

    in_parts: bool
    """Whether each file becomes a part, and parts become shards; otherwise one process writes
    documents as it reads the sources."""

    def run(self, items: Sequence[Any], *steps: Step) -> None:
        """Passes every item through the steps; the last step writes the results.

        Raises:
          UserError: a step fails.
        """


@dataclass(frozen=True)
class Processes:
    """This process, and others that it starts to encode the records of large sources."""

    in_parts = False

    def run(self, items: Sequence[Any], *steps: Step) -> None:
        values: Iterable[Any] = items
        for step in steps:
            values = _grouped(values) if step == GROUP else _flat_map(step, values)
        for _ in values:
            pass


PROCESSES = Processes()


def _flat_map(function: Callable[[Any], Iterable[Any]], values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from function(value)


def _grouped(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, list[Any]]]:
    groups: dict[Any, list[Any]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    yield from groups.items()
