"""Draws each schedule from its own plan: who computes which tiles in which round, how evenly, and what is sent.

    python -m scripts.draw_schedule [--output docs/schedules] [--ranks 4 8] [--schedules ring ...]
"""
from __future__ import annotations

import argparse
import pathlib
import sys
import textwrap

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
        "round; the line is the busiest, for whom all wait.")
TILES, TOKENS = 4, 4  # tiles on a side of a block, tokens on a side of a tile
CELL = 8  # pixels of a tile, cut into as many stripes as ranks share its heads
COLOURS = np.array([  # Paul Tol's muted scheme: told apart without colour vision
    (0x33, 0x22, 0x88), (0x88, 0xCC, 0xEE), (0x11, 0x77, 0x33), (0xDD, 0xCC, 0x77),
    (0xCC, 0x66, 0x77), (0x44, 0xAA, 0x99), (0x88, 0x22, 0x55), (0x99, 0x99, 0x33)]) / 255
SKIPPED, ELSEWHERE = np.array([0.86] * 3), np.array([0.975] * 3)
INK = "#2b2b2b"


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
    return f"{send.what}: {send.kind} " + (f"of {{{first}}}, …" if len(lines) > 1 else "of all")


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


def draw(name: str, size: int, path: pathlib.Path) -> None:
    """One picture of the forward pass: a row for each layout and a column for each round; one round alone, side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    block = Block(batch=1, tokens=TILES * TOKENS, query_heads=size, kv_heads=size, head_dim=8)
    plans = {layout: with_sends(get_schedule(CASES[name], size, layout).plan(size, block).forward, size) for layout in LAYOUTS}
    columns = max(map(len, plans.values()))
    rows = len(LAYOUTS)
    if columns == 1:
        rows, columns = columns, rows
    lines = max(len(_wrapped(words)) for rounds in plans.values() for _, words in rounds)
    panel = 1.7 if columns > 8 else 2.3 if columns > 4 else 2.9
    heights = (panel, 0.5, 0.17 * lines + 0.35)
    width, height = max(columns * panel, 6.6) + 1.0, rows * sum(heights) + 1.5
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(rows * 3, columns, height_ratios=heights * rows, hspace=0.0, wspace=0.14,
                               left=0.75 / width, right=0.985, top=1 - 1.05 / height, bottom=0.45 / height)
    figure.suptitle(f"{name.replace('_', ' ')} on {size} ranks, forward", fontsize=15, fontweight="bold", color=INK,
                    y=1 - 0.16 / height)
    told = TOLD + (" Stripes: ranks share the heads." if name in STRIPED else "")
    figure.text(0.5, 1 - 0.6 / height, "\n".join(textwrap.wrap(told, int(width * 11))), ha="center", va="center", fontsize=8.5,
                color="#555555")
    for number, layout in enumerate(LAYOUTS):
        found = kinds(layout, size)
        if name == "ring_self_attention":  # its matrix products are of whole blocks
            found = np.full_like(found, MASKED)
        _draw_layout(figure, grid, number, layout, plans[layout], size, found)
    legend = [Patch(facecolor=COLOURS[rank], label=f"rank {rank}") for rank in range(size)]
    legend += [Patch(facecolor=0.45 * COLOURS[0] + 0.55, label="paler: with a mask"),
               Patch(facecolor=SKIPPED, label="skipped"), Patch(facecolor=ELSEWHERE, edgecolor="#cccccc", label="not now")]
    figure.legend(handles=legend, loc="lower center", ncols=-(-len(legend) // (1 if width > len(legend) else 2)), fontsize=8,
                  frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=75, pil_kwargs={"optimize": True})


def _draw_layout(figure, grid, number: int, layout: str, rounds: list[tuple[Round, str]], size: int, found) -> None:
    counts = np.array([work(one, found, size) for one, _ in rounds])
    alone = len(rounds) == 1
    for round_, (one, words) in enumerate(rounds):
        top, column = (0, number) if alone else (3 * number, round_)
        axes = figure.add_subplot(grid[top, column])
        axes.imshow(picture(one, found), interpolation="nearest")
        for edge in range(1, size):
            axes.axhline(edge * TILES * CELL - 0.5, color="white", linewidth=1.2)
            axes.axvline(edge * TILES * CELL - 0.5, color="white", linewidth=1.2)
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set(color="#bbbbbb", linewidth=0.6)
        if not alone:
            axes.set_title(f"round {round_}", fontsize=9, color=INK, pad=3)
        if round_ == 0:
            waits = f"{layout}\nbusiest / mean {counts.max(1).sum() / counts.mean(1).sum():.2f}"
            (axes.set_title if alone else axes.set_ylabel)(waits, fontsize=10, color=INK)
        bars = figure.add_subplot(grid[top + 1, column])
        bars.bar(range(size), counts[round_], width=0.8, color=COLOURS[:size])
        bars.axhline(counts[round_].max(), color=INK, linewidth=0.8)
        bars.set(xlim=(-0.6, size - 0.4), ylim=(0, counts.max() * 1.2), xticks=[], yticks=[])
        bars.set_frame_on(False)
        bars.set_xlabel("\n".join(_wrapped(words)), fontsize=8, color="#444444", labelpad=3)


def _wrapped(words: str) -> list[str]:
    return [line for word in words.splitlines() for line in textwrap.wrap(word, 34, subsequent_indent="   ")]


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
