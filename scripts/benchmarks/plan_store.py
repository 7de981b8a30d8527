"""The plans behind pages, results and calibration: docs/plans/plans.json, one per line.

A recipe's plan is named by the recipe's path below configs/; other names give model, context and
machine. Only the fields in use are stored: the planned job, the compiler's versions and flags,
memory by component, bytes by kind of transfer and the share hidden by compute, and estimated times.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planning.memory_options import MEMORY_OPTIONS
from scripts.benchmarks.commands import read_json
from scripts.benchmarks.results import ROOT, write_whole

FILE = ROOT / "docs" / "plans" / "plans.json"
KEPT = (
    "model",
    "topology",
    "context",
    "batch",
    "mesh",
    "schedule",
    *MEMORY_OPTIONS,
    "peak_gib",
    "temporaries_gib",
    "host_gib",
    "device_gib",
    "left_gib",
    "communication",
    "estimated_step_seconds",
    "estimated_step_seconds_low",
    "estimated_step_seconds_high",
    "made_with",
    "jax",
)
DIGITS = 6  # significant


def read_plans(file: Path = FILE) -> dict[str, dict[str, Any]]:
    """Returns the stored plans by name, in alphabetical order."""
    return read_json(file)


def write_plans(plans: dict[str, dict[str, Any]], file: Path = FILE) -> None:
    """Stores the kept fields of plans, one plan per line."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(kept(plan))}" for name, plan in sorted(plans.items())
    ]
    write_whole(file, "{\n" + ",\n".join(lines) + "\n}\n")


def kept(plan: dict[str, Any]) -> dict[str, Any]:
    """Returns a plan's KEPT fields that are set, rounded to DIGITS digits."""
    fields = {name: _rounded(plan[name]) for name in KEPT if name in plan}
    if "made_with" in fields:
        fields.pop("jax", None)  # the versions include it
    return fields


def _rounded(value: Any) -> Any:
    """Returns a value without empty or false parts and without the unused `times`."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {
            name: _rounded(inner)
            for name, inner in value.items()
            if not (name == "times" or inner is False or inner in ([], {}))
        }
    return value
