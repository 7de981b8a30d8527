"""Every recipe's resolved configuration against a golden file, so that a changed default shows in review.

Where a change is meant: python -m tests.trainer.config.test_golden writes the files anew.
"""
import json
import pathlib

import pytest
import yaml

from model.config import POSITIONS
from trainer.config.load import dump, load, resolved

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
RECIPES = sorted((REPOSITORY / "configs").rglob("*.yaml"))
# Plans of whole recipes; other folders hold searches.
EVIDENCE = [path for recipe in RECIPES if (path := REPOSITORY / "docs/plans" / recipe.stem / "plan.json").exists()]
GOLDEN = pathlib.Path(__file__).parent / "golden"


def resolved_recipe(recipe: pathlib.Path) -> str:
    """The recipe's resolved configuration as YAML; what it leaves to the command line gets a placeholder."""
    given = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    own = {"path", "preset"} & given["model"].keys() or given["model"].get("overrides", {}).keys() - set(POSITIONS)
    flags = [] if own else ["--model.path", "HF_DIR"]
    has_data = "trajectories" in given or given["data"].get("sources") or given["data"].get("path")
    flags += [] if has_data else ["--data.path", "FILE.json"]
    return dump(load(["--config", str(recipe), *flags]))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_resolved_recipes_are_the_golden_ones(recipe):
    golden = GOLDEN / recipe.name
    assert golden.exists(), f"{golden} is missing: python -m tests.trainer.config.test_golden writes it"
    assert resolved_recipe(recipe) == golden.read_text(encoding="utf-8"), (
        "intended? then python -m tests.trainer.config.test_golden")


def test_no_golden_file_is_left_over():
    assert {path.name for path in GOLDEN.iterdir()} == {recipe.name for recipe in RECIPES}


@pytest.mark.parametrize("evidence", EVIDENCE, ids=lambda evidence: evidence.parent.name)
def test_a_recipes_plan_is_that_of_the_recipe(evidence):
    """Its JSON was made for the context, the mesh and the memory that the recipe has today, and fits."""
    recipe = REPOSITORY / "configs" / f"{evidence.parent.name}.yaml"
    config = load(["--config", str(recipe), "--model.path", "x", "--data.path", "x"])
    plan = json.loads(evidence.read_text(encoding="utf-8"))
    assert plan["context"] == config.data.context_length and plan["batch"] == config.train.batch_size
    assert plan["mesh"] == resolved(config)["mesh"]
    assert (plan["remat"], plan["schedule"]) == (config.memory.remat, config.attention.schedule)
    assert plan["left_gib"] > 0


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for recipe in RECIPES:
        (GOLDEN / recipe.name).write_text(resolved_recipe(recipe), encoding="utf-8")
