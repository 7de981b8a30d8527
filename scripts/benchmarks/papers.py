"""Prints every row of the papers beside the cost model's prediction, and writes the rows as JSON and as a picture.

    python -m scripts.benchmarks.papers [--only TEXT] [--output runs/papers]
"""
from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from scripts.benchmarks import paper_rows as paper
from scripts.benchmarks.commands import add_output_folder, make_parser, write_json
from scripts.benchmarks.paper_predictions import LENGTHS, STRIPED_ATTENTION_COST, Row, every_row, striped_speedup

PAPER, MODEL, BOUND = "#222222", "#4477aa", "#aaaaaa"
COLOURS = {"Ring Attention": "#4477aa", "Striped Attention": "#228833", "DistFlashAttn": "#ee6677", "Attention2D": "#ccbb44"}
WITHIN = (0.01, 0.05, 0.1, 0.2, 0.5)
HEAD = f"  {'row':54} {'paper':>10} {'predicted':>10} {'error':>9} {'same':>4} note"


def table(rows: Sequence[Row]) -> str:
    """Returns one paper's rows in at most 100 columns, under the names of their tables, with numbered notes below."""
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
        note = (f"[{notes.index(row.note) + 1}]" if row.note else "") + (" *" if row.afterwards else "")
        lines.append(f"  {label:54} {printed:>10} {row.predicted:10.5g} {error:>9} {mark:>4} {note}".rstrip())
    lines += [filled(f"[{number}] {note}") for number, note in enumerate(notes, start=1)]
    if afterwards := list(dict.fromkeys(row.afterwards for row in rows if row.afterwards)):
        lines.append(filled(f"* with constants that were set after the rows had been seen: {'; '.join(afterwards)}"))
    return "\n".join(lines)


def filled(text: str) -> str:
    """Returns a paragraph in 100 columns."""
    return textwrap.fill(text, 100, subsequent_indent="    ")


