"""The names that recipes and commands accept against what is implemented: lists in several modules
that must not drift apart."""

import re
import typing

import pytest

from model.attention import names
from model.attention.kernels import KERNELS
from model.attention.layout import LAYOUTS
from model.attention.names import MESH_AXES
from model.attention.schedules import SCHEDULES
from model.memory.policies import POLICIES, PREFETCH_POLICIES, QUERY_CHUNK_POLICIES
from model.sharding import RULES, TensorParallel
from planning import search as plan_search
from planning.costs.step import REMAT
from planning.plan import Job
from scripts import plan_options
from trainer.config import schema


def accepted(section, field):
    """The literals of a recipe's field, including those within a tuple."""
    kind = typing.get_type_hints(section)[field]
    while typing.get_origin(kind) is not typing.Literal:
        kind = typing.get_args(kind)[0]
    return typing.get_args(kind)


@pytest.mark.parametrize(
    ("section", "field", "implemented"),
    [
        (schema.MemoryConfig, "remat", POLICIES),
        (schema.AttentionConfig, "kernel", KERNELS),
        (schema.AttentionConfig, "layout", LAYOUTS),
        (schema.MeshConfig, "order", MESH_AXES),
    ],
)
def test_a_recipe_accepts_every_implemented_name(section, field, implemented):
    assert sorted(accepted(section, field)) == sorted(implemented)


def test_schedules_match_the_registry():
    assert tuple(SCHEDULES) == names.SCHEDULES
    assert set(plan_search.SCHEDULES) < set(SCHEDULES)
    for name, schedule in SCHEDULES.items():
        assert schedule.__module__ == f"model.attention.schedules.{name}", (
            "errors name a schedule's options by its module"
        )


def test_the_planner_accepts_every_policy_and_no_other(capsys):
    job = ["--model", "tiny", "--topology", "v4:2x2x1", "--context", "1024", "--remat"]
    assert [plan_options.parser().parse_args([*job, name]).remat for name in POLICIES] == list(
        POLICIES
    )
    with pytest.raises(SystemExit):
        plan_options.parser().parse_args([*job, "some"])
    listed = re.search(r"choose from (.*)\)", capsys.readouterr().err)[1]
    assert sorted(re.findall(r"\w+", listed)) == sorted(POLICIES)


def test_policies_named_elsewhere_are_policies():
    assert set(REMAT) == set(POLICIES)
    searched = plan_search.policies(
        Job.of("tiny", "v5e:2x2", 1024, mesh=schema.MeshConfig(sequence=4))
    )
    assert {job.run.memory.remat for job in searched} | {
        *QUERY_CHUNK_POLICIES,
        *PREFETCH_POLICIES,
    } <= set(POLICIES)


def test_tensor_parallel_decides_every_axis_split_over_tensor():
    parallel = TensorParallel(
        tensor=2,
        heads=True,
        kv_heads=False,
        mlp=True,
        vocab_size=128,
        query_heads=8,
        key_heads=2,
    )
    assert {axis: getattr(parallel, axis) for axis, rule in RULES.items() if rule.tensor} == {
        "heads": True,
        "kv_heads": False,
        "mlp": True,
        "vocab": True,
    }
