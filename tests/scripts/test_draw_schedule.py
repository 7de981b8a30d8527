"""The pictures of schedules show every visible tile once, in the colour of the rank that computes
it."""

from itertools import combinations, groupby

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from model.attention import get_schedule
from model.attention.layout import LAYOUTS, permutation
from model.attention.schedules.plan import Block
from scripts import draw_layout
from scripts.draw_schedule import (
    CASES,
    CELL,
    COLOURS,
    TILES,
    TOKENS,
    draw,
    kinds,
    picture,
    with_sends,
    work,
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_visible_tile_is_drawn_once(layout):
    size = 4
    order = permutation(size * TILES * TOKENS, size, layout).reshape(-1, TOKENS)
    visible = order.max(1)[:, None] >= order.min(1)[None]
    block = Block(1, TILES * TOKENS, size, size, 8)
    for name, schedule in CASES.items():
        if name == "ring_self_attention":  # it computes whole blocks
            continue
        rounds = [
            item.round
            for item in with_sends(
                get_schedule(schedule, size, layout).plan(size, block).forward, size
            )
        ]
        assert (
            sum(work(round_, kinds(layout, size), size).sum() for round_ in rounds) == visible.sum()
        ), name
        if len(rounds) == 1 and name == "attention2d":
            corner = picture(rounds[0], kinds(layout, size))[
                TILES * CELL // 2, 0
            ]  # rank 0's own block, below the diagonal
            assert (corner == COLOURS[0]).all()


@pytest.mark.parametrize(("name", "size"), [("usp", 4), ("balanced", 8)])
def test_a_picture_can_be_read(name, size, tmp_path, monkeypatch):
    """Many colours; no overlapping or cut text; no empty strip of half an inch."""
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, *args, **how: drawn.append(figure) or save(figure, *args, **how),
    )
    draw(name, size, tmp_path / "picture.png")
    image = (255 * imread(tmp_path / "picture.png")).astype(int)
    figure = drawn[0]
    dpi = image.shape[1] / figure.get_figwidth()
    assert len(np.unique(image.reshape(-1, image.shape[-1]), axis=0)) > 8
    empty = [len(list(rows)) for blank, rows in groupby((image == 255).all((1, 2))) if blank]
    assert max(empty) < dpi / 2
    assert figure.get_figwidth() <= 12.01 and figure.get_figheight() <= 9.01
    figure.set_dpi(dpi)
    boxes = {
        text: text.get_window_extent()
        for text in figure.findobj(Text)
        if text.get_text() and text.get_visible()
    }
    assert len(boxes) > 12
    for text, box in boxes.items():
        assert 0 <= box.x0 < box.x1 <= image.shape[1] and 0 <= box.y0 < box.y1 <= image.shape[0], (
            text
        )
    for (text, box), (other_text, other_box) in combinations(boxes.items(), 2):
        assert not box.overlaps(other_box), (text, other_text)


def test_asking_for_help_draws_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        draw_layout.main(["--help"])
    assert (
        left.value.code == 0
        and "docs/striped_layout.png" in capsys.readouterr().out
        and not list(tmp_path.iterdir())
    )
    assert draw_layout.main(["--output", "new/layout.png"]) == 0
    assert (tmp_path / "new/layout.png").read_bytes().startswith(b"\x89PNG") and not (
        tmp_path / "docs"
    ).exists()
