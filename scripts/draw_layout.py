"""Draws docs/striped_layout.png: who holds which tokens, and what each device computes in each round of a ring.

    python -m scripts.draw_layout [--output FILE.png]
"""

import argparse
import pathlib
import sys

import numpy as np

from data.paths import output_file
from model.attention.layout import permutation
from trainer import entry

LAYOUTS = ("contiguous", "striped")
DEVICES = 4
TILE = 4  # tokens of a side of a tile
LENGTH = DEVICES * TILE * 4  # four tiles a side in each device's block
HOLDERS = ["#4477aa", "#66ccee", "#228833", "#ccbb44"]  # Paul Tol's bright scheme: told apart without colour vision
KINDS = {"full": "#5a5566", "masked": "#e6a04b", "skip": "#eeeeee"}
TOLD = {"full": "computed, no mask needed", "masked": "computed with a mask", "skip": "skipped: all keys are later"}


def kind(queries: np.ndarray, keys: np.ndarray) -> str:
    """The tile rule for causal attention in one document, from the smallest and largest token on either side."""
    if keys.min() > queries.max():
        return "skip"
    return "full" if keys.max() <= queries.min() else "masked"


def rounds(layout: str) -> list[list[list[list[str]]]]:
    """What tile [round][device][query tile][key tile] is, as the keys travel round the ring."""
    tiles = permutation(LENGTH, DEVICES, layout).reshape(DEVICES, -1, TILE)
    return [
        [
            [[kind(queries, keys) for keys in tiles[(device - hop) % DEVICES]] for queries in tiles[device]]
            for device in range(DEVICES)
        ]
        for hop in range(DEVICES)
    ]


def work(block: list[list[str]]) -> int:
    """Tiles that a device computes in a round."""
    return sum(tile != "skip" for row in block for tile in row)


def draw(path: pathlib.Path) -> None:
    """One half for each layout: the sequence in its holders' colours above, rounds x devices below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    figure = Figure(figsize=(13, 8.6), facecolor="white")
    FigureCanvasAgg(figure)
    halves = figure.subfigures(1, 2, wspace=0.04)
    for half, layout in zip(halves, LAYOUTS, strict=True):
        grid = half.add_gridspec(
            DEVICES + 1, DEVICES, height_ratios=[0.3] + [1] * DEVICES, hspace=0.36, wspace=0.12,
            left=0.12, right=0.98, top=0.92, bottom=0.11,
        )  # fmt: skip
        half.suptitle(f"{layout}", fontsize=16, fontweight="bold", x=0.55, y=0.985)
        strip = half.add_subplot(grid[0, :])
        holder = np.empty(LENGTH, int)
        holder[permutation(LENGTH, DEVICES, layout)] = np.repeat(np.arange(DEVICES), LENGTH // DEVICES)
        for token, device in enumerate(holder):
            strip.add_patch(Rectangle((token, 0), 1, 1, facecolor=HOLDERS[device], edgecolor="white", linewidth=0.6))
        strip.set(xlim=(0, LENGTH), ylim=(0, 1), yticks=[], xticks=[])
        strip.set_frame_on(False)
        strip.set_title("who holds which token, from the first to the last", fontsize=10, pad=4)
        for hop, devices in enumerate(rounds(layout)):
            longest = max(map(work, devices))
            for device, block in enumerate(devices):
                axes = half.add_subplot(grid[hop + 1, device])
                size = len(block)
                for row, column in np.ndindex(size, size):
                    place = (column, size - 1 - row)
                    colour = KINDS[block[row][column]]
                    axes.add_patch(Rectangle(place, 1, 1, facecolor=colour, edgecolor="white", linewidth=1))
                axes.set(xlim=(0, size), ylim=(0, size), xticks=[], yticks=[], aspect="equal")
                for spine in axes.spines.values():
                    spine.set(color=HOLDERS[device], linewidth=2.5)
                if hop == 0:
                    axes.set_title(f"device {device}", fontsize=10, color="#222222")
                if device == 0:
                    axes.set_ylabel(f"round {hop}\n{longest} tiles long", fontsize=9)
                axes.set_xlabel(f"{work(block)} of {size * size}", fontsize=8, labelpad=2)
        total = sum(max(map(work, devices)) for devices in rounds(layout))
        half.text(0.55, 0.052, f"a round takes as long as its busiest device: {total} tiles in all",
                  ha="center", fontsize=11)  # fmt: skip
    legend = [Patch(facecolor=KINDS[name], edgecolor="#999999", label=TOLD[name]) for name in KINDS]
    legend += [Patch(facecolor=colour, label=f"device {device}") for device, colour in enumerate(HOLDERS)]
    figure.legend(handles=legend, loc="lower center", ncols=len(legend), fontsize=9, frameon=False)
    figure.savefig(path, dpi=110)


def main(argv=None) -> int:
    """Draws, and prints the file's name."""
    parser = argparse.ArgumentParser(prog="python -m scripts.draw_layout", allow_abbrev=False, description=(
        "Draws who holds which tokens, and what each device computes in each round of a ring."))
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("docs/striped_layout.png"), metavar="FILE.png",
                        help="picture to write (default docs/striped_layout.png, the repository's own)")
    args = parser.parse_args(argv)

    def work():
        draw(output_file(args.output))
        print(args.output)

    return entry.run(work)


if __name__ == "__main__":
    sys.exit(main())
