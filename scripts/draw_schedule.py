"""Draws schedules from their plans: each round's tiles by rank, the balance, and the transfers.

python -m scripts.draw_schedule [--output docs/schedules] [--ranks 4] [--schedules ring ...]
"""

import argparse
import pathlib
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from data.paths import PICTURE, PICTURE_METADATA, output_files
from model.attention import get_schedule
from model.attention.coords import MASKED, SKIP, Mask, TokenCoords, tile_bounds, tile_kind
from model.attention.layout import LAYOUTS, permutation
from model.attention.schedules.plan import Block, Round, Send, Task
from trainer import entry

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CASES: dict[str, Any] = {
    "ring": "ring",
    "ring_bidirectional": {"name": "ring", "bidirectional": True},
    "all_gather": "all_gather",
    "balanced": "balanced",
    "balanced_split": {"name": "balanced", "split": True},
    "ulysses": "ulysses",
    "usp": {"name": "ulysses", "degree": 2},
    "attention2d": "attention2d",
    "attention2d_overlap": {"name": "attention2d", "overlap": True},
    "ring_self_attention": "ring_self_attention",
}
SHARED_HEADS = ("ulysses", "usp")  # their ranks compute the same tiles for different heads
CAPTION = (
    "Rows are queries, columns keys, in the order in which ranks hold them. Bars: tiles that each "
    "rank computes in the round; the line is the busiest rank, for which all wait. Below: what is "
    "sent meanwhile, from which ranks, and how far."
)
TILES, TOKENS = 4, 4  # tiles on a side of a block, tokens on a side of a tile
CELL = 8  # pixels on a side of a tile, which has a stripe for each rank that shares its heads
COLOURS = (
    np.array(
        [  # Paul Tol's muted scheme, for all kinds of colour vision
            (0x33, 0x22, 0x88),
            (0x88, 0xCC, 0xEE),
            (0x11, 0x77, 0x33),
            (0xDD, 0xCC, 0x77),
            (0xCC, 0x66, 0x77),
            (0x44, 0xAA, 0x99),
            (0x88, 0x22, 0x55),
            (0x99, 0x99, 0x33),
        ]
    )
    / 255
)
# Colours of tiles that are skipped, or not in this round.
SKIPPED, IDLE = np.array([0.86] * 3), np.array([0.975] * 3)
TEXT_COLOUR = "#2b2b2b"
# Sizes in inches.
# A picture of at most this size fits on a screen at the width of a page.
WIDTH, HEIGHT = 12.0, 9.0
# Sizes of row labels, gaps, titles, bars, and a line of text.
LABELS, GAP, TITLE, BARS, TEXT_LINE = 0.6, 0.14, 0.2, 0.5, 0.15
SIDE = 2.6  # of a panel, at most
PANEL_LETTERS, CAPTION_LETTERS = 16, 13.5  # letters in an inch
MIN_WIDTH = 8.0
MAX_COLUMNS = 8  # rounds side by side
MAX_SIDE_BY_SIDE = 3  # rounds of a schedule whose layouts are drawn side by side, in one row


def kinds(layout: str, size: int) -> Int[np.ndarray, "query_tiles key_tiles"]:
    """Returns SKIP, FULL or MASKED for every tile in the layout's order, by the kernels' rule.

    Args:
        layout: name of the layout.
        size: number of ranks.
    """
    order = permutation(size * TILES * TOKENS, size, layout)
    bounds = tile_bounds(
        TokenCoords(jnp.asarray(order[None]), jnp.ones((1, len(order)), jnp.int32)), TOKENS
    )
    queries, keys = (
        jax.tree.map(lambda x: x[0][:, None], bounds),
        jax.tree.map(lambda x: x[0][None], bounds),
    )
    return np.asarray(tile_kind(queries, keys, Mask()))


class TileIndices(NamedTuple):
    """The tiles of a kernel call: all pairs of a row and a column."""

    rows: Int[np.ndarray, " R"]
    """Indices of the tiles of queries."""
    columns: Int[np.ndarray, " C"]
    """Indices of the tiles of keys."""


