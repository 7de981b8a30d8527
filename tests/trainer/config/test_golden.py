"""The resolved configurations of three recipes against golden files, so that a changed default
shows in review; every recipe resolves.

To accept a change: python -m tests.trainer.config.test_golden rewrites the files.
"""

import pathlib

import pytest
import yaml

from model.config import POSITIONS
from scripts.benchmarks.plan_store import read_plans
from trainer.config.load import dump, load, resolved

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
GOLDEN = pathlib.Path(__file__).parent / "golden"
RECIPES = {
    path.relative_to(REPOSITORY / "configs").with_suffix("").as_posix(): path
    for path in sorted((REPOSITORY / "configs").rglob("*.yaml"))
}
# From scratch, on a large machine, with adapters: together these three show any changed default.
SHOWN = ("quickstart", "llama31_8b_1m_h100", "adapters/llama31_70b_qlora_128k_h100")
PLANS = {name: plan for name, plan in read_plans().items() if name in RECIPES}


def resolved_recipe(recipe: pathlib.Path) -> str:
    """The recipe's resolved configuration as YAML; values that it leaves to the command line get a
    placeholder."""
    fields = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    own = {"path", "preset"} & fields["model"].keys() or fields["model"].get(
        "overrides", {}
    ).keys() - set(POSITIONS)
    flags = [] if own else ["--model.path", "HF_DIR"]
    has_data = (
        "trajectories" in fields or fields["data"].get("sources") or fields["data"].get("path")
    )
    flags += [] if has_data else ["--data.path", "FILE.json"]
    return dump(load(["--config", str(recipe), *flags]))


@pytest.mark.parametrize("name", SHOWN)
def test_resolved_recipes_match_the_golden_files(name):
    golden = GOLDEN / RECIPES[name].name
    assert resolved_recipe(RECIPES[name]) == golden.read_text(encoding="utf-8"), (
        "intended? then python -m tests.trainer.config.test_golden"
    )


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_resolves(name):
    assert yaml.safe_load(resolved_recipe(RECIPES[name]))["name"]


@pytest.mark.parametrize("name", PLANS)
def test_a_recipes_stored_plan_matches_the_recipe(name):
    """The plan was made for the recipe's current context, mesh and memory options, and it fits."""
    config = load(["--config", str(RECIPES[name]), "--model.path", "x", "--data.path", "x"])
    plan = PLANS[name]
    assert (
        plan["context"] == config.data.context_length and plan["batch"] == config.train.batch_size
    )
    mesh = resolved(config)["mesh"]
    assert {axis: size for axis, size in mesh.items() if axis in plan["mesh"]} == plan["mesh"]
    unnamed = {axis: size for axis, size in mesh.items() if axis not in plan["mesh"]}
    assert unnamed.pop("expert", 1) == 1  # plans older than the axis do not name it
    assert not any(unnamed.values())
    assert (plan["remat"], plan["schedule"]) == (config.memory.remat, config.attention.schedule)
    assert plan["left_gib"] > 0


if __name__ == "__main__":
    for name in SHOWN:
        (GOLDEN / RECIPES[name].name).write_text(resolved_recipe(RECIPES[name]), encoding="utf-8")
