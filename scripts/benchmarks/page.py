"""Writes BENCHMARKS.md, and the pages of docs/benchmarks, from the result files in docs/results.

python -m scripts.benchmarks.page            # write the pages
python -m scripts.benchmarks.page --check    # exit with 1 if a page differs from the results
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scripts.benchmarks.results import ROOT, Result, changed, load_all
from trainer.options import command, option

PAGE = ROOT / "BENCHMARKS.md"
WIDTH = 80  # of a command on a page
# Begins the line that says which headlines' programs have changed.
AGE = "Programs unchanged since the measurement, when this page was written: "
# Where results and rows are placed, and the text around them.
PAGES: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("pages.toml").read_text(encoding="utf-8")
)


def cell(text: str) -> str:
    """Returns a text as a table cell."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table in Markdown."""
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines) + "\n"


def links(text: str, results: Mapping[str, Result], folder: str = "") -> str:
    """Returns the link definitions of a text: `[NAME]` for results, `[NAME note]` for notes.

    Args:
      folder: the page's folder, relative to the repository's root.
    """
    notes = sorted({result.note for result in results.values()} - {""})
    targets = {name: f"docs/results/{name}.json" for name in results} | {
        f"{Path(note).stem} note": note for note in notes
    }
    return "".join(
        f"[{name}]: {posixpath.relpath(target, folder or '.')}\n"
        for name, target in targets.items()
        if f"[{name}]" in text
    )


def note(result: Result) -> str:
    """Returns the link to the page that says what was tried and why; empty if there is none."""
    return f"[{Path(result.note).stem} note]" if result.note else ""


def verdict(row: Mapping[str, str]) -> str:
    """Returns a row's verdict as shown on the page."""
    return {"held": "met", "short": "**missed**", "no goal": ""}.get(row["verdict"], row["verdict"])


def step_times(results: Mapping[str, Result]) -> str:
    """Returns the table of our ranges for an 8B model and others' measurements."""
    rows = [
        (row["what"], row["found"], row["goal"])
        for row_id, row in results["measured_steps"].rows.items()
        if row_id.startswith("ours_")
    ]
    times = table(("machine, tokens", "our range", "measured by others"), rows)
    held_out = table(
        ("steps of", "inside the range; slowest, relative to the range's upper end"),
        [
            (row["what"].partition(": measured steps")[0], row["found"])
            for row_id, row in results["measured_steps"].rows.items()
            if row_id.startswith("held_out_")
        ],
    )
    return (
        f"## Seconds per step, LLaMA-3.1-8B, one row\n\n{times}\n"
        "Our ranges are estimates. The lower end assumes matrix products at full rate, but no\n"
        "more than the best MFU that anyone has measured on such a machine. The upper end is our\n"
        "estimate at full rate, times the worst ratio of a measured step to that estimate\n"
        "([measured_steps]). TRL's model is Qwen3-8B. To show how far a range can be trusted, the\n"
        "next table compares each system's measured steps with ranges set by the other systems'\n"
        "steps.\n\n"
        f"{held_out}"
    )


def headlines(results: Mapping[str, Result]) -> str:
    """Returns the table of headlines with machine, date and commit."""
    rows = []
    for question, reference in PAGES["headlines"]:
        name, row_id = reference.split(".")
        result = results[name]
        row = result.rows[row_id]
        when = f"{row.get('date', result.date)}, {row.get('commit', result.commit)}"
        rows.append(
            (question, row["found"], row["goal"], verdict(row), machine(result), when, f"[{name}]")
        )
    columns = ("figure", "measured", "goal", "verdict", "machine", "date, commit", "source")
    return table(columns, rows)


def age(results: Mapping[str, Result]) -> str:
    """Returns the line that says which headlines' programs have not changed since their commit."""
    names = dict.fromkeys(reference.split(".")[0] for _, reference in PAGES["headlines"])
    fresh = [f"[{name}]" for name in names if not changed(results[name])]
    return (
        f"{AGE}{', '.join(fresh) or 'none'}. What has changed of the others: "
        "`python -m scripts.benchmarks --stale`.\n"
    )


def machine(result: Result) -> str:
    """Returns the machine that measured a result, in a few words."""
    gpus = result.hardware.get("gpus")
    if isinstance(gpus, list) and gpus:
        return f"{len(gpus)} x {str(gpus[0]).removeprefix('NVIDIA ')}"
    return " ".join(str(result.hardware.get("processor") or "not recorded").split()[:4])


def section(heading: str, names: Iterable[str], results: Mapping[str, Result]) -> str:
    """Returns a heading, the table of its results' rows that have a goal, and links to notes."""
    names = list(names)
    rows = [
        (row["what"], row["goal"], row["found"], verdict(row), f"[{name}]")
        for name in names
        for row_id, row in results[name].rows.items()
        if row["goal"] and row_id in PAGES["selected"].get(name, results[name].rows)
        if not row_id.startswith("ours_")
    ]
    notes = list(dict.fromkeys(note(results[name]) for name in names if results[name].note))
    more = f"\nAttempts and reasons: {', '.join(notes)}.\n" if notes else ""
    return f"## {heading}\n\n{table(('what', 'goal', 'measured', 'verdict', 'source'), rows)}{more}"


