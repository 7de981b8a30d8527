"""Compares the papers' numbers with the cost model's; writes JSON and a picture.

python -m scripts.benchmarks.papers [--only TEXT] [--output runs/papers]
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from data import paths
from data.paths import output_files
from scripts.benchmarks import paper_rows as paper
from scripts.benchmarks.commands import add_output_folder, make_parser, write_json
from scripts.benchmarks.paper_predictions import Row, every_row
from trainer import entry

SOURCES = ("Ring Attention", "Striped Attention", "DistFlashAttn", "Attention2D")
NEAR = 1.25  # a prediction within this factor is called near
PICTURE = "papers_errors.png"
WITHIN = (0.01, 0.05, 0.1, 0.2, 0.5)
HEAD = f"  {'row':54} {'paper':>10} {'predicted':>10} {'error':>9} {'same':>4} note"


def table(rows: Sequence[Row]) -> str:
    """Returns one paper's rows in at most 100 columns, by table, with numbered notes below."""
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
                "* with constants that were set after the rows had been seen: "
                f"{'; '.join(afterwards)}"
            )
        )
    return "\n".join(lines)


def filled(text: str) -> str:
    """Returns a paragraph in 100 columns."""
    return textwrap.fill(text, 100, subsequent_indent="    ")


def summary(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Returns each paper's counts: rows with a number, within an error, claimed, reproduced."""
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
    """Prints the rows that contain `only`, a summary, and what is not a number."""
    print(
        "error: the cost model's number over the paper's, less one; same: whether a number that "
        "the model\n"
        "claims to reproduce comes out; without a mark nothing is claimed, and the note says why."
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


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws the distribution of the cost model's number over the paper's, by paper."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), facecolor="white", layout="constrained")
    ticks = (0.25, 0.5, 1 / NEAR, 1, NEAR, 2, 4)
    # 1 is in the middle of a bar, NEAR at the end of one.
    edges = [NEAR ** (step / 9) for step in range(-57, 58, 2)]
    panels = figure.subplots(len(SOURCES), 1, sharex=True)
    near = every = 0
    for axes, source in zip(panels, SOURCES, strict=True):
        ratios = [row.predicted / row.paper for row in rows if row.source == source and row.paper]
        within = sum(1 / NEAR <= ratio <= NEAR for ratio in ratios)
        near, every = near + within, every + len(ratios)
        # Beyond the ends they count in the outermost bars.
        axes.hist(
            [min(max(ratio, edges[0]), edges[-1]) for ratio in ratios], edges, color="#4477aa"
        )
        axes.axvspan(1 / NEAR, NEAR, color="#dde7f0", zorder=0)
        axes.axvline(1, color="#222222", linewidth=0.8)
        axes.set_title(
            f"{source}: {within} of {len(ratios)} within a factor of {NEAR:g}",
            fontsize=10,
            loc="left",
        )
        axes.yaxis.get_major_locator().set_params(integer=True, nbins=4)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set(
        xscale="log",
        xlim=(edges[0], edges[-1]),
        xlabel="the cost model's number over the paper's; the outermost bars have what lies beyond",
    )
    panels[-1].set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    panels[-1].minorticks_off()
    figure.supylabel("printed numbers", fontsize=10)
    figure.suptitle(
        f"{near} of {every} numbers that the papers print are predicted within a factor of {NEAR:g}"
    )
    figure.savefig(path, dpi=100, metadata=paths.PICTURE_METADATA)


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = make_parser("papers", __doc__)
    parser.add_argument(
        "--only", default="", help="print only the rows whose paper, table or text has this in it"
    )
    add_output_folder(parser, "runs/papers")
    args = parser.parse_args(argv)
    return entry.run(lambda: work(args), args.output)


def work(args: argparse.Namespace) -> None:
    """Prints the rows, and writes OUTPUT/papers.json and the picture."""
    output_files(args.output, {"papers.json": b'"not_numbers"', PICTURE: paths.PICTURE})
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
    draw(rows, args.output / PICTURE)
    print(f"\n{file}", args.output / PICTURE, sep="\n")


if __name__ == "__main__":
    sys.exit(main())
