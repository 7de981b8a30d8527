"""The table of the stored cells: printed, and as the rows of docs/results/table3.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scripts.benchmarks.commands import tokens_text
from scripts.benchmarks.page import table as markdown
from scripts.benchmarks.results import row
from scripts.benchmarks.table3.cells import (
    CELL_FIELDS,
    COLUMNS,
    LIKE_FOR_LIKE,
    MEMORIES,
    Cell,
    is_gpu,
    table_rows,
)


class Longest:
    """The longest contexts of the stored cells, in tokens, and the paper's."""

    def __init__(self, contents: list[dict[str, Any]]):
        self.stored = {
            tuple(content[name] for name in CELL_FIELDS): content for content in contents
        }

    def __call__(self, topology: str, model: str, column: str, *memories: str) -> list[int]:
        """Returns a cell's longest context with each kind of memory; 0 if unknown."""
        cells = (self.stored.get((topology, model, column, memory)) for memory in memories)
        return [cell["longest"] if cell else 0 for cell in cells]

    def rows(self, *memories: str) -> Iterator[tuple[str, str, dict[str, tuple[list[int], int]]]]:
        """Yields topology, model, and our contexts and the paper's by column."""
        for topology, model in table_rows():
            if any((topology, model, "ring", memory) in self.stored for memory in memories):
                columns = {
                    column: (
                        self(topology, model, column, *memories),
                        Cell(topology, model, column, memories[0]).paper,
                    )
                    for column in COLUMNS
                }
                yield topology, model, columns


def summarize(contents: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Returns the result's rows from the stored cells."""
    longest = Longest(contents)
    held, twice, rings = [], [], {}
    others: dict[bool, list[bool]] = {True: [], False: []}  # by whether the machine has GPUs
    for topology, model, columns in longest.rows(*MEMORIES):
        (device, ours), paper = columns.pop("ring")
        held.append(ours >= paper)
        twice.append(ours >= 2 * paper)
        others[is_gpu(topology)] += [
            max(contexts) >= printed for contexts, printed in columns.values()
        ]
        if ours:
            host = longest.stored[topology, model, "ring", "ours"]["plan"]["host_gib"]
            size = model.removeprefix("llama-")
            rings[f"{topology}_{size}".replace(":", "_")] = row(
                f"longest context, {size.upper()} on {topology}, ring, {host:.0f} GiB of host "
                f"memory per device (without: {tokens_text(device)})",
                tokens_text(ours),
                f"the paper's {tokens_text(paper)}",
                ours >= paper,
            )
    alike = [
        contexts[0] >= printed
        for _, _, columns in longest.rows(LIKE_FOR_LIKE)
        for contexts, printed in columns.values()
    ]
    other = "Table 3: cells of the other columns with at least the paper's context"
    ring = "Table 3: rows of the ring column with at least"
    rows = {
        "rows_held": _share(f"{ring} the paper's context", held),
        "rows_twice": _share(f"{ring} twice the paper's context", twice),
        "other_columns_a100": _share(f"{other}, A100", others[True]),
        "other_columns_tpu": _share(f"{other}, TPUs", others[False]),
    }
    if alike:
        rows["like_for_like"] = _share(
            "Table 3 like for like on A100 (one row, tensor parallel, float32): cells with at "
            "least the paper's context",
            alike,
        )
    return rows | rings


def _share(what: str, good: list[bool]) -> dict[str, str]:
    return row(what, f"{sum(good)} of {len(good)}", f"{len(good)}", all(good))


def show(contents: list[dict[str, Any]]) -> None:
    """Prints our contexts (the paper's in parentheses), then the like-for-like contexts."""
    for title, memories in (("contexts", MEMORIES), ("like for like", (LIKE_FOR_LIKE,))):
        lines = [
            [topology, model.removeprefix("llama-")]
            + [
                f"{' / '.join(map(tokens_text, contexts))} ({tokens_text(printed)})"
                for contexts, printed in columns.values()
            ]
            for topology, model, columns in Longest(contents).rows(*memories)
        ]
        print(f"\n{title}\n{markdown(('hardware', 'model', *COLUMNS), lines)}")
