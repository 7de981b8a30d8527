"""The pictures in docs/: each fits a screen and is shown by a page."""

import re
import struct
from pathlib import Path

import pytest

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
