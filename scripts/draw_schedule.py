"""Draws schedules from their plans: each round's tiles by rank, the balance, and the transfers.

python -m scripts.draw_schedule [--output docs/schedules] [--ranks 4] [--schedules ring ...]
"""

import pathlib
import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from data.outputs import PICTURE, PICTURE_METADATA, output_files
from model.attention import get_schedule
from model.attention.coords import MASKED, SKIP, Mask, TokenCoords, tile_bounds, tile_kind
from model.attention.layout import LAYOUTS, permutation
from model.attention.schedules.plan import Block, Round, Send, Task
from trainer.options import command, option

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
TILES, TOKENS = 4, 4  # tiles on a side of a block, tokens on a side of a tile
CELL = 8  # pixels on a side of a tile; ranks that share its heads have a stripe each
# Paul Tol's muted scheme, suitable for all kinds of colour vision.
PALETTE = "332288 88ccee 117733 ddcc77 cc6677 44aa99 882255 999933"
COLOURS = np.array([list(bytes.fromhex(colour)) for colour in PALETTE.split()]) / 255
# Colours of tiles that are skipped, or not in this round.
SKIPPED, IDLE = np.array([0.86] * 3), np.array([0.975] * 3)
WIDTH, HEIGHT = 12.0, 9.0  # inches: pictures up to this size fit on a screen
PITCH = 2.2  # largest distance in inches from one panel to the next
LETTERS = 15  # characters per inch below a panel
MAX_COLUMNS = 8  # most rounds side by side


def kinds(layout: str, size: int) -> Int[np.ndarray, "query_tiles key_tiles"]:
    """Returns SKIP, FULL or MASKED for every tile in the layout's order, as the kernels decide.

    Args:
        layout: name of the layout.
        size: number of ranks.
    """
    order = permutation(size * TILES * TOKENS, size, layout)
    bounds = tile_bounds(
        TokenCoords(jnp.asarray(order[None]), jnp.ones((1, len(order)), jnp.int32)), TOKENS
    )
    queries = jax.tree.map(lambda x: x[0][:, None], bounds)
    keys = jax.tree.map(lambda x: x[0][None], bounds)
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
    """Returns an image of a round's tiles, coloured by rank, paler if masked."""
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
    """Returns a description of a transfer: what is sent, and from which ranks to which."""
    steps = {(target - source) % size for source, target in send.pairs}
    sources = sorted({source for source, _ in send.pairs})
    if send.kind == "collective-permute" and len(steps) == 1:
        (distance,) = steps
        step = f"+{distance}" if distance <= size // 2 else f"−{size - distance}"
        senders = "all" if len(sources) == size else ",".join(map(str, sources))
        return f"{send.arrays}: {senders} → {step}"
    # Rings of neighbours, whose longest step leads back to the first rank.
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
    sends: list[str]
    """The transfers before, during and after the round."""


def with_sends(rounds: tuple[Round, ...], size: int) -> list[DescribedRound]:
    """Returns the rounds that compute tiles, with the transfers of the rounds that do not."""
    described: list[DescribedRound] = []
    before: list[str] = []
    for round_ in rounds:
        sends = [send for send in round_.sends if send.pairs and "coordinates" not in send.arrays]
        lines = [describe(send, size) for send in sends]
        if round_.tasks:
            first = [f"first {line}" for line in before]
            described.append(DescribedRound(round_, first + lines))
            before = []
        elif described:
            described[-1].sends.extend(f"then {line}" for line in lines)
        else:
            before += lines
    return described


@dataclass(frozen=True)
class Panel:
    """One round under one layout."""

    number: int
    label: str
    """The layout and its balance, shown to the left of its first panel."""
    image: Float[np.ndarray, "height width 3"]
    tiles: Float[np.ndarray, " P"]
    """Number of tiles that each rank computes."""
    max_tiles: float
    """Largest number of tiles that any rank computes in any round."""
    sends: list[str]


def panel_rows(name: str, size: int) -> list[list[Panel]]:
    """Returns the panels of a schedule's picture: one or more rows per layout.

    Args:
        name: a key of CASES.
        size: number of ranks.
    """
    block = Block(batch=1, tokens=TILES * TOKENS, query_heads=size, kv_heads=size, head_dim=8)
    # This schedule computes full blocks with matrix products, the same for every layout.
    dense = name == "ring_self_attention"
    rows = []
    for layout in LAYOUTS[:1] if dense else LAYOUTS:
        rounds = with_sends(get_schedule(CASES[name], size, layout).plan(size, block).forward, size)
        tile_kinds = np.full_like(kinds(layout, size), MASKED) if dense else kinds(layout, size)
        tiles = np.array([work(item.round, tile_kinds, size) for item in rounds])
        balance = f"busiest / mean {tiles.max(1).sum() / tiles.mean(1).sum():.2f}"
        label = f"{'every layout' if dense else layout}\n{balance}"
        panels = [
            Panel(
                number,
                "" if number else label,
                picture(item.round, tile_kinds),
                tiles[number],
                tiles.max(),
                item.sends,
            )
            for number, item in enumerate(rounds)
        ]
        rows += [
            panels[start : start + MAX_COLUMNS] for start in range(0, len(rounds), MAX_COLUMNS)
        ]
    return rows


