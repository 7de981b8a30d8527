"""The pictures in docs/: each fits a screen and is shown by a page, and no legend or title lies over another part."""

import re
import struct
from pathlib import Path

import pytest

from scripts.benchmarks.table3_cells import MEMORIES, Cell, read_cells
from scripts.benchmarks.table3_picture import draw
from tests.pictures import overlaps

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PICTURES = sorted(DOCS.rglob("*.png"))
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SCREEN = (1440, 960)


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_a_picture_fits_a_screen(path):
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert width <= SCREEN[0] and height <= SCREEN[1]


def test_every_picture_is_shown_by_a_page():
    shown = {
        (page.parent / link).resolve()
        for page in PAGES
        for link in re.findall(r"\]\(([^)\s]+\.png)\)", page.read_text())
    }
    assert [path.name for path in PICTURES if path not in shown] == []


def test_nothing_lies_over_another_part_of_table3(saved_figures, tmp_path):
    cells = [
        cell for cell in read_cells() if cell["memory"] in MEMORIES
    ]  # those like for like are in the text alone
    assert len(cells) == 152
    draw(
        {
            Cell(*(cell[name] for name in ("topology", "model", "column", "memory"))): cell[
                "longest"
            ]
            for cell in cells
        },
        tmp_path / "table3.png",
    )
    assert [overlaps(figure) for figure in saved_figures] == [[]]
