"""Every recipe's resolved configuration against a golden file, so that a changed default shows in review.

Where a change is meant: python -m tests.trainer.test_golden writes the files anew.
"""
import pathlib

import pytest
import yaml

from trainer.config import dump, load

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
RECIPES = sorted((REPOSITORY / "configs").glob("*.yaml"))
GOLDEN = pathlib.Path(__file__).parent / "golden"


def resolved_recipe(recipe: pathlib.Path) -> str:
    """The recipe's resolved configuration as YAML; what it leaves to the command line gets a placeholder."""
    given = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    flags = [] if {"path", "preset", "overrides"} & given["model"].keys() else ["--model.path", "HF_DIR"]
    flags += [] if given["data"].get("sources") or given["data"].get("path") else ["--data.path", "FILE.json"]
    return dump(load(["--config", str(recipe), *flags]))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_resolved_recipes_are_the_golden_ones(recipe):
    golden = GOLDEN / recipe.name
    assert golden.exists(), f"{golden} is missing: python -m tests.trainer.test_golden writes it"
    assert resolved_recipe(recipe) == golden.read_text(encoding="utf-8"), "meant? then python -m tests.trainer.test_golden"


def test_no_golden_file_is_left_over():
    assert {path.name for path in GOLDEN.iterdir()} == {recipe.name for recipe in RECIPES}


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for recipe in RECIPES:
        (GOLDEN / recipe.name).write_text(resolved_recipe(recipe), encoding="utf-8")
