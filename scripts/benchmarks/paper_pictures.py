"""Pictures of the papers' numbers beside the cost model's, each with one message."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scripts.benchmarks import paper_rows as paper
from scripts.benchmarks.paper_predictions import Row
from scripts.benchmarks.paper_predictions.attention2d import LENGTHS
from scripts.benchmarks.paper_predictions.striped_attention import (
    STRIPED_ATTENTION_COST,
    striped_speedup,
)

PAPER, MODEL = "#222222", "#4477aa"
SOURCES = ("Ring Attention", "Striped Attention", "DistFlashAttn", "Attention2D")
NEAR = 1.25  # a prediction within this factor is called near
STRIPED_MACHINES = {
    "A100": "A100, {tensor} x {shards} GPUs",
    "TPU v4": "TPU v4, {tensor} x {shards} chips",
}


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draws every picture into a folder; returns the files."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, (size, picture) in PICTURES.items():
        figure = Figure(figsize=size, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        picture(figure, rows)
        files.append(folder / name)
        figure.savefig(files[-1], dpi=100)
    return files


def _draw_errors(figure, rows: Sequence[Row]) -> None:
    """How many printed numbers of each paper have which ratio of the cost model's number to the paper's."""
    ticks = (0.25, 0.5, 1 / NEAR, 1, NEAR, 2, 4)
    edges = [
        NEAR ** (step / 9) for step in range(-57, 58, 2)
    ]  # 1 is in the middle of a bar, NEAR at the end of one
    panels = figure.subplots(len(SOURCES), 1, sharex=True)
    near = every = 0
    for axes, source in zip(panels, SOURCES, strict=True):
        ratios = [row.predicted / row.paper for row in rows if row.source == source and row.paper]
        within = sum(1 / NEAR <= ratio <= NEAR for ratio in ratios)
        near, every = near + within, every + len(ratios)
        # Beyond the ends they count in the outermost bars.
        axes.hist([min(max(ratio, edges[0]), edges[-1]) for ratio in ratios], edges, color=MODEL)
        axes.axvspan(1 / NEAR, NEAR, color="#dde7f0", zorder=0)
        axes.axvline(1, color=PAPER, linewidth=0.8)
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


def _draw_striped(figure, rows: Sequence[Row]) -> None:
    """Striped Attention's Tables 3 and 4: measured, its bound, and the model's, on each of its machines."""
    del rows  # the curves are computed from the paper's table
    figures = {
        key: points
        for key, points in paper.STRIPED_ATTENTION.items()
        if key[0] in ("Table 3", "Table 4") and key[2] == "llama-3b"
    }
    panels = figure.subplots(1, len(figures), sharey=True)
    for axes, ((_, device, model, tensor, shards), points) in zip(
        panels, figures.items(), strict=True
    ):
        lengths = [length for length, *_ in points]
        cost, tile = STRIPED_ATTENTION_COST[device], paper.STRIPED_TILES[device]
        axes.plot(
            lengths,
            [striped_speedup(model, length, shards, cost) for length in lengths],
            "-",
            color=MODEL,
            label="the model's bound, by the paper's formula",
        )
        axes.plot(
            lengths,
            [bound for _, bound, _ in points],
            "o",
            color=PAPER,
            mfc="none",
            label="the paper's bound",
        )
        axes.plot(
            lengths,
            [striped_speedup(model, length, shards, cost, tile) for length in lengths],
            "--",
            color=MODEL,
            label="the model's bound, by whole tiles",
        )
        axes.plot(
            lengths,
            [speedup for *_, speedup in points],
            "o",
            color=PAPER,
            label="the paper, measured",
        )
        _label_lengths(axes, [length for length in lengths if length & (length - 1) == 0])
        axes.axhline(1, color="#bbbbbb", linewidth=0.8)
        axes.set(
            xlabel="tokens", title=STRIPED_MACHINES[device].format(tensor=tensor, shards=shards)
        )
    panels[0].set_ylabel("speed-up, striped over contiguous ring")
    figure.suptitle("Striped Attention, LLaMA-3B: what was measured lies below both bounds")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=2
    )


def _draw_times(figure, rows: Sequence[Row]) -> None:
    """DistFlashAttn's Table 1: seconds a step, the paper's and the model's."""
    axes = figure.subplots()
    times = [
        row
        for row in rows
        if row.table == "Table 1"
        and row.source == "DistFlashAttn"
        and "llama-7b" in row.label
        and row.label.endswith(", s")
    ]
    for height, row in enumerate(times):
        axes.plot((row.predicted, row.paper), (height, height), color="#cccccc", zorder=1)
        axes.plot(
            row.paper,
            height,
            "o",
            color=PAPER,
            label="the paper, measured" if height == 0 else None,
        )
        axes.plot(
            row.predicted,
            height,
            "D",
            color=MODEL,
            markersize=5,
            label="the cost model" if height == 0 else None,
        )
        axes.annotate(
            f"{row.error:+.0%}",
            (max(row.paper, row.predicted), height),
            (8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    names = [
        row.label.removesuffix(", s").replace("llama-7b ", "").removesuffix(" a GPU")
        for row in times
    ]
    errors = [abs(row.error) for row in times]
    axes.set(
        yticks=range(len(times)),
        yticklabels=names,
        xscale="log",
        xlabel="seconds a step",
        xlim=(3, 300),
        title=f"DistFlashAttn's Table 1, LLaMA-7B: the model is {min(errors):.0%} to {max(errors):.0%} too fast",
    )
    _plain_ticks(axes, (3, 10, 30, 100, 300))
    axes.set_ylabel("nodes x GPUs, tokens a GPU")
    axes.invert_yaxis()
    axes.grid(axis="x", linewidth=0.3)
    axes.legend(frameon=False, loc="lower left")


def _draw_grid(figure, rows: Sequence[Row]) -> None:
    """Attention2D's speed-up over the balanced ring, by the model, beside what its text says."""
    speedups = {row.label: row.predicted for row in rows if row.source == "Attention2D"}
    panels = figure.subplots(1, 2, sharey=True)
    colours = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677")
    for axes, batch in zip(panels, (1, 64), strict=True):
        for model, colour in zip(paper.ATTENTION2D_MODELS, colours, strict=True):
            curve = [
                speedups[f"{model} O, 64 GPUs, {batch} x {length} tokens"] for length in LENGTHS
            ]
            axes.plot(LENGTHS, curve, color=colour, marker=".", label=model)
        for claim, speedup in paper.ATTENTION2D_SPEEDUP.items():
            axes.axhline(speedup, color=PAPER, linewidth=0.8, linestyle=":")
            if axes is panels[1]:  # whose curves are far from the texts
                axes.text(
                    LENGTHS[-1],
                    speedup + 0.06,
                    claim,
                    fontsize=8,
                    ha="right",
                    va="bottom",
                    color=PAPER,
                )
        _label_lengths(axes, LENGTHS)
        axes.set(
            xlabel="tokens in a row",
            title=f"{batch} row{'s' if batch > 1 else ''} in a batch",
            ylim=(0, 10.2),
        )
    panels[0].set_ylabel("speed-up over the balanced ring, by the model")
    figure.suptitle(
        "Attention2D with overlap on 64 GPUs with Ethernet (dotted: its text; its batch is not printed)"
    )
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=5
    )


def _label_lengths(axes, lengths: Sequence[int]) -> None:
    """Makes the x axis logarithmic, with ticks in thousands of tokens."""
    axes.set_xscale("log")
    axes.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
    axes.minorticks_off()


def _plain_ticks(axes, ticks: Sequence[float]) -> None:
    """Labels a logarithmic x axis with plain numbers."""
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


# File -> size in inches, and what draws it.
PICTURES = {
    "papers_errors.png": ((9, 6), _draw_errors),
    "papers_striped_attention.png": ((10, 5), _draw_striped),
    "papers_distflashattn.png": ((9, 5), _draw_times),
    "papers_attention2d.png": ((10, 5), _draw_grid),
}
