"""The pictures of schedules draw every visible tile once, in the colour of the rank that
computes it."""

import numpy as np
import pytest
from matplotlib.image import imread

from model.attention import get_schedule
from model.attention.layout import LAYOUTS, permutation
from model.attention.schedules.plan import Block
from scripts import draw_schedule
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
from tests.pictures import overlaps


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
            ]  # rank 0's local block, below the diagonal
            assert (corner == COLOURS[0]).all()


@pytest.mark.parametrize(("name", "size"), [("usp", 4), ("balanced", 8)])
def test_a_picture_is_legible(name, size, tmp_path, saved_figures):
    """Many colours, no overlapping or clipped text, and it fits on a screen."""
    draw(name, size, tmp_path / "picture.png")
    image = (255 * imread(tmp_path / "picture.png")).astype(int)
    assert len(np.unique(image.reshape(-1, image.shape[-1]), axis=0)) > 8
    (figure,) = saved_figures
    assert figure.get_figwidth() <= 12.01 and figure.get_figheight() <= 9.01
    assert overlaps(figure) == []


def test_asking_for_help_draws_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        draw_schedule.main(["--help"])
    assert stopped.value.code == 0 and "docs/schedules" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