def tiles_of(task: Task) -> TileIndices:
    """Returns the tiles of a kernel call."""
    rows, columns = (
        np.concatenate([np.arange(TILES) + block * TILES for block in blocks])
        for blocks in (task.queries, task.keys)
    )
    (part, parts), (key_part, key_parts) = task.part, task.key_part
    return TileIndices(np.split(rows, parts)[part], np.split(columns, key_parts)[key_part])


def picture(
    round_: Round, tile_kinds: Int[np.ndarray, "query_tiles key_tiles"]
) -> Float[np.ndarray, "height width 3"]:
    """Returns an image of a round's tiles coloured by rank, paler where they are masked."""
    image = np.broadcast_to(IDLE, (*(side * CELL for side in tile_kinds.shape), 3)).copy()
    for task in round_.tasks:
        share, shares = task.heads
        height = CELL // shares
        for row in tiles_of(task).rows:
            for column in tiles_of(task).columns:
                colour = COLOURS[task.rank]
                if tile_kinds[row, column] == MASKED:
                    colour = _paler(colour)
                if tile_kinds[row, column] == SKIP:
                    colour = SKIPPED
                top = row * CELL + share * height
                image[top : top + height, column * CELL : (column + 1) * CELL] = colour
    return image


def _paler(colour: Float[np.ndarray, "3"]) -> Float[np.ndarray, "3"]:
    return 0.45 * colour + 0.55


def work(
    round_: Round, tile_kinds: Int[np.ndarray, "query_tiles key_tiles"], size: int
) -> Float[np.ndarray, " P"]:
    """Returns each rank's tiles in a round; a tile of 1/n of the heads counts as 1/n."""
    tiles = np.zeros(size)
    for task in round_.tasks:
        tiles[task.rank] += (tile_kinds[np.ix_(*tiles_of(task))] != SKIP).sum() / task.heads[1]
    return tiles


def describe(send: Send, size: int) -> str:
    """Returns a sentence about a transfer: what is sent, and from which ranks to which."""
    steps = {(target - source) % size for source, target in send.pairs}
    sources = sorted({source for source, _ in send.pairs})
    if send.kind == "collective-permute" and len(steps) == 1:
        (distance,) = steps
        step = f"+{distance}" if distance <= size // 2 else f"−{size - distance}"
        senders = "all" if len(sources) == size else ",".join(map(str, sources))
        return f"{send.arrays}: {senders} → {step}"
    # Rings of neighbours, in which the longest step leads back to the first rank.
    if send.kind == "collective-permute":
        return f"{send.arrays}: all → −1 in rows of {max(abs(a - b) for a, b in send.pairs) + 1}"
    groups = sorted(
        {tuple(sorted({source, *(b for a, b in send.pairs if a == source)})) for source in sources}
    )
    first = ",".join(map(str, groups[0]))
    return f"{send.arrays}: {send.kind} " + (
        f"of {{{first}}},\u00a0…" if len(groups) > 1 else "of all"
    )


class DescribedRound(NamedTuple):
    """A round that computes tiles."""

    round: Round
    sends: str
    """A line for each transfer before, during and after the round."""


def with_sends(rounds: tuple[Round, ...], size: int) -> list[DescribedRound]:
    """Returns the rounds that compute tiles, with the transfers of the rounds that do not."""
    described: list[DescribedRound] = []
    before: list[str] = []
    for round_ in rounds:
        lines = [
            describe(send, size)
            for send in round_.sends
            if send.pairs and "coordinates" not in send.arrays
        ]
        if round_.tasks:
            described.append(
                DescribedRound(round_, "\n".join(["first " + line for line in before] + lines))
            )
            before = []
        elif described:
            last = described[-1]
            sends = "\n".join([last.sends] + ["then " + line for line in lines]).strip()
            described[-1] = last._replace(sends=sends)
        else:
            before += lines
    return described


@dataclass(frozen=True)
class Panel:
    """One round under one layout."""

    title: str
    """Its round, if no panel above is of the same; the layout, if that has one round."""
    label: str
    """Label of the row of panels, if this is its first panel."""
    image: Float[np.ndarray, "height width 3"]
    tiles: Float[np.ndarray, " P"]
    """Number of tiles that each rank computes."""
    max_tiles: float
    """Largest number of tiles that any rank computes in any round."""
    text: list[str]
    """Lines below the panel, about what is sent."""
    heading: str
    """The layout, above the first of its panels if all layouts are one row."""