def with_verdict(
    verdict: str, results: Mapping[str, Result]
) -> list[tuple[str, str, Mapping[str, str]]]:
    """Returns (result name, row id, row) for all rows with this verdict."""
    return [
        (name, row_id, row)
        for name, result in results.items()
        for row_id, row in result.rows.items()
        if row["verdict"] == verdict
    ]


def goals_missed(results: Mapping[str, Result]) -> str:
    """Returns the section of rows that missed their goal and are not headlines, by theme."""
    shown = {reference for _, reference in PAGES["headlines"]}
    missed = [entry for entry in with_verdict("short", results) if ".".join(entry[:2]) not in shown]
    parts = []
    for about in PAGES["themes"].values():
        names = [name for names in about["sections"].values() for name in names]
        rows = [
            (
                row["what"],
                row["goal"],
                row["found"],
                machine(results[name]),
                ", ".join(filter(None, (f"[{name}]", note(results[name])))),
            )
            for name, _, row in missed
            if name in names
        ]
        if rows:
            columns = ("what", "goal", "measured", "machine", "source")
            parts.append(f"### {about['title']}\n\n{table(columns, rows)}")
    return "\n".join(
        [
            "## Other goals missed\n",
            *parts,
            "Known limits without figures: [docs/notes/limits.md](docs/notes/limits.md)\n",
        ]
    )


def not_measured(results: Mapping[str, Result]) -> str:
    """Returns the section of unmeasured rows, with what each would need."""
    rows = [
        (row["what"], row["found"], f"[{name}]")
        for name, _, row in with_verdict("not measured", results)
    ]
    return "## Not measured\n\n" + table(("what", "needs", "source"), rows)


def command_text(command: str) -> str:
    """Returns a command as code, cut after WIDTH characters; the result file has all of it."""
    if not command.startswith(("python", "make", "pytest")):
        return "by hand"
    return f"`{command if len(command) <= WIDTH else command[: WIDTH - 4] + ' ...'}`"


def provenance(results: Mapping[str, Result]) -> str:
    """Returns the section of dates, commits, machines and commands of a page's results."""
    rows = []
    for name, result in results.items():
        dates = sorted(
            {result.date, *(row["date"] for row in result.rows.values() if "date" in row)}
        )
        commits = {
            result.commit,
            *(row["commit"] for row in result.rows.values() if "commit" in row),
        }
        rows.append(
            (
                f"[{name}]",
                " to ".join(dict.fromkeys((dates[0], dates[-1]))),
                result.commit if len(commits) == 1 else f"{len(commits)} commits",
                machine(result),
                command_text(result.command),
            )
        )
    return "## Date, commit and command\n\n" + table(
        ("result", "date", "commit", "machine", "command"), rows
    )


def theme(name: str, results: Mapping[str, Result]) -> str:
    """Returns a page of docs/benchmarks; KeyError if pages.toml names a missing result."""
    about = PAGES["themes"][name]
    sections = about["sections"]
    own = {result: results[result] for names in sections.values() for result in names}
    parts = [PAGES["theme"].format(title=about["title"]), *filter(None, [about.get("terms")])]
    parts += [section(heading, names, results) for heading, names in sections.items()]
    text = "\n".join([*parts, provenance(own)])
    return f"{text}\n{links(text, own, 'docs/benchmarks')}"


def headline_page(results: Mapping[str, Result], with_age: bool) -> str:
    """Returns BENCHMARKS.md; KeyError if pages.toml names a missing row."""
    themes = "".join(
        f"- [{about['title']}](docs/benchmarks/{name}.md): {'; '.join(about['sections'])}\n"
        for name, about in PAGES["themes"].items()
    )
    parts = [
        PAGES["introduction"],
        "## Headlines\n\n" + headlines(results),
        *([age(results)] if with_age else []),
        step_times(results),
        goals_missed(results),
        not_measured(results),
        "## By theme\n\n" + themes,
    ]
    text = "\n".join(parts)
    return f"{text}\n{links(text, results)}"


def render(results: Mapping[str, Result], with_age: bool = True) -> dict[Path, str]:
    """Returns all pages' texts by path; the line of `age` takes seconds."""
    pages = {
        PAGE.parent / "docs" / "benchmarks" / f"{name}.md": theme(name, results)
        for name in PAGES["themes"]
    }
    return {PAGE: headline_page(results, with_age), **pages}


def write() -> None:
    """Writes the pages from the committed results."""
    for path, text in render(load_all()).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    check: bool = option("write nothing; exit with 1 if a page is out of date")


def work(args: Options) -> int:
    """Returns the exit code."""
    if not args.check:
        write()
        return 0
    # The line of `age` is left as last written, so that a changed program needs no new page.
    for path, text in render(load_all(), with_age=False).items():
        written = path.read_text(encoding="utf-8") if path.exists() else ""
        if re.sub(f"^{AGE}.*\n\n", "", written, flags=re.MULTILINE) != text:
            print(
                f"{path.name} is out of date with docs/results: run python -m "
                "scripts.benchmarks.page",
                file=sys.stderr,
            )
            return 1
    return 0


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
