"""The figure of scripts.benchmarks.exploration: return against episode, a panel per task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from data.outputs import PICTURE_METADATA
from data.trajectories.tasks import TASKS
from scripts.benchmarks.exploration.cells import EVALUATION_SEEDS, METHODS


class Curve(NamedTuple):
    """A method's returns by episode: the mean, and half the width of its 95% interval."""

    mean: Float[np.ndarray, " E"]
    margin: Float[np.ndarray, " E"]
    best_in_data: float


def curves(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> dict[str, dict[str, Curve]]:
    """Returns task -> method -> curve, of our protocol, from the table of cells.

    The variance of a mean over S training seeds of E evaluations each is that between the training
    seeds' means, divided by S, plus that within, divided by S E.
    """
    cells: dict[tuple[str, str], list[dict[str, str]]] = {}
    for line in lines:
        cell = dict(zip(columns, line, strict=True))
        if cell["protocol"] == "ours":
            cells.setdefault((cell["task"], cell["method"]), []).append(cell)
    by_task: dict[str, dict[str, Curve]] = {}
    for (task, method), group in cells.items():
        means, deviations = (
            np.array([[float(x) for x in cell[name].split()] for cell in group])
            for name in ("episodes", "deviations of episodes")
        )
        seeds = len(group)
        between = means.var(0, ddof=1) if seeds > 1 else 0.0
        within = np.square(deviations).mean(0) / EVALUATION_SEEDS
        margin = 1.96 * np.sqrt((between + within) / seeds)
        best = float(group[0]["best in data"])
        by_task.setdefault(task, {})[method] = Curve(means.mean(0), margin, best)
    return by_task


def draw(by_task: dict[str, dict[str, Curve]], path: Path) -> None:
    """Draws a panel per task with a curve per method; a task without curves says so.

    Args:
      by_task: task -> method -> curve, as from `curves`.
      path: of the picture, a PNG.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    panels = figure.subplots(2, math.ceil(len(TASKS) / 2)).flat
    labels: dict[str, Any] = {}
    for task, axes in zip(TASKS, panels, strict=True):
        axes.set_title(task)
        if task not in by_task:
            axes.text(0.5, 0.5, "not measured", ha="center", va="center", color="0.5")
            axes.set(xticks=[], yticks=[])
            continue
        for method, curve in by_task[task].items():
            episodes = np.arange(1, len(curve.mean) + 1)
            color = f"C{METHODS.index(method)}"
            (labels[method],) = axes.plot(episodes, curve.mean, color=color, linewidth=1.2)
            low, high = curve.mean - curve.margin, curve.mean + curve.margin
            axes.fill_between(episodes, low, high, color=color, alpha=0.2, linewidth=0)
        best = next(iter(by_task[task].values())).best_in_data
        labels["best in the data"] = axes.axhline(best, color="0.3", linestyle="--", linewidth=1)
        axes.set(xlabel="episode", ylabel="return", ylim=(0, None))
        axes.grid(alpha=0.3)
    order = sorted(labels, key=lambda name: [*METHODS, "best in the data"].index(name))
    figure.legend(
        [labels[name] for name in order], order, loc="outside lower center", ncols=len(order)
    )
    figure.suptitle("Consecutive episodes on exploration data: mean and 95% interval")
    figure.savefig(path, dpi=110, metadata=PICTURE_METADATA)