def draw(name: str, size: int, path: pathlib.Path) -> None:
    """Draws a schedule's forward pass: rows of rounds per layout, with transfers below them.

    Args:
        name: a key of CASES.
        size: number of ranks.
        path: the file.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = panel_rows(name, size)
    columns = max(map(len, rows))
    width = min(WIDTH, max(8.0, 1 + columns * PITCH))
    letters = int((width - 1) / columns * LETTERS)
    lines = sum(1 + max(len(_wrapped(panel.sends, letters)) for panel in row) for row in rows)
    height = min(HEIGHT, 1.4 + len(rows) * ((width - 1) / columns + 0.5) + 0.15 * lines)
    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    figure.suptitle(
        f"{name.replace('_', ' ')} on {size} ranks, forward", fontsize=15, fontweight="bold"
    )
    grid = figure.add_gridspec(2 * len(rows), columns, height_ratios=[4, 1] * len(rows))
    for line, row in enumerate(rows):
        for column, panel in enumerate(row):
            matrix = figure.add_subplot(grid[2 * line, column])
            _draw_panel(
                panel, size, letters, matrix, figure.add_subplot(grid[2 * line + 1, column])
            )
    handles = [
        *(Patch(facecolor=tuple(COLOURS[rank]), label=f"rank {rank}") for rank in range(size)),
        Patch(facecolor=tuple(_paler(COLOURS[0])), label="paler: with a mask"),
        Patch(facecolor=tuple(SKIPPED), label="skipped"),
        Patch(facecolor=tuple(IDLE), edgecolor="#cccccc", label="not now"),
    ]
    count = -(-len(handles) // -(-len(handles) // int(width / 1.2)))
    figure.legend(handles=handles, loc="outside lower center", ncols=count, frameon=False)
    figure.savefig(path, dpi=100, metadata=PICTURE_METADATA, pil_kwargs={"optimize": True})


def _draw_panel(panel: Panel, size: int, letters: int, matrix: "Axes", bars: "Axes") -> None:
    """Draws a round's tiles into `matrix`, and each rank's work into `bars`."""
    matrix.imshow(panel.image, interpolation="nearest")
    for edge in range(1, size):
        matrix.axhline(edge * TILES * CELL - 0.5, color="white", linewidth=1.2)
        matrix.axvline(edge * TILES * CELL - 0.5, color="white", linewidth=1.2)
    for spine in matrix.spines.values():
        spine.set(color="#bbbbbb", linewidth=0.6)
    matrix.set(xticks=[], yticks=[])
    matrix.set_title(f"round {panel.number}", fontsize=9.5, pad=4, loc="left")
    matrix.set_ylabel(panel.label, fontsize=9.5)
    busiest = panel.tiles.max()
    bars.bar(range(size), panel.tiles, width=0.8, color=COLOURS[:size])
    bars.axhline(busiest, color="#2b2b2b", linewidth=0.8)
    bars.text(-0.6, busiest, f"{busiest:g} tiles", fontsize=8.5, va="bottom")
    bars.set(xlim=(-0.6, size - 0.4), ylim=(0, 1.3 * panel.max_tiles), xticks=[], yticks=[])
    bars.set_frame_on(False)
    bars.set_box_aspect(0.22)
    bars.set_xlabel("\n".join(_wrapped(panel.sends, letters)), fontsize=8.5, color="#444444")


def _wrapped(lines: list[str], letters: int) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, letters)]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    output: pathlib.Path = option("folder for SCHEDULE_RANKS.png", pathlib.Path("docs/schedules"))
    ranks: tuple[int, ...] = option("numbers of ranks", (4,), choices=(4, 8))
    schedules: tuple[str, ...] = option("schedules", tuple(CASES), choices=CASES)


def draw_all(args: Options) -> None:
    """Draws each schedule on each number of ranks, and prints the files' names."""
    jax.config.update("jax_platforms", "cpu")
    pictures = {
        f"{name}_{size}.png": (name, size) for name in args.schedules for size in args.ranks
    }
    folder = output_files(args.output, dict.fromkeys(pictures, PICTURE))
    for file, (name, size) in pictures.items():
        draw(name, size, folder / file)
        print(folder / file)


main = command(Options, draw_all)


if __name__ == "__main__":
    sys.exit(main())