def summary(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Returns for each paper how many rows have a printed number, are within which error, are claimed, and are reproduced."""
    counts = {}
    for source in COLOURS:
        errors = [abs(row.error) for row in rows if row.source == source and row.error is not None]
        claims = [row.reproduced for row in rows if row.source == source and row.reproduced is not None]
        counts[source] = {"rows": sum(row.source == source for row in rows), "with a printed number": len(errors),
                          **{f"within {100 * bound:g}%": sum(error <= bound for error in errors) for bound in WITHIN},
                          "claimed": len(claims), "claimed and reproduced": sum(claims)}
    return counts


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws four panels: all numbers; Striped Attention's speed-ups; DistFlashAttn's times; Attention2D's speed-ups."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 10), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    for panel, axes in zip((_draw_all, _draw_striped, _draw_times, _draw_grid), figure.subplots(2, 2).flat, strict=True):
        panel(axes, rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _draw_all(axes, rows: Sequence[Row]) -> None:
    for source, colour in COLOURS.items():
        points = [(row.paper, row.predicted) for row in rows if row.source == source and row.paper and row.paper < 1e4]
        axes.plot(*zip(*points, strict=True), ".", color=colour, alpha=0.6, label=f"{source} ({len(points)})")
    limits = (0.005, 400)
    axes.plot(limits, limits, color=PAPER, linewidth=0.8)
    for factor in (0.8, 1.25):
        axes.plot(limits, [factor * limit for limit in limits], color=BOUND, linewidth=0.8, linestyle=":")
    axes.set(xscale="log", yscale="log", xlim=limits, ylim=limits, xlabel="the paper's number", ylabel="the cost model's",
             title="every printed number (dotted: 25% off)")
    axes.legend(frameon=False)


def _draw_striped(axes, rows: Sequence[Row]) -> None:
    del rows  # the curves are computed from the paper's table
    for (name, device, model, tensor, shards), points in paper.STRIPED_ATTENTION.items():
        if name not in ("Table 3", "Table 4") or model != "llama-3b":
            continue
        lengths, label = [length for length, *_ in points], f"{device} {tensor} x {shards}"
        style = {"color": {"A100": "#228833", "TPU v4": "#aa3377"}[device]}
        cost, tile = STRIPED_ATTENTION_COST[device], paper.STRIPED_TILES[device]
        axes.plot(lengths, [bound for _, bound, _ in points], "o", mfc="none", label=f"{label}: paper's bound", **style)
        axes.plot(lengths, [striped_speedup(model, length, shards, cost) for length in lengths], ":",
                  label=f"{label}: model's bound", **style)
        axes.plot(lengths, [striped_speedup(model, length, shards, cost, tile) for length in lengths], "-",
                  label=f"{label}: whole tiles", **style)
        axes.plot(lengths, [speedup for *_, speedup in points], "x", label=f"{label}: paper, measured", **style)
    _label_lengths(axes, [2**power for power in range(14, 20)])
    axes.set(xlabel="tokens", ylabel="speed-up, striped over contiguous ring",
             title="Striped Attention, LLaMA-3B, Tables 3 and 4")
    axes.legend(frameon=False, fontsize=8)


def _draw_times(axes, rows: Sequence[Row]) -> None:
    times = [row for row in rows if row.table == "Table 1" and row.source == "DistFlashAttn" and "llama-7b" in row.label
             and row.label.endswith(", s")]
    for height, row in enumerate(times):
        axes.barh(height - 0.2, row.paper, 0.4, color=PAPER, label="paper" if height == 0 else None)
        axes.barh(height + 0.2, row.predicted, 0.4, color=MODEL, label="cost model" if height == 0 else None)
        axes.text(max(row.paper, row.predicted) * 1.05, height, f"{100 * row.error:+.0f}%", va="center", fontsize=8)
    axes.set(yticks=range(len(times)), yticklabels=[row.label.removesuffix(", s").replace("llama-7b ", "") for row in times],
             xscale="log", xlim=(3, 300), xlabel="seconds a step", title="DistFlashAttn, Table 1, LLaMA-7B on A100s")
    axes.invert_yaxis()
    axes.legend(frameon=False)


def _draw_grid(axes, rows: Sequence[Row]) -> None:
    speedups = {row.label: row.predicted for row in rows if row.source == "Attention2D"}
    for model, colour in zip(paper.ATTENTION2D_MODELS, ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677"), strict=True):
        for batch, style in ((1, ":"), (64, "-")):
            curve = [speedups[f"{model} O, 64 GPUs, {batch} x {length} tokens"] for length in LENGTHS]
            axes.plot(LENGTHS, curve, style, color=colour, label=f"{model}, {batch} row{'s' if batch > 1 else ''}")
    for claim, speedup in paper.ATTENTION2D_SPEEDUP.items():
        axes.axhline(speedup, color=PAPER, linewidth=0.8)
        axes.text(LENGTHS[0], speedup + 0.08, claim, fontsize=8, va="bottom",
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    _label_lengths(axes, LENGTHS)
    axes.set(xlabel="tokens a row", ylabel="speed-up over the balanced ring", ylim=(0.8, 10.2),
             title="Attention2D with overlap, 64 GPUs, Ethernet (black: its text)")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="center", bbox_to_anchor=(0.6, 0.68))


def _label_lengths(axes, lengths: Sequence[int]) -> None:
    """Makes the x axis logarithmic, with ticks in thousands of tokens."""
    axes.set_xscale("log")
    axes.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
    axes.minorticks_off()


def show(rows: Sequence[Row], only: str) -> None:
    """Prints the tables of rows whose paper, table or label contains `only`, a summary, and what is not a number."""
    print("error: the cost model's number over the paper's, less one; same: whether a number that the model\n"
          "claims to reproduce comes out; without a mark nothing is claimed, and the note says why.")
    for source in COLOURS:
        matches = [row for row in rows if row.source == source and only in f"{row.source} {row.table} {row.label}"]
        if matches:
            print(f"\n{source}\n{table(matches)}")
    print("\nSummary")
    for source, counts in summary(rows).items():
        print(filled(f"{source}: " + ", ".join(f"{name} {number}" for name, number in counts.items())))
    print("\nNot numbers here")
    for name, reason in paper.NOT_NUMBERS.items():
        print(filled(f"{name}: {reason}"))


def main(argv: list[str] | None = None) -> int:
    """Prints the rows, and writes OUTPUT/papers.json and the picture."""
    parser = make_parser("papers", __doc__)
    parser.add_argument("--only", default="", help="print only the rows whose paper, table or text has this in it")
    add_output_folder(parser, "runs/papers")
    parser.add_argument("--picture", type=Path, help="where to draw (default OUTPUT/papers.png)")
    args = parser.parse_args(argv)
    rows = every_row()
    show(rows, args.only)
    args.output.mkdir(parents=True, exist_ok=True)
    records = [{"source": row.source, "place": row.table, "row": row.label, "paper": row.paper,
                "predicted": float(row.predicted), "error": row.error, "reproduced": row.reproduced, "note": row.note,
                "set_afterwards": row.afterwards}
               for row in rows]
    file, picture = args.output / "papers.json", args.picture or args.output / "papers.png"
    write_json(file, {"summary": summary(rows), "rows": records, "not_numbers": paper.NOT_NUMBERS})
    draw(rows, picture)
    print(f"\n{file}\n{picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
