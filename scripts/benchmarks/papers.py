"""Prints every row of the papers beside what the cost model says, and writes them as JSON and as a picture.

    python -m scripts.benchmarks.papers [--only TEXT] [--output runs/papers]
"""
from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from scripts.benchmarks import paper_rows as paper
from scripts.benchmarks.paper_predictions import LENGTHS, Row, every_row, striped_speedup

PAPER, MODEL, BOUND = "#222222", "#4477aa", "#aaaaaa"
COLOURS = {"Ring Attention": "#4477aa", "Striped Attention": "#228833", "DistFlashAttn": "#ee6677", "Attention2D": "#ccbb44"}
WITHIN = (0.01, 0.05, 0.1, 0.2, 0.5)
HEAD = f"  {'row':54} {'paper':>10} {'predicted':>10} {'error':>9} {'same':>4} note"


def table(rows: Sequence[Row]) -> str:
    """Rows of one paper in at most 100 columns, under the names of their tables; notes by number below."""
    notes, lines, place = list(dict.fromkeys(row.note for row in rows if row.note)), [HEAD], None
    for row in rows:
        lines += [row.place] if row.place != place else []
        place = row.place
        *above, what = textwrap.wrap(row.what, 54, break_on_hyphens=False)
        lines += [f"  {part}" for part in above]
        mark = {True: "yes", False: "NO", None: ""}[row.reproduced]
        error = "" if row.error is None else f"{100 * row.error:+.1f}%"
        printed = "" if row.paper is None else f"{row.paper:.5g}"
        note = f"[{notes.index(row.note) + 1}]" if row.note else ""
        lines.append(f"  {what:54} {printed:>10} {row.predicted:10.5g} {error:>9} {mark:>4} {note}".rstrip())
    for number, note in enumerate(notes, start=1):
        lines.append(filled(f"[{number}] {note}"))
    return "\n".join(lines)


def filled(text: str) -> str:
    """A paragraph in 100 columns."""
    return textwrap.fill(text, 100, subsequent_indent="    ")


def summary(rows: Sequence[Row]) -> dict:
    """How many rows of each paper have a printed number, how many are within what error, and which claims fail."""
    found = {}
    for source in COLOURS:
        errors = [abs(row.error) for row in rows if row.source == source and row.error is not None]
        claims = [row.reproduced for row in rows if row.source == source and row.reproduced is not None]
        found[source] = {"rows": sum(row.source == source for row in rows), "with a printed number": len(errors),
                         **{f"within {100 * bound:g}%": sum(error <= bound for error in errors) for bound in WITHIN},
                         "claimed": len(claims), "claimed and reproduced": sum(claims)}
    return found