def panel_rows(name: str, size: int) -> list[list[Panel]]:
    """Returns the panels of a schedule's picture, row by row.

    The rounds under one layout are a row, or several if there are many. Those of all layouts are
    one row if there are few.

    Args:
        name: a key of CASES.
        size: number of ranks.
    """
    block = Block(batch=1, tokens=TILES * TOKENS, query_heads=size, kv_heads=size, head_dim=8)
    # Computes whole blocks by matrix products, the same under every layout.
    dense = name == "ring_self_attention"
    rows = []
    for layout in LAYOUTS[:1] if dense else LAYOUTS:
        rounds = with_sends(get_schedule(CASES[name], size, layout).plan(size, block).forward, size)
        tile_kinds = np.full_like(kinds(layout, size), MASKED) if dense else kinds(layout, size)
        tiles = np.array([work(item.round, tile_kinds, size) for item in rounds])
        label = (
            f"{'every layout' if dense else layout}\nbusiest / mean "
            f"{tiles.max(1).sum() / tiles.mean(1).sum():.2f}"
        )
        columns = -(-len(rounds) // -(-len(rounds) // MAX_COLUMNS))
        side_by_side = len(rounds) <= MAX_SIDE_BY_SIDE
        titles = [
            f"round {number}" if side_by_side or layout == LAYOUTS[0] else ""
            for number in range(len(rounds))
        ]
        if len(rounds) == 1:
            titles = [label]
        heading = label.replace("\n", ": ") if side_by_side and len(rounds) > 1 else ""
        panels = [
            Panel(
                titles[number],
                label if number % columns == 0 and not side_by_side else "",
                picture(item.round, tile_kinds),
                tiles[number],
                tiles.max(),
                item.sends.splitlines(),
                heading if number == 0 else "",
            )
            for number, item in enumerate(rounds)
        ]
        rows += [panels[start : start + columns] for start in range(0, len(panels), columns)]
    return [[panel for row in rows for panel in row]] if side_by_side else rows


def draw(name: str, size: int, path: pathlib.Path) -> None:
    """Draws a schedule's forward pass: rows of rounds for each layout, transfers below them.

    Args:
        name: a key of CASES.
        size: number of ranks.
        path: the file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = panel_rows(name, size)
    columns = max(map(len, rows))
    pitch = min((WIDTH - LABELS) / columns, SIDE + GAP)  # from a panel to the next
    rows = [
        [replace(panel, text=_wrapped(panel.text, int(pitch * PANEL_LETTERS))) for panel in row]
        for row in rows
    ]
    width = max(LABELS + columns * pitch, MIN_WIDTH)
    shared_heads = " Stripes: ranks share the heads." if name in SHARED_HEADS else ""
    caption = _wrapped([CAPTION + shared_heads], int(width * CAPTION_LETTERS))
    legend_rows = -(-len(_legend_handles(size)) // int(width / 1.15))
    title_heights = [
        TITLE
        * max(panel.title.count("\n") + bool(panel.title) + bool(panel.heading) for panel in row)
        for row in rows
    ]
    text_heights = [0.25 + TEXT_LINE * max(len(panel.text) for panel in row) for row in rows]
    above = 0.5 + 0.17 * len(caption)
    fixed = above + len(rows) * BARS + sum(title_heights) + sum(text_heights) + 0.23 * legend_rows
    side = min(pitch - GAP, (HEIGHT - fixed) / len(rows))  # of a panel
    height = fixed + len(rows) * side

    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(
        0.5,
        1 - 0.1 / height,
        f"{name.replace('_', ' ')} on {size} ranks, forward",
        fontsize=15,
        fontweight="bold",
        color=TEXT_COLOUR,
        ha="center",
        va="top",
    )
    figure.text(
        0.5,
        1 - 0.44 / height,
        "\n".join(caption),
        fontsize=9.5,
        color="#555555",
        ha="center",
        va="top",
    )
    y = height - above
    for row, title_height, text_height in zip(rows, title_heights, text_heights, strict=True):
        y -= title_height + side
        for column, panel in enumerate(row):
            x = (width + LABELS - columns * pitch) / 2 + column * pitch
            _draw_panel(
                panel,
                size,
                _axes(figure, x, y, side, side),
                _axes(figure, x, y - BARS, side, BARS - 0.2),
            )
        y -= BARS + text_height
    _draw_legend(figure, size, legend_rows)
    figure.savefig(path, dpi=100, metadata=PICTURE_METADATA, pil_kwargs={"optimize": True})


def _axes(figure: "Figure", x: float, y: float, width: float, height: float) -> "Axes":
    """Adds axes of this position and size, in inches."""
    figure_width, figure_height = figure.get_size_inches()
    return figure.add_axes(
        (x / figure_width, y / figure_height, width / figure_width, height / figure_height)
    )


def _legend_handles(size: int) -> list:
    from matplotlib.patches import Patch

    return [
        *(Patch(facecolor=tuple(COLOURS[rank]), label=f"rank {rank}") for rank in range(size)),
        Patch(facecolor=tuple(_paler(COLOURS[0])), label="paler: with a mask"),
        Patch(facecolor=tuple(SKIPPED), label="skipped"),
        Patch(facecolor=tuple(IDLE), edgecolor="#cccccc", label="not now"),
    ]


def _draw_legend(figure: "Figure", size: int, rows: int) -> None:
    handles = _legend_handles(size)
    figure.legend(
        handles=handles,
        loc="lower center",
        ncols=-(-len(handles) // rows),
        fontsize=9.5,
        frameon=False,
        borderpad=0.3,
        columnspacing=1.5,
        handlelength=1.5,
    )


def _draw_panel(panel: Panel, size: int, matrix: "Axes", bars: "Axes") -> None:
    """Draws a round's tiles into `matrix`, and each rank's work into `bars`."""
    matrix.imshow(panel.image, interpolation="nearest")
    for edge in range(1, size):
        matrix.axhline(edge * TILES * CELL - 0.5, color="white", linewidth=1.2)
        matrix.axvline(edge * TILES * CELL - 0.5, color="white", linewidth=1.2)
    for spine in matrix.spines.values():
        spine.set(color="#bbbbbb", linewidth=0.6)
    matrix.set(xticks=[], yticks=[])
    matrix.set_title(panel.title, fontsize=9.5, color=TEXT_COLOUR, pad=4, loc="left")
    if panel.heading:
        matrix.annotate(
            panel.heading,
            (0, 1),
            (0, 17),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=9.5,
            color=TEXT_COLOUR,
        )
    matrix.set_ylabel(panel.label, fontsize=9.5, color=TEXT_COLOUR)
    busiest = panel.tiles.max()
    bars.bar(range(size), panel.tiles, width=0.8, color=COLOURS[:size])
    bars.axhline(busiest, color=TEXT_COLOUR, linewidth=0.8)
    bars.text(-0.6, busiest, f"{busiest:g} tiles", fontsize=8.5, color=TEXT_COLOUR, va="bottom")
    bars.set(xlim=(-0.6, size - 0.4), ylim=(0, panel.max_tiles), xticks=[], yticks=[])
    bars.set_frame_on(False)
    bars.set_xlabel("\n".join(panel.text), fontsize=8.5, color="#444444", labelpad=4)


def _wrapped(lines: list[str], letters: int) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, letters)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, which prints each file's name, and returns its exit status."""
    parser = entry.CommandParser(
        prog="python -m scripts.draw_schedule",
        description=__doc__.splitlines()[0],
        allow_abbrev=False,
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("docs/schedules"),
        help=(
            "folder for SCHEDULE_RANKS.png (default docs/schedules, the repository's own pictures)"
        ),
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[4],
        choices=[4, 8],
        help="numbers of ranks (default 4)",
    )
    parser.add_argument(
        "--schedules", nargs="+", default=list(CASES), choices=CASES, help="schedules (default all)"
    )
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    return entry.run(lambda: draw_all(args), args.output)


def draw_all(args: argparse.Namespace) -> None:
    """Draws each schedule on each number of ranks, and prints the files' names."""
    pictures = {
        f"{name}_{size}.png": (name, size) for name in args.schedules for size in args.ranks
    }
    folder = output_files(args.output, dict.fromkeys(pictures, PICTURE))
    for file, (name, size) in pictures.items():
        draw(name, size, folder / file)
        print(folder / file)


if __name__ == "__main__":
    sys.exit(main())
