"""Draws each schedule from its own plan: who computes which tiles in which round, how evenly, and what is sent.

    python -m scripts.draw_schedule [--output docs/schedules] [--ranks 4 8] [--schedules ring ...]
"""
from __future__ import annotations

import argparse
import pathlib
import sys
import textwrap
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from model.attention import get_schedule
from model.attention.coords import MASKED, SKIP, Mask, TokenCoords, tile_bounds, tile_kind
from model.attention.layout import LAYOUTS, permutation
from model.attention.schedules.plan import Block, Round, Send, Task

CASES = {
    "ring": "ring", "ring_bidirectional": {"name": "ring", "bidirectional": True}, "all_gather": "all_gather",
    "balanced": "balanced", "balanced_split": {"name": "balanced", "split": True},
    "ulysses": "ulysses", "usp": {"name": "ulysses", "degree": 2}, "attention2d": "attention2d",
    "attention2d_overlap": {"name": "attention2d", "overlap": True}, "ring_self_attention": "ring_self_attention",
}
STRIPED = ("ulysses", "usp")
TOLD = ("Rows are queries, columns keys, in the order in which ranks hold them. Bars: tiles that each rank computes in the "
        "round; the line is the busiest, for whom all wait. Below: what is sent meanwhile, by which ranks, how many ranks on.")
TILES, TOKENS = 4, 4  # tiles on a side of a block, tokens on a side of a tile
CELL = 8  # pixels of a tile, cut into as many stripes as ranks share its heads
COLOURS = np.array([  # Paul Tol's muted scheme: told apart without colour vision
    (0x33, 0x22, 0x88), (0x88, 0xCC, 0xEE), (0x11, 0x77, 0x33), (0xDD, 0xCC, 0x77),
    (0xCC, 0x66, 0x77), (0x44, 0xAA, 0x99), (0x88, 0x22, 0x55), (0x99, 0x99, 0x33)]) / 255
SKIPPED, ELSEWHERE = np.array([0.86] * 3), np.array([0.975] * 3)
INK = "#2b2b2b"
WIDTH, MOST = 10.0, 5  # inches of a picture, so that a page shows it unshrunk; rounds side by side
LEFT, GAP, HEAD, BARS, LINE = 0.6, 0.17, 0.25, 0.62, 0.165  # inches: labels; between panels; titles; bars; a line of words
LETTERS = 16, 13.5  # in an inch: of a panel's words, of the text above all


def kinds(layout: str, size: int) -> np.ndarray:
    """SKIP, FULL or MASKED of every pair of tiles in the order in which the layout stores them, by the kernels' own rule."""
    order = permutation(size * TILES * TOKENS, size, layout)
    bounds = tile_bounds(TokenCoords(jnp.asarray(order[None]), jnp.ones((1, len(order)), jnp.int32)), TOKENS)
    queries, keys = jax.tree.map(lambda x: x[0][:, None], bounds), jax.tree.map(lambda x: x[0][None], bounds)
    return np.asarray(tile_kind(queries, keys, Mask()))


def tiles_of(task: Task) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the query tiles and of the key tiles of a kernel call."""
    rows, columns = (np.concatenate([np.arange(TILES) + block * TILES for block in blocks])
                     for blocks in (task.queries, task.keys))
    (part, parts), (key_part, key_parts) = task.part, task.key_part
    return np.split(rows, parts)[part], np.split(columns, key_parts)[key_part]


def picture(one: Round, kinds_: np.ndarray) -> np.ndarray:
    """The matrix of tiles as an image: computed ones in their rank's colour, paler where a mask is needed."""
    image = np.broadcast_to(ELSEWHERE, (*(side * CELL for side in kinds_.shape), 3)).copy()
    for task in one.tasks:
        share, shares = task.heads
        height = CELL // shares
        for row in tiles_of(task)[0]:
            for column in tiles_of(task)[1]:
                colour = COLOURS[task.rank]
                if kinds_[row, column] == MASKED:
                    colour = 0.45 * colour + 0.55
                if kinds_[row, column] == SKIP:
                    colour = SKIPPED
                top = row * CELL + share * height
                image[top:top + height, column * CELL:(column + 1) * CELL] = colour
    return image


