"""Every picture in docs/ is shown by a page."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PICTURES = sorted(DOCS.rglob("*.png"))
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def test_every_picture_is_shown_by_a_page():
    shown = {
        (page.parent / link).resolve()
        for page in PAGES
        for link in re.findall(r"\]\(([^)\s]+\.png)\)", page.read_text())
    }
    assert [path.name for path in PICTURES if path not in shown] == []
