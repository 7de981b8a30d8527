"""Stored plans can be asked for again: the commands that `make evidence` runs, and what it prints."""
import json

import pytest

from planning.plan import _described, made_with
from scripts.benchmarks import evidence
from scripts.plan_options import job_of, parser

PLANS = evidence.stored_plans([])


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.relative_to(evidence.FOLDER).as_posix())
def test_a_plans_command_asks_for_that_plan(path):
    """Without the compilers: devices are counted from the topology's name."""
    plan = PLANS[path]
    job = job_of(parser().parse_args(evidence.command_of(path, plan)))
    again = json.loads(json.dumps(_described(job, plan["devices"])))
    mesh = {**again["mesh"], **plan["mesh"]}
    assert {**again, "mesh": mesh} == {**again, **{name: plan[name] for name in again if name in plan}, "mesh": mesh}
    assert all(again["mesh"][axis] == size for axis, size in plan["mesh"].items())


def test_what_moved_is_printed_to_two_decimals():
    before = {"peak_gib": 10.074, "host_gib": 0.0, "temporaries_gib": 3.0}
    assert evidence.moved(before, before | {"peak_gib": 10.0741}) == "nothing moved"
    assert evidence.moved(before, before | {"peak_gib": 9.94}) == "peak_gib 10.07 -> 9.94"


def test_times_are_estimated_anew_and_nothing_else_changes(tmp_path):
    name = "llama_7b_1m_v4.json"
    plan = evidence.read_json(evidence.FOLDER / name)
    path = tmp_path / name
    path.write_text(json.dumps(plan | {"estimated_step_seconds": 1.0, "estimated_mfu": 2.0}))
    assert evidence.estimate_again(path, json.loads(path.read_text())).startswith("estimated_step_seconds 1 -> ")
    again = json.loads(path.read_text())
    assert 1.0 < again["estimated_step_seconds_low"] < again["estimated_step_seconds"] and 0 < again["estimated_mfu"] < 1
    assert {field: value for field, value in again.items() if not field.startswith("estimated_")} == {
        field: value for field, value in plan.items() if not field.startswith("estimated_")}
    assert evidence.estimate_again(path, again) == "nothing moved"


@pytest.mark.slow
def test_a_plan_is_made_again_in_place_and_one_that_does_not_fit_stays(tmp_path, monkeypatch):
    plan = {**PLANS[next(iter(PLANS))], "topology": "v5e:2x2", "model": "tiny", "context": 1024, "batch": 1, "schedule": "ring",
            "mesh": {"sequence": 4}, "remat": "nothing", "attention_groups": 1, "peak_gib": 5.0}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    assert "peak_gib 5.00 -> " in evidence.make(path, plan)
    made = json.loads(path.read_text())
    assert made["made_with"] == {**made_with("v5e:2x2"), "flags": {}} and {"jaxlib", "libtpu"} <= set(made["made_with"])
    assert evidence.make(path, plan | {"context": 1023}).startswith("NOT MADE: error: plan: data.context_length: found 1023")
    assert json.loads(path.read_text()) == made