def work(one: Round, kinds_: np.ndarray, size: int) -> np.ndarray:
    """Tiles that each rank computes in a round; of a part of the heads, as much less."""
    found = np.zeros(size)
    for task in one.tasks:
        found[task.rank] += (kinds_[np.ix_(*tiles_of(task))] != SKIP).sum() / task.heads[1]
    return found


def describe(send: Send, size: int) -> str:
    """One transfer in words: what, and from which ranks to which."""
    steps = {(target - source) % size for source, target in send.pairs}
    sources = sorted({source for source, _ in send.pairs})
    if send.kind == "collective-permute" and len(steps) == 1:
        step = steps.pop()
        step = f"+{step}" if step <= size // 2 else f"−{size - step}"
        who = "all" if len(sources) == size else ",".join(map(str, sources))
        return f"{send.what}: {who} → {step}"
    if send.kind == "collective-permute":  # round lines of neighbours, of which the longest step leads back
        return f"{send.what}: all → −1 in rows of {max(abs(a - b) for a, b in send.pairs) + 1}"
    lines = sorted({tuple(sorted({source, *(b for a, b in send.pairs if a == source)})) for source in sources})
    first = ",".join(map(str, lines[0]))
    return f"{send.what}: {send.kind} " + (f"of {{{first}}},\u00a0…" if len(lines) > 1 else "of all")


def with_sends(rounds: tuple[Round, ...], size: int) -> list[tuple[Round, str]]:
    """The rounds that compute, each with the words for what is sent before, beside and after it."""
    shown: list[tuple[Round, str]] = []
    before: list[str] = []
    for one in rounds:
        words = [describe(send, size) for send in one.sends if send.pairs and "coordinates" not in send.what]
        if one.tasks:
            shown.append((one, "\n".join(["first " + word for word in before] + words)))
            before = []
        elif shown:
            shown[-1] = (shown[-1][0], "\n".join([shown[-1][1]] + ["then " + word for word in words]).strip())
        else:
            before += words
    return shown


@dataclass(frozen=True)
class Panel:
    """One round under one layout. label: where a line begins; tiles: of each rank; most: of any rank in any round."""

    title: str
    label: str
    image: np.ndarray
    tiles: np.ndarray
    most: float
    words: list[str]


