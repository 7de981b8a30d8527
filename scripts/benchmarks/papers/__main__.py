"""Compares the papers' numbers with the cost model's, and writes JSON.

python -m scripts.benchmarks.papers [--only TEXT] [--output runs/papers]
"""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from data.outputs import output_files
from scripts.benchmarks.commands import write_json
from scripts.benchmarks.papers import published as paper
from scripts.benchmarks.papers.predictions import Row, every_row
from trainer.options import command, option

SOURCES = ("Ring Attention", "Striped Attention", "DistFlashAttn", "Attention2D")
WITHIN = (0.01, 0.05, 0.1, 0.2, 0.5)
HEAD = f"  {'row':54} {'paper':>10} {'predicted':>10} {'error':>9} {'same':>4} note"


def table(rows: Sequence[Row]) -> str:
    """Returns one paper's rows, by table, in at most 100 columns, with numbered notes below."""
    notes = list(dict.fromkeys(row.note for row in rows if row.note))
    lines, current = [HEAD], None
    for row in rows:
        if row.table != current:
            lines.append(row.table)
            current = row.table
        *above, label = textwrap.wrap(row.label, 54, break_on_hyphens=False)
        lines += [f"  {part}" for part in above]
        mark = {True: "yes", False: "NO", None: ""}[row.reproduced]
        error = "" if row.error is None else f"{100 * row.error:+.1f}%"
        printed = "" if row.paper is None else f"{row.paper:.5g}"
        note = (f"[{notes.index(row.note) + 1}]" if row.note else "") + (
            " *" if row.afterwards else ""
        )
        lines.append(
            f"  {label:54} {printed:>10} {row.predicted:10.5g} {error:>9} {mark:>4} {note}".rstrip()
        )
    lines += [filled(f"[{number}] {note}") for number, note in enumerate(notes, start=1)]
    if afterwards := list(dict.fromkeys(row.afterwards for row in rows if row.afterwards)):
        lines.append(
            filled(
                "* with constants that were set after these rows had been seen: "
                f"{'; '.join(afterwards)}"
            )
        )
    return "\n".join(lines)


def filled(text: str) -> str:
    """Returns a paragraph wrapped at 100 columns."""
    return textwrap.fill(text, 100, subsequent_indent="    ")


def summary(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Returns each paper's row counts: with a number, within each error, claimed, reproduced."""
    counts = {}
    for source in SOURCES:
        errors = [abs(row.error) for row in rows if row.source == source and row.error is not None]
        claims = [
            row.reproduced for row in rows if row.source == source and row.reproduced is not None
        ]
        counts[source] = {
            "rows": sum(row.source == source for row in rows),
            "with a printed number": len(errors),
            **{
                f"within {100 * bound:g}%": sum(error <= bound for error in errors)
                for bound in WITHIN
            },
            "claimed": len(claims),
            "claimed and reproduced": sum(claims),
        }
    return counts


def show(rows: Sequence[Row], only: str) -> None:
    """Prints the rows that contain `only`, a summary, and the predictions that are not numbers."""
    print(
        "error: the cost model's number over the paper's, minus one; same: whether a number that "
        "the\n"
        "model claims to reproduce is reproduced; without a mark nothing is claimed (see the note)."
    )
    for source in SOURCES:
        matches = [
            row
            for row in rows
            if row.source == source and only in f"{row.source} {row.table} {row.label}"
        ]
        if matches:
            print(f"\n{source}\n{table(matches)}")
    print("\nSummary")
    for source, counts in summary(rows).items():
        print(
            filled(f"{source}: " + ", ".join(f"{name} {number}" for name, number in counts.items()))
        )
    print("\nNot numbers here")
    for name, reason in paper.NOT_NUMBERS.items():
        print(filled(f"{name}: {reason}"))


def work(args: Options) -> None:
    """Prints the rows, and writes OUTPUT/papers.json."""
    output_files(args.output, {"papers.json": b'"not_numbers"'})
    rows = every_row()
    show(rows, args.only)
    records = [
        {
            "source": row.source,
            "place": row.table,
            "row": row.label,
            "paper": row.paper,
            "predicted": float(row.predicted),
            "error": row.error,
            "reproduced": row.reproduced,
            "note": row.note,
            "set_afterwards": row.afterwards,
        }
        for row in rows
    ]
    file = args.output / "papers.json"
    write_json(file, {"summary": summary(rows), "rows": records, "not_numbers": paper.NOT_NUMBERS})
    print(f"\n{file}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    only: str = option("print only the rows whose paper, table or text contains this", "")
    output: Path = option("folder for results", Path("runs/papers"))


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
