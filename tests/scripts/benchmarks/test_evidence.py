"""Stored plans can be recomputed: the commands that `make evidence` runs, and what it prints."""

import json

import pytest

from data.errors import UserError
from planning.machines import device_count
from planning.plan import _described, made_with
from scripts.benchmarks import evidence
from scripts.benchmarks.plan_store import kept, read_plans, write_plans
from scripts.plan_options import job_of, parser

PLANS = read_plans()


@pytest.mark.parametrize("name", PLANS)
def test_a_plans_command_recomputes_that_plan(name):
    """Without the compilers: devices are counted from the topology's name."""
    plan = PLANS[name]
    job = job_of(parser().parse_args(evidence.command_of(name, plan)))
    again = json.loads(json.dumps(_described(job, device_count(plan["topology"]))))
    mesh = {**again["mesh"], **plan["mesh"]}
    assert {**again, "mesh": mesh} == {
        **again,
        **{field: plan[field] for field in again if field in plan},
        "mesh": mesh,
    }
    assert all(again["mesh"][axis] == size for axis, size in plan["mesh"].items())


def test_changes_are_printed_to_two_decimals():
    before = {"peak_gib": 10.074, "host_gib": 0.0, "temporaries_gib": 3.0}
    assert evidence.moved(before, before | {"peak_gib": 10.0741}) == "nothing moved"
    assert evidence.moved(before, before | {"peak_gib": 9.94}) == "peak_gib 10.07 -> 9.94"


def test_only_times_are_estimated_again():
    name = "llama_7b_1m_v4"
    plan = PLANS[name] | {"estimated_step_seconds": 1.0}
    again = evidence.estimated_again(name, plan)
    assert 1.0 < again["estimated_step_seconds_low"] < again["estimated_step_seconds"]
    assert {
        field: value for field, value in again.items() if not field.startswith("estimated_")
    } == {field: value for field, value in plan.items() if not field.startswith("estimated_")}
    assert evidence.moved(plan, again, evidence.TIMES).startswith("estimated_step_seconds 1.00 -> ")


def test_stored_plans_are_read_back_without_defaults(tmp_path):
    plan = {
        "model": "tiny",
        "mesh": {"data": 1, "order": [], "dcn": {}, "sequence_parallel": False},
        "peak_gib": 1.23456789,
        "made_with": {"jax": "0.10.2", "flags": {}},
        "jax": "0.10.2",
        "compile_seconds": 3.0,
        "communication": {"all-gather": {"times": 3.0, "received_gib": 2.0, "hidden": 0.0}},
    }
    write_plans({"b": plan, "a": plan}, tmp_path / "plans.json")
    stored = {
        "model": "tiny",
        "mesh": {"data": 1},
        "peak_gib": 1.23457,
        "made_with": {"jax": "0.10.2"},
        "communication": {"all-gather": {"received_gib": 2.0, "hidden": 0.0}},
    }
    assert read_plans(tmp_path / "plans.json") == {"a": stored, "b": stored}
    assert len((tmp_path / "plans.json").read_text().splitlines()) == 4 and kept(stored) == stored


@pytest.mark.slow
def test_a_plan_is_recomputed_unless_it_does_not_fit():
    plan = {
        **next(iter(PLANS.values())),
        "topology": "v5e:2x2",
        "model": "tiny",
        "context": 1024,
        "batch": 1,
        "schedule": "ring",
        "mesh": {"sequence": 4},
        "remat": "nothing",
        "attention_groups": 1,
        "peak_gib": 5.0,
    }
    made = evidence.make("no recipe's", plan)
    assert "peak_gib 5.00 -> " in evidence.moved(plan, made)
    assert made["made_with"] == {**made_with("v5e:2x2"), "flags": {}} and {
        "jaxlib",
        "libtpu",
    } <= set(made["made_with"])
    with pytest.raises(UserError, match=r"^error: plan: data\.context_length: found 1023"):
        evidence.make("no recipe's", plan | {"context": 1023})
