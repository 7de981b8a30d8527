"""Results of stored plans: the comment at the top of every recipe gives its plan's figures."""

import re

import pytest

from scripts.benchmarks.plan_store import read_plans
from scripts.benchmarks.results import ROOT
from scripts.benchmarks.stored_plans import (
    CONTEXTS,
    MEMORY_1M,
    memory_text,
    policy,
    recipe_plans,
    seconds_text,
    two_digits,
)

STORED = read_plans()
PLANS = recipe_plans(STORED)


@pytest.mark.parametrize("recipe", PLANS)
def test_a_recipes_header_gives_the_figures_of_its_plan(recipe):
    head = (ROOT / "configs" / f"{recipe}.yaml").read_text(encoding="utf-8").split("\n\n")[0]
    plan = PLANS[recipe]
    assert f"; {seconds_text(plan)} s per step, by the estimate" in head
    assert f"; {memory_text(plan)} GiB per " in head


def test_a_policy_names_only_non_default_options():
    plan = {"remat": "nothing", "query_chunks": 1, "prefetch": False}
    assert policy(plan) == "nothing"
    assert policy(
        {**plan, "remat": "every_k", "every_k": 4, "query_chunks": 8, "prefetch": True}
    ) == ("every_k 4, 8 query chunks, prefetch")


def test_every_plan_of_a_result_exists_with_its_command():
    for name in (*(name for name, *_ in CONTEXTS.values()), *MEMORY_1M.values()):
        assert {"python", "jax", "jaxlib"} < set(STORED[name]["made_with"]), name


def test_two_significant_digits():
    assert [two_digits(number) for number in (0.01234, 1.0, 98.7, 1234.0)] == [
        "0.012",
        "1",
        "99",
        "1,200",
    ]


def test_the_memory_page_gives_the_figures_of_its_plans():
    page = (ROOT / "docs" / "meshes_and_memory.md").read_text(encoding="utf-8")
    rows = re.findall(r"`([\w/]+)` \|.*\| ([\d.]+ of [\d.]+) \|", page)
    named = {name: figures for name, figures in rows if name in STORED}
    assert len(named) >= 9
    for name, figures in named.items():
        assert figures == memory_text(STORED[name]), name