def lines_of(name: str, size: int) -> list[list[Panel]]:
    """What stands side by side, line by line: a layout's rounds, broken where they are many, or all layouts' only round."""
    block = Block(batch=1, tokens=TILES * TOKENS, query_heads=size, kv_heads=size, head_dim=8)
    dense = name == "ring_self_attention"  # its matrix products are of whole blocks, the same under every layout
    lines = []
    for layout in LAYOUTS[:1] if dense else LAYOUTS:
        rounds = with_sends(get_schedule(CASES[name], size, layout).plan(size, block).forward, size)
        found = np.full_like(kinds(layout, size), MASKED) if dense else kinds(layout, size)
        tiles = np.array([work(one, found, size) for one, _ in rounds])
        label = f"{'every layout' if dense else layout}\nbusiest / mean {tiles.max(1).sum() / tiles.mean(1).sum():.2f}"
        side_by_side = -(-len(rounds) // -(-len(rounds) // MOST))
        shown = [Panel(f"round {number}", label if number % side_by_side == 0 else "", picture(one, found), tiles[number],
                       tiles.max(), words.splitlines()) for number, (one, words) in enumerate(rounds)]
        lines += [shown[start:start + side_by_side] for start in range(0, len(shown), side_by_side)]
    if all(len(line) == 1 for line in lines):
        return [[replace(one, title=one.label, label="") for one, in lines]]
    return lines


def draw(name: str, size: int, path: pathlib.Path) -> None:
    """One picture of the forward pass: lines of rounds under each layout, with what is sent below each round."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lines = lines_of(name, size)
    columns = max(map(len, lines))
    side = min((WIDTH - LEFT) / columns, 3.2) - GAP
    width = max(LEFT + columns * (side + GAP), 7.0)
    lines = [[replace(one, words=_wrapped(one.words, int(side * LETTERS[0]))) for one in line] for line in lines]
    told = _wrapped([TOLD + (" Stripes: ranks share the heads." if name in STRIPED else "")], int(width * LETTERS[1]))
    legend = [Patch(facecolor=COLOURS[rank], label=f"rank {rank}") for rank in range(size)]
    legend += [Patch(facecolor=0.45 * COLOURS[0] + 0.55, label="paler: with a mask"),
               Patch(facecolor=SKIPPED, label="skipped"), Patch(facecolor=ELSEWHERE, edgecolor="#cccccc", label="not now")]
    rows = -(-len(legend) // int(width / 1.15))
    head = [HEAD * max(1 + one.title.count("\n") for one in line) for line in lines]
    below = [0.3 + LINE * max(len(one.words) for one in line) for line in lines]
    above = 0.6 + 0.18 * len(told)
    height = above + len(lines) * (side + BARS) + sum(head) + sum(below) + 0.1 + 0.23 * rows

    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.5, 1 - 0.12 / height, f"{name.replace('_', ' ')} on {size} ranks, forward", fontsize=15, fontweight="bold",
                color=INK, ha="center", va="top")
    figure.text(0.5, 1 - 0.5 / height, "\n".join(told), fontsize=9.5, color="#555555", ha="center", va="top")
    top = height - above
    for line, title, words in zip(lines, head, below, strict=True):
        top -= title + side
        for number, one in enumerate(line):
            left = (width + LEFT - columns * (side + GAP)) / 2 + number * (side + GAP)
            _draw_panel(one, size, *(figure.add_axes((left / width, bottom / height, side / width, tall / height))
                                     for bottom, tall in ((top, side), (top - BARS, BARS - 0.25))))
        top -= BARS + words
    figure.legend(handles=legend, loc="lower center", ncols=-(-len(legend) // rows), fontsize=9.5, frameon=False, borderpad=0.3,
                  columnspacing=1.5, handlelength=1.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, pil_kwargs={"optimize": True})


def _draw_panel(one: Panel, size: int, matrix, bars) -> None:
    matrix.imshow(one.image, interpolation="nearest")
    for edge in range(1, size):
        matrix.axhline(edge * TILES * CELL - 0.5, color="white", linewidth=1.2)
        matrix.axvline(edge * TILES * CELL - 0.5, color="white", linewidth=1.2)
    for spine in matrix.spines.values():
        spine.set(color="#bbbbbb", linewidth=0.6)
    matrix.set(xticks=[], yticks=[])
    matrix.set_title(one.title, fontsize=10, color=INK, pad=4)
    matrix.set_ylabel(one.label, fontsize=10, color=INK)
    busiest = one.tiles.max()
    bars.bar(range(size), one.tiles, width=0.8, color=COLOURS[:size])
    bars.axhline(busiest, color=INK, linewidth=0.8)
    bars.text(-0.6, busiest, f"{busiest:g} tiles", fontsize=8.5, color=INK, va="bottom")
    bars.set(xlim=(-0.6, size - 0.4), ylim=(0, one.most), xticks=[], yticks=[])
    bars.set_frame_on(False)
    bars.set_xlabel("\n".join(one.words), fontsize=8.5, color="#444444", labelpad=4)


def _wrapped(lines: list[str], letters: int) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, letters)]


def main(argv=None) -> int:
    """Draws what is asked for, and prints each file's name."""
    parser = argparse.ArgumentParser(prog="python -m scripts.draw_schedule", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("docs/schedules"),
                        help="folder for SCHEDULE_RANKS.png (default docs/schedules, the repository's own pictures)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], choices=[4, 8], help="default both")
    parser.add_argument("--schedules", nargs="+", default=list(CASES), choices=CASES, help="default all")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    for name in args.schedules:
        for size in args.ranks:
            path = args.output / f"{name}_{size}.png"
            draw(name, size, path)
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
