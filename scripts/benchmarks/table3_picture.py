"""Ring Attention's Table 3 as text and as a picture: the paper's longest contexts, and ours."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.benchmarks.commands import tokens_text
from scripts.benchmarks.table3_cells import (
    COLUMNS,
    LIKE_FOR_LIKE,
    MEMORIES,
    Cell,
    is_gpu,
    table_rows,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Memory -> its mark, size, edge, colour and name in the picture.
MARKS = {
    "device": ("|", 12, 2, "#4477aa", "ours, device memory only"),
    "ours": ("D", 5, 1, "#ee6677", "ours, with host memory"),
}
PAPER_MARK = {
    "marker": "o",
    "linestyle": "",
    "markersize": 9,
    "color": "#222222",
    "fillstyle": "none",
}


def show(filled: dict[Cell, dict | None]) -> None:
    """Prints the table of the cells' contents, and that of the like-for-like ones.

    In a cell stand device memory only / ours (the paper's), and + where the double has not been tried yet.
    """
    show_memories(filled, MEMORIES, table_rows())
    if gpus := [(topology, model) for topology, model in table_rows() if is_gpu(topology)]:
        print("\nLike for like: one row, tensor parallelism, float32, device memory only")
        show_memories(filled, (LIKE_FOR_LIKE,), gpus)


def show_memories(
    filled: dict[Cell, dict | None], memories: tuple[str, ...], rows: list[tuple[str, str]]
) -> None:
    """Prints one table, of rows of topology and model: a cell's contexts with each choice of memory."""
    print(f"| hardware | model | {' | '.join(COLUMNS)} |\n|{'---|' * (2 + len(COLUMNS))}")
    for topology, model in rows:
        texts = []
        for column in COLUMNS:
            contents = [filled[Cell(topology, model, column, memory)] for memory in memories]
            text = " / ".join(
                f"{tokens_text(content['longest'])}{'' if content['next'] else '+'}"
                if content
                else "?"
                for content in contents
            )
            texts.append(f"{text} ({tokens_text(Cell(topology, model, column, 'ours').paper)})")
        print(f"| {topology} | {model.removeprefix('llama-')} | {' | '.join(texts)} |")


def draw(longest_contexts: dict[Cell, int], path: Path) -> None:
    """Draws a panel for each column of the table, with a line for each model and machine: the paper's context and ours.

    The panels are as wide as their contexts' range, so that a doubling is as long in each.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    heights, machines = _heights()
    ranges = {column: _range(column, longest_contexts) for column in COLUMNS}
    figure = Figure(
        figsize=(12, 1.6 + 0.25 * (len(heights) + len(machines))),
        facecolor="white",
        layout="constrained",
    )
    panels = figure.subplots(
        1, len(COLUMNS), sharey=True, width_ratios=[high - low for low, high in ranges.values()]
    )
    for axes, column in zip(panels, COLUMNS, strict=True):
        _draw_contexts(axes, column, heights, longest_contexts)
        axes.set(xlim=ranges[column], title=column)
        _draw_axis(axes)
    panels[0].set_yticks(
        [*heights.values(), *machines],
        [f"{model.removeprefix('llama-').upper()} " for _, model in heights]
        + [machine_text(topology) for topology in machines.values()],
    )
    for label in panels[0].get_yticklabels()[len(heights) :]:
        label.set_fontweight("bold")
    panels[0].invert_yaxis()
    figure.suptitle(
        "Ring Attention's Table 3: the longest row in tokens, and what the compilers accept of our step"
    )
    marks = [Line2D([], [], label="the paper", **PAPER_MARK)]
    marks += [
        Line2D([], [], marker=mark, linestyle="", color=colour, markeredgewidth=2, label=label)
        for mark, _, _, colour, label in MARKS.values()
    ]
    figure.legend(handles=marks, frameon=False, ncols=3, loc="outside lower center")
    figure.savefig(path, dpi=100)


def machine_text(topology: str) -> str:
    """Returns a topology as the machine is called: `a100:4x8` as 32 A100, `v4:8x8x4` as 256 v4."""
    kind, shape = topology.split(":")
    return f"{math.prod(map(int, shape.split('x')))} {kind.upper() if is_gpu(topology) else kind}"


def _heights() -> tuple[dict[tuple[str, str], int], dict[int, str]]:
    """Returns the height of each row, whose machine's models stand together, and above them each machine's name by height."""
    heights: dict[tuple[str, str], int] = {}
    machines: dict[int, str] = {}
    height = itertools.count()
    for topology, rows in itertools.groupby(table_rows(), key=lambda row: row[0]):
        machines[next(height)] = topology
        heights |= {row: next(height) for row in rows}
    return heights, machines


def _range(column: str, longest_contexts: dict[Cell, int]) -> tuple[float, float]:
    """Returns the limits of a panel in powers of two: those of all its contexts, with a margin."""
    contexts = [Cell(*row, column, "ours").paper for row in table_rows()]
    contexts += [context for cell, context in longest_contexts.items() if cell.column == column]
    return math.log2(min(contexts)) - 0.7, math.log2(max(contexts)) + 0.7


def _draw_contexts(
    axes: Axes, column: str, heights: dict[tuple[str, str], int], longest_contexts: dict[Cell, int]
) -> None:
    """Draws a column's contexts, the paper's and ours, joined by a grey line."""
    for row, height in heights.items():
        paper = Cell(*row, column, "ours").paper
        ours = {
            memory: longest_contexts[cell]
            for memory in MEMORIES
            if (cell := Cell(*row, column, memory)) in longest_contexts
        }
        contexts = (paper, *ours.values())
        axes.plot(
            [math.log2(min(contexts)), math.log2(max(contexts))],
            [height] * 2,
            color="#cccccc",
            zorder=1,
        )
        axes.plot(math.log2(paper), height, **PAPER_MARK)
        for memory, context in ours.items():
            mark, size, edge, colour, _ = MARKS[memory]
            axes.plot(
                math.log2(context),
                height,
                mark,
                color=colour,
                markersize=size,
                markeredgewidth=edge,
            )


def _draw_axis(axes: Axes) -> None:
    """Marks every fourfold of the context, and leaves the frame out."""
    low, high = axes.get_xlim()
    ticks = [power for power in range(math.ceil(low), math.floor(high) + 1) if power % 2 == 0]
    axes.set_xticks(ticks, [tokens_text(1 << power) for power in ticks])
    axes.grid(axis="x", linewidth=0.3)
    for spine in ("top", "right", "left"):
        axes.spines[spine].set_visible(False)
    axes.tick_params(axis="y", length=0)
