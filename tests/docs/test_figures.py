"""Figures of plans on the pages match the plans."""

import re

import pytest

from scripts.benchmarks.plan_store import read_plans
from tests.docs.test_pages import PAGES, page_id, text_of

PLANS = read_plans()


def wrong_figures(text: str) -> list[str]:
    """Returns the plans whose paragraph or table row has figures in GiB, but not the plan's own."""
    wrong = []
    for part in re.split(r"\n\s*\n|\n(?=\|)", text):
        named = [name for name in re.findall(r"`(\w+)`", part) if name in PLANS]
        figures = {float(figure) for figure in re.findall(r"\b\d+\.\d+\b", part)}
        for name in named:
            peak = PLANS[name]["peak_gib"]
            if figures and not figures & {round(peak, 1), round(peak, 2)}:
                wrong.append(f"{name}: {peak:.1f} GiB, found {sorted(figures)}")
    return wrong


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_a_paragraph_that_names_a_plan_gives_its_memory(path):
    assert wrong_figures(text_of(path)) == []


def test_a_wrong_figure_is_found():
    name = "llama_3_1_8b_8m_h100_8"
    peak = PLANS[name]["peak_gib"]
    assert wrong_figures(f"takes {peak:.1f} GiB (`{name}`)") == []
    assert len(wrong_figures(f"takes {peak + 1:.1f} GiB (`{name}`)\n\n{peak:.1f} elsewhere")) == 1
    assert len(wrong_figures(f"| `{name}` | {peak - 0.2:.1f} |\n| other | {peak:.1f} |")) == 1
