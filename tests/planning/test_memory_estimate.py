"""The memory estimate beside the plans that real compilers made: none lies outside the range that is printed."""
import dataclasses
import json
from pathlib import Path

import pytest

from planning.machines import device_count
from planning.memory_estimate import HIGH, HIGH_KEPT_ON_TPU, LOW, LOW_OF_ADAPTERS, estimate_memory
from planning.memory_options import MEMORY_OPTIONS
from planning.plan import Job
from scripts.benchmarks.evidence import command_of
from scripts.benchmarks.table3_cells import MEMORIES
from scripts.plan_options import job_of as asked
from scripts.plan_options import parser
from trainer.config.schema import MeshConfig

PLANS = Path(__file__).resolve().parents[2] / "docs" / "plans"
ADAPTERS = PLANS / "adapters"


def plans(value):
    """Yields the plans in a JSON value; of Table 3 those of our ring, since the other columns switch our chunks off."""
    if isinstance(value, dict):
        if "peak_gib" in value and "remat" in value:
            yield value
        elif value.get("column", "ring") == "ring":
            yield from plans(list(value.values()))
    elif isinstance(value, list):
        for part in value:
            yield from plans(part)


def stored():
    """The plans without adapters, whose own fields are their jobs."""
    files = [path for path in sorted(PLANS.rglob("*.json")) if path.name != "table3.json" and ADAPTERS not in path.parents]
    tables = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    cells = json.loads((PLANS / "table3.json").read_text(encoding="utf-8"))["cells"]
    # Those like for like are in float32, which a plan does not say.
    return list(plans([*tables, *(cell for cell in cells if cell["memory"] in MEMORIES)]))


def job_of(plan) -> Job:
    axes = {axis: plan["mesh"][axis] for axis in ("data", "fsdp", "tensor", "sequence")}
    memory = {name: plan[name] for name in MEMORY_OPTIONS if plan.get(name) is not None}
    grouped = memory.get("attention_groups") == 0
    if grouped:
        del memory["attention_groups"]
    job = Job.of(plan["model"], plan["topology"], plan["context"], batch=plan["batch"], mesh=MeshConfig(**axes), memory=memory)
    return dataclasses.replace(job, group_per_key_head=grouped)


def test_every_compiled_plan_lies_in_its_range():
    compared = [plan for plan in stored() if plan["remat"] != "everything"]
    estimates = [estimate_memory(job_of(plan)) for plan in compared]
    for high in (HIGH, HIGH_KEPT_ON_TPU):
        ratios = [plan["peak_gib"] / estimate.total for plan, estimate in zip(compared, estimates, strict=True)
                  if estimate.high_share == high]
        assert len(ratios) > (70 if high == HIGH else 0)
        assert min(ratios) >= LOW and max(ratios) <= high
        assert max(ratios) > high - 0.05, "the range is wider than the plans need"
        assert min(ratios) < LOW + 0.05 or high != HIGH, "the range is wider than the plans need"
    assert all(job_of(plan).run.mesh.devices == device_count(plan["topology"]) for plan in compared)


def test_every_compiled_plan_of_adapters_lies_in_its_range():
    """Their jobs are the recipes', since a plan does not say what an adapter is."""
    ratios = []
    for path in ADAPTERS.rglob("plan.json"):
        plan = json.loads(path.read_text(encoding="utf-8"))
        estimate = estimate_memory(asked(parser().parse_args(command_of(path, plan))))
        assert estimate.low_share == LOW_OF_ADAPTERS
        ratios.append(plan["peak_gib"] / estimate.total)
    assert len(ratios) > 5 and min(ratios) >= LOW_OF_ADAPTERS and max(ratios) <= HIGH
    assert min(ratios) < LOW_OF_ADAPTERS + 0.05, "the range is wider than the plans need"


def test_what_keeps_everything_takes_no_more_than_estimated():
    """The compilers share what this policy keeps with what the step works with, so that its estimates are too high."""
    ratios = [plan["peak_gib"] / estimate_memory(job_of(plan)).total for plan in stored() if plan["remat"] == "everything"]
    assert ratios and max(ratios) <= HIGH


@pytest.mark.parametrize(("gib", "fits"), [(1000.0, "yes"), (31.0, "perhaps"), (10.0, "no"), (None, "yes")])
def test_fits(gib, fits):
    job = dataclasses.replace(Job.of("llama-3.1-8b", "h100:8", 131072), own_device_gib=gib)
    assert estimate_memory(job).fits == fits


def test_a_host_that_is_too_small_does_not_fit():
    job = Job.of("llama-3.1-8b", "h100:8", 131072, memory={"remat": "offload"})
    needed = estimate_memory(job).on_host
    assert needed == 32 * 131072 / 8 * 4096 * 2 / 2**30
    for host_gib, fits in ((needed, "yes"), (0.99 * needed, "no")):
        assert estimate_memory(dataclasses.replace(job, host_gib=host_gib)).fits == fits
