"""Draws which tokens each device holds, and which tiles it computes in each round of a ring.

python -m scripts.draw_layout [--output FILE.png]
"""

import dataclasses
import pathlib
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from data.outputs import PICTURE, PICTURE_METADATA, output_file
from model.attention.layout import permutation
from trainer.options import command, option

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

LAYOUTS = ("contiguous", "striped")
DEVICES = 4
TILE = 4  # tokens on a side of a tile
LENGTH = DEVICES * TILE * 4  # four tiles on a side of each device's block
# Paul Tol's bright scheme, for all kinds of colour vision.
HOLDERS = ["#4477aa", "#66ccee", "#228833", "#ccbb44"]
KINDS = {"full": "#5a5566", "masked": "#e6a04b", "skip": "#eeeeee"}
DESCRIPTIONS = {
    "full": "computed without a mask",
    "masked": "computed with a mask",
    "skip": "skipped: all keys are later",
}


def kind(queries: Int[np.ndarray, " Tq"], keys: Int[np.ndarray, " Tk"]) -> str:
    """Returns a tile's kind (a key of KINDS) under causal attention, from its tokens' indices."""
    if keys.min() > queries.max():
        return "skip"
    return "full" if keys.max() <= queries.min() else "masked"


def ring_tiles(layout: str) -> list[list[list[list[str]]]]:
    """Returns the kind of tile [round][device][query tile][key tile] of a ring."""
    tiles = permutation(LENGTH, DEVICES, layout).reshape(DEVICES, -1, TILE)
    return [
        [
            [
                [kind(queries, keys) for keys in tiles[(device - round_) % DEVICES]]
                for queries in tiles[device]
            ]
            for device in range(DEVICES)
        ]
        for round_ in range(DEVICES)
    ]


def work(block: list[list[str]]) -> int:
    """Returns how many tiles a device computes in a round."""
    return sum(tile != "skip" for row in block for tile in row)


def draw(path: pathlib.Path) -> None:
    """Draws the layouts side by side into a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(13, 8.6), facecolor="white")
    FigureCanvasAgg(figure)
    halves: Any = figure.subfigures(1, 2, wspace=0.04)
    for half, layout in zip(halves, LAYOUTS, strict=True):
        _draw_layout(half, layout)
    legend = [
        Patch(facecolor=KINDS[name], edgecolor="#999999", label=DESCRIPTIONS[name])
        for name in KINDS
    ]
    legend += [
        Patch(facecolor=colour, label=f"device {device}") for device, colour in enumerate(HOLDERS)
    ]
    figure.legend(handles=legend, loc="lower center", ncols=len(legend), fontsize=9, frameon=False)
    figure.savefig(path, dpi=110, metadata=PICTURE_METADATA)


def _draw_layout(half: "SubFigure", layout: str) -> None:
    """Draws the sequence coloured by device, and below it each device's tiles in each round."""
    grid = half.add_gridspec(
        DEVICES + 1,
        DEVICES,
        height_ratios=[0.3] + [1] * DEVICES,
        hspace=0.36,
        wspace=0.12,
        left=0.12,
        right=0.98,
        top=0.92,
        bottom=0.11,
    )
    half.suptitle(layout, fontsize=16, fontweight="bold", x=0.55, y=0.985)
    _draw_sequence(half.add_subplot(grid[0, :]), layout)
    rounds = ring_tiles(layout)
    longest = [max(map(work, blocks)) for blocks in rounds]
    for round_, blocks in enumerate(rounds):
        for device, block in enumerate(blocks):
            axes = half.add_subplot(grid[round_ + 1, device])
            _draw_block(axes, block, device)
            if round_ == 0:
                axes.set_title(f"device {device}", fontsize=10, color="#222222")
            if device == 0:
                axes.set_ylabel(f"round {round_}\n{longest[round_]} tiles long", fontsize=9)
    note = f"a round takes as long as its busiest device: {sum(longest)} tiles in all"
    half.text(0.55, 0.052, note, ha="center", fontsize=11)


def _draw_sequence(axes: "Axes", layout: str) -> None:
    from matplotlib.patches import Rectangle

    holder = np.empty(LENGTH, int)  # the device that holds each token
    holder[permutation(LENGTH, DEVICES, layout)] = np.repeat(np.arange(DEVICES), LENGTH // DEVICES)
    for token, device in enumerate(holder):
        axes.add_patch(
            Rectangle((token, 0), 1, 1, facecolor=HOLDERS[device], edgecolor="white", linewidth=0.6)
        )
    axes.set(xlim=(0, LENGTH), ylim=(0, 1), yticks=[], xticks=[])
    axes.set_frame_on(False)
    axes.set_title("device of each token, from the first to the last token", fontsize=10, pad=4)


def _draw_block(axes: "Axes", block: list[list[str]], device: int) -> None:
    from matplotlib.patches import Rectangle

    size = len(block)
    for row, column in np.ndindex(size, size):
        corner = (column, size - 1 - row)
        axes.add_patch(
            Rectangle(
                corner, 1, 1, facecolor=KINDS[block[row][column]], edgecolor="white", linewidth=1
            )
        )
    axes.set(xlim=(0, size), ylim=(0, size), xticks=[], yticks=[], aspect="equal")
    for spine in axes.spines.values():
        spine.set(color=HOLDERS[device], linewidth=2.5)
    axes.set_xlabel(f"{work(block)} of {size * size}", fontsize=8, labelpad=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    output: pathlib.Path = option(
        "picture to write", pathlib.Path("docs/striped_layout.png"), metavar="FILE.png"
    )


def run(options: Options) -> None:
    """Draws, and prints the file's name."""
    draw(output_file(options.output, PICTURE))
    print(options.output)


main = command(Options, run, output="output")


if __name__ == "__main__":
    sys.exit(main())