def draw(rows: Sequence[Row], path: Path) -> None:
    """Four panels: all numbers; Striped Attention's speed-ups; DistFlashAttn's times; Attention2D's speed-ups."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 10), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    every, striped, times, grid = figure.subplots(2, 2).flat

    for source, colour in COLOURS.items():
        points = [(row.paper, row.predicted) for row in rows if row.source == source and row.paper and row.paper < 1e4]
        every.plot(*zip(*points, strict=True), ".", color=colour, alpha=0.6, label=f"{source} ({len(points)})")
    ends = (0.005, 400)
    every.plot(ends, ends, color=PAPER, linewidth=0.8)
    for factor in (0.8, 1.25):
        every.plot(ends, [factor * end for end in ends], color=BOUND, linewidth=0.8, linestyle=":")
    every.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="the paper's number", ylabel="the cost model's",
              title="every printed number (dotted: 25% off)")
    every.legend(frameon=False)

    for (table, device, model, tensor, shards), points in paper.STRIPED_ATTENTION.items():
        if table in ("Table 3", "Table 4") and model == "llama-3b":
            lengths = [length for length, *_ in points]
            colour = {"A100": "#228833", "TPU v4": "#aa3377"}[device]
            cost = {"A100": 2.0, "TPU v4": 1.0}[device]
            name = f"{device} {tensor} x {shards}"
            striped.plot(lengths, [bound for _, bound, _ in points], "o", color=colour, mfc="none",
                         label=f"{name}: paper's bound")
            striped.plot(lengths, [striped_speedup(model, n, shards, cost) for n in lengths], ":", color=colour,
                         label=f"{name}: model's bound")
            striped.plot(lengths, [striped_speedup(model, n, shards, cost, paper.STRIPED_TILES[device]) for n in lengths], "-",
                         color=colour, label=f"{name}: whole tiles")
            striped.plot(lengths, [speedup for *_, speedup in points], "x", color=colour, label=f"{name}: paper, measured")
    _thousands(striped, [2**power for power in range(14, 20)])
    striped.set(xlabel="tokens", ylabel="speed-up, striped over contiguous ring",
                title="Striped Attention, LLaMA-3B, Tables 3 and 4")
    striped.legend(frameon=False, fontsize=8)

    shown = [row for row in rows if row.place == "Table 1" and row.source == "DistFlashAttn" and "llama-7b" in row.what
             and row.what.endswith(", s")]
    for place, row in enumerate(shown):
        times.barh(place - 0.2, row.paper, 0.4, color=PAPER, label="paper" if place == 0 else None)
        times.barh(place + 0.2, row.predicted, 0.4, color=MODEL, label="cost model" if place == 0 else None)
        times.text(max(row.paper, row.predicted) * 1.05, place, f"{100 * row.error:+.0f}%", va="center", fontsize=8)
    times.set(yticks=range(len(shown)), yticklabels=[row.what.removesuffix(", s").replace("llama-7b ", "") for row in shown],
              xscale="log", xlim=(3, 300), xlabel="seconds a step", title="DistFlashAttn, Table 1, LLaMA-7B on A100s")
    times.invert_yaxis()
    times.legend(frameon=False)

    for model, colour in zip(paper.ATTENTION2D_MODELS, ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677"), strict=True):
        for batch, style in ((1, ":"), (64, "-")):
            found = {row.what: row.predicted for row in rows if row.source == "Attention2D"}
            curve = [found[f"{model} O, 64 GPUs, {batch} x {length} tokens"] for length in LENGTHS]
            grid.plot(LENGTHS, curve, style, color=colour, label=f"{model}, {batch} row{'s' if batch > 1 else ''}")
    for what, speedup in paper.ATTENTION2D_SPEEDUP.items():
        grid.axhline(speedup, color=PAPER, linewidth=0.8)
        grid.text(LENGTHS[0], speedup + 0.08, what, fontsize=8, va="bottom",
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    _thousands(grid, LENGTHS)
    grid.set(xlabel="tokens a row", ylabel="speed-up over the balanced ring", ylim=(0.8, 10.2),
             title="Attention2D with overlap, 64 GPUs, Ethernet (black: its text)")
    grid.legend(frameon=False, fontsize=8, ncols=2, loc="center", bbox_to_anchor=(0.6, 0.68))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _thousands(axes, lengths) -> None:
    axes.set_xscale("log")
    axes.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
    axes.minorticks_off()


def main(argv=None) -> int:
    """Prints the table, a summary, and what is not a number; writes OUTPUT/papers.json and the picture."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.papers", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--only", default="", help="print only the rows whose paper, table or text has this in it")
    parser.add_argument("--output", type=Path, default=Path("runs/papers"), help="folder (default runs/papers)")
    parser.add_argument("--picture", type=Path, help="where to draw (default OUTPUT/papers.png)")
    args = parser.parse_args(argv)
    rows = every_row()
    print("error: the cost model's number over the paper's, less one; same: whether a number that the model\n"
          "claims to reproduce comes out; without a mark nothing is claimed, and the note says why.")
    for source in COLOURS:
        shown = [row for row in rows if row.source == source and args.only in f"{row.source} {row.place} {row.what}"]
        if shown:
            print(f"\n{source}\n{table(shown)}")
    totals = summary(rows)
    print("\nSummary")
    for source, counts in totals.items():
        print(filled(f"{source}: " + ", ".join(f"{name} {number}" for name, number in counts.items())))
    print("\nNot numbers here")
    for what, why in paper.NOT_NUMBERS.items():
        print(filled(f"{what}: {why}"))
    args.output.mkdir(parents=True, exist_ok=True)
    told = [{"source": row.source, "place": row.place, "row": row.what, "paper": row.paper, "predicted": float(row.predicted),
             "error": row.error, "reproduced": row.reproduced, "note": row.note} for row in rows]
    file = args.output / "papers.json"
    file.write_text(json.dumps({"summary": totals, "rows": told, "not_numbers": paper.NOT_NUMBERS}, indent=1) + "\n",
                    encoding="utf-8")
    picture = args.picture or args.output / "papers.png"
    draw(rows, picture)
    print(f"\n{file}\n{picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
