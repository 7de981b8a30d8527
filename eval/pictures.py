"""Pictures of evaluations' scores, and the names and styles of their curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from eval.suite import Result

COLORS, MARKERS = 10, "os^Dv*P"  # their numbers have no common factor
LONGEST = 70  # characters of a curve's name


def style(number: int) -> dict[str, Any]:
    """Returns the color and marker of a curve; the first 70 curves differ."""
    return {"color": f"C{number % COLORS}", "marker": MARKERS[number % len(MARKERS)]}


def curve(axes: Any, points: Sequence[tuple[float, float, float, float]], **style: Any) -> None:
    """Draws a curve of scores and their intervals: points (x, score, low, high)."""
    x, score, low, high = np.array(points).T
    axes.errorbar(x, score, yerr=np.maximum([score - low, high - score], 0), capsize=3, **style)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Returns paths by as few of their last parts, at least two, as tell them apart."""
    split = {name: [part for part in Path(name).parts if part != "checkpoints"] for name in names}
    for count in range(2, max(map(len, split.values()), default=0)):
        short = {name: "/".join(parts[-count:]) for name, parts in split.items()}
        if len(set(short.values())) == len(split):
            return {name: _cut(text) for name, text in short.items()}
    return {name: _cut(name) for name in split}


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST else f"...{name[3 - LONGEST :]}"


def scores(results: Sequence[Result], title: str = "") -> Figure:
    """Draws maps of length and depth for tasks with depths, curves against length for others."""
    from matplotlib.figure import Figure

    maps = list(dict.fromkeys(result.task for result in results if result.depth is not None))
    curves = list(dict.fromkeys(result.task for result in results if result.depth is None))
    panels = max(len(maps) + bool(curves), 1)
    columns = min(panels, 3)
    rows = math.ceil(panels / columns)
    width = 5 * columns + 2 * bool(curves)  # of the legend
    figure = Figure(figsize=(width, 4 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for task in maps:
        _draw_map(axes.pop(0), [result for result in results if result.task == task], task)
    if curves:
        _draw_curves(axes.pop(0), [result for result in results if result.depth is None], curves)
    for panel in axes:
        panel.set_axis_off()
    figure.suptitle(title, fontsize="medium")
    return figure


def _draw_curves(axes: Any, results: list[Result], tasks: list[str]) -> None:
    """Draws a curve for each task, with a legend beside the axes."""
    for number, task in enumerate(tasks):
        group = sorted(
            (result for result in results if result.task == task), key=lambda result: result.tokens
        )
        points = [(result.tokens, result.score, result.low, result.high) for result in group]
        curve(axes, points, label=task, **style(number))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="tokens", ylabel="score (95% interval)", ylim=(-0.03, 1.03))
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    axes.grid(alpha=0.3)


def _draw_map(axes: Any, results: list[Result], task: str) -> None:
    lengths, depths = (
        sorted({getattr(result, name) for result in results}) for name in ("tokens", "depth")
    )
    scores = np.full((len(depths), len(lengths)), np.nan)
    for result in results:
        row, column = depths.index(result.depth), lengths.index(result.tokens)
        scores[row, column] = result.score
        axes.text(column, row, f"{result.score:.2f}", ha="center", va="center", fontsize="small")
    axes.imshow(scores, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=30)
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set(xlabel="tokens", ylabel="depth", title=task)
