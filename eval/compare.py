"""Compares two checkpoints on cases that both answered: the score difference and its 95% interval.

    python -m eval.compare BEFORE AFTER [--output difference.json]

BEFORE and AFTER are folders written by the same evaluation (eval.line_retrieval, eval.needle,
eval.ruler, eval.coreference) for two checkpoints. Since both answered the same cases, the interval
is that of paired differences: narrower than the two scores' intervals suggest.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data import printable
from data.errors import UserError
from data.outputs import output_file, write_text
from data.untrusted_files import parse_json, read_text
from eval.scoring import paired_interval
from trainer import entry
from trainer.options import command, option

# Fields of a line of cases.jsonl that depend on the model; the others identify the case.
OF_THE_MODEL = ("answer", "right", "generated", "score", "prompt_tokens", "beyond_trained_length")
WOULD_WORK = (
    "a folder written by eval.line_retrieval, eval.needle, eval.ruler or eval.coreference would "
    "work"
)

Case = tuple[str, int]
"""A case's identity: its fields as JSON, and the number of equal cases before it."""


@dataclasses.dataclass(frozen=True)
class Group:
    """The cases of one task and length; scores of different groups are never averaged."""

    task: str
    size: int
    unit: str


@dataclasses.dataclass(frozen=True)
class Difference:
    """How two checkpoints differ on the same cases.

    Attributes:
      cases: number of cases both answered.
      before, after: mean scores on these cases.
      difference: after minus before; low, high: bounds of its 95% interval.
      better, worse: number of cases whose score rises, or falls.
    """

    task: str
    size: int
    unit: str
    cases: int
    before: float
    after: float
    difference: float
    low: float
    high: float
    better: int
    worse: int


def scores_of(rows: Sequence[Mapping[str, Any]]) -> dict[Group, dict[Case, float]]:
    """Returns the score of each case, by task and length.

    Args:
      rows: the lines of a cases.jsonl.

    Raises:
      KeyError, TypeError: a line is not an evaluation's.
      ValueError: a value is of the wrong kind.
    """
    scores: dict[Group, dict[Case, float]] = {}
    repeats: collections.Counter[str] = collections.Counter()
    for row in rows:
        if "num_lines" in row:
            group, score = Group(row["source"], row["num_lines"], "lines"), row["right"]
        else:
            group, score = Group(row["task"], row["tokens"], "tokens"), row["score"]
        if not (isinstance(group.task, str) and isinstance(group.size, int)):
            raise ValueError(f"found {group.task!r}, {group.size!r}, not a task and its length")
        if not (isinstance(score, int | float) and 0 <= score <= 1):
            raise ValueError(f"found the score {score!r}, not 0 to 1")
        identity = json.dumps(
            {name: value for name, value in row.items() if name not in OF_THE_MODEL}, sort_keys=True
        )
        scores.setdefault(group, {})[identity, repeats[identity]] = float(score)
        repeats[identity] += 1
    return scores


def differences(
    before: Mapping[Group, Mapping[Case, float]], after: Mapping[Group, Mapping[Case, float]]
) -> list[Difference]:
    """Returns the differences by task and length, over the cases both answered."""
    rows = []
    for group, cases in before.items():
        common = [case for case in cases if case in after.get(group, {})]
        if common:
            first, second = (
                np.array([scores[group][case] for case in common]) for scores in (before, after)
            )
            low, high = paired_interval(first, second)
            rows.append(
                Difference(
                    group.task,
                    group.size,
                    group.unit,
                    len(common),
                    float(first.mean()),
                    float(second.mean()),
                    float((second - first).mean()),
                    low,
                    high,
                    int((second > first).sum()),
                    int((second < first).sum()),
                )
            )
    return sorted(rows, key=lambda row: (row.unit, row.task, row.size))


def read(folder: Path) -> dict[Group, dict[Case, float]]:
    """Returns the scores of an evaluation's folder.

    Raises:
      UserError: it has no evaluation's cases.
    """
    path = folder / "cases.jsonl"
    try:
        scores = scores_of([parse_json(line) for line in read_text(path, folder).splitlines()])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: not an evaluation's cases ({type(error).__name__}: {error}); {WOULD_WORK}"
        ) from None
    if not scores:
        raise UserError(f"{path}: is empty; {WOULD_WORK}")
    return scores


def print_table(rows: Sequence[Difference]) -> None:
    """Prints a table per task, with a line per length."""
    # Wide, so that a narrow terminal wraps lines, where rich would cut numbers.
    console = printable.console(soft_wrap=True, highlight=False, width=1000)
    for task in dict.fromkeys(row.task for row in rows):
        console.print(task, markup=False)
        table = printable.plain_table()
        for name in (
            "length",
            "cases",
            "before",
            "after",
            "difference",
            "95% interval",
            "better",
            "worse",
        ):
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            if row.task == task:
                table.add_row(
                    f"{row.size:,} {row.unit}",
                    str(row.cases),
                    f"{row.before:.3f}",
                    f"{row.after:.3f}",
                    f"{row.difference:+.3f}",
                    f"{row.low:+.3f} to {row.high:+.3f}",
                    str(row.better),
                    str(row.worse),
                )
        console.print(table)


def compare(args: Options) -> None:
    """Prints the table, and writes it as JSON to --output."""
    output = output_file(args.output, b'"differences"') if args.output else None
    before, after = read(args.before), read(args.after)
    rows = differences(before, after)
    if not rows:
        raise UserError(
            f"{args.before} and {args.after} have no case in common; two folders written by the "
            "same command for two checkpoints would work"
        )
    print(f"before: {args.before}\nafter: {args.after}")
    print_table(rows)
    for folder, scores in ((args.before, before), (args.after, after)):
        alone = sum(map(len, scores.values())) - sum(row.cases for row in rows)
        if alone:
            print(f"left out: {alone} cases only in {folder}")
    print("Interval of the paired difference: Bonett and Price (2012).")
    if output:
        content = {
            "before": str(args.before),
            "after": str(args.after),
            "differences": list(map(dataclasses.asdict, rows)),
        }
        write_text(output, json.dumps(content, indent=2) + "\n")
        print(f"wrote {output}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    before: Path = option(
        "folder written by an evaluation of the first checkpoint", positional=True, metavar="BEFORE"
    )
    after: Path = option(
        "folder written by the same evaluation of the second one", positional=True, metavar="AFTER"
    )
    output: Path | None = option("also write the table to this file, as JSON", None, metavar="FILE")


main = command(Options, compare)


if __name__ == "__main__":
    entry.leave(main())
