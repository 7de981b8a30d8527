"""Remakes the plans of docs/plans/plans.json with the installed compilers, and prints changes.

    make evidence, or
    python -m scripts.benchmarks.evidence            # plans that other versions or flags made
    python -m scripts.benchmarks.evidence --only h100 1m   # plans whose names have all these words
    python -m scripts.benchmarks.evidence --again    # also plans made by these versions
    python -m scripts.benchmarks.evidence --list     # lists versions, makes no plans
    python -m scripts.benchmarks.evidence --times    # re-estimates times, compiles nothing

A plan is remade from its own fields, or from its recipe if it has one. Each new plan replaces the
stored one; if it no longer fits, this is printed and the stored plan is kept. Table 3 has a
separate command (scripts.benchmarks.table3).
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from data.errors import UserError
from data.folders import scratch_folder
from planning.memory_options import MEMORY_OPTIONS
from planning.plan import VARIABLES, made_with
from scripts.benchmarks.commands import last_line, read_json
from scripts.benchmarks.plan_store import read_plans, write_plans
from scripts.benchmarks.results import ROOT
from scripts.plan import estimates
from scripts.plan_options import job_of, parser
from trainer.options import command, option

COMPARED = ("peak_gib", "host_gib", "temporaries_gib")
TIMES = ("estimated_step_seconds",)


def chosen(plans: dict[str, dict[str, Any]], words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the plans whose names contain all of the words."""
    return {name: plan for name, plan in plans.items() if all(word in name for word in words)}


def command_of(name: str, plan: dict[str, Any]) -> list[str]:
    """Returns the arguments of scripts.plan that make this plan."""
    recipe = ROOT / "configs" / f"{name}.yaml"
    command = ["--compile", "--model", plan["model"], "--topology", plan["topology"]]
    if recipe.exists():
        return [*command, "--config", str(recipe)]
    mesh = [
        f"{axis}={int(size)}"
        for axis, size in plan["mesh"].items()
        if size and axis not in ("dcn", "order", "simulate")
    ]
    mesh += [f"dcn.{axis}={size}" for axis, size in plan["mesh"].get("dcn", {}).items()]
    command += ["--context", str(plan["context"]), "--batch", str(plan["batch"])]
    command += ["--schedule", plan["schedule"], "--mesh", ",".join(mesh)]
    for name in MEMORY_OPTIONS:
        value, flag = plan.get(name), "--" + name.replace("_", "-")
        if value is True:
            command.append(flag)
        elif value is not None and value is not False:
            command += [flag, str(value)]
    return command


def flags_of(plan: dict[str, Any]) -> dict[str, str]:
    """Returns the variables with a plan's compiler flags."""
    return plan["made_with"].get("flags", {})


def versions_of(plan: dict[str, Any]) -> str:
    """Returns a plan's versions and flags, in one line."""
    made = plan["made_with"].items()
    return ", ".join(f"{name} {version}" for name, version in made if name != "flags")


def make(name: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Remakes one plan and returns it.

    Raises:
      UserError: the planner failed; with its last line.
    """
    environment = {
        **{name: value for name, value in os.environ.items() if name not in VARIABLES},
        **flags_of(plan),
    }
    with scratch_folder() as folder:
        new = folder / "plan.json"
        done = subprocess.run(
            [sys.executable, "-m", "scripts.plan", *command_of(name, plan), "--output", str(new)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise UserError(last_line(done.stderr))
        return read_json(new)


def estimated_again(name: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Returns a plan with its times re-estimated by the current cost model."""
    args = parser().parse_args(command_of(name, plan))
    return plan | estimates(plan, job_of(args), args)


def moved(before: dict[str, Any], after: dict[str, Any], compared: Sequence[str] = COMPARED) -> str:
    """Returns the compared figures that differ in the second decimal, or "nothing moved"."""
    changes = [
        f"{name} {before.get(name, 0.0):.2f} -> {after.get(name, 0.0):.2f}"
        for name in compared
        if f"{before.get(name, 0.0):.2f}" != f"{after.get(name, 0.0):.2f}"
    ]
    return "; ".join(changes) or "nothing moved"


def work(args: Options) -> int:
    """Returns 0, or 1 if a plan could not be made."""
    failed = False
    plans = read_plans()
    for name, plan in chosen(plans, args.only).items():
        if args.list:
            print(f"{name}: {versions_of(plan)}")
            continue
        flags = flags_of(plan)
        current = made_with(plan["topology"]) | ({"flags": flags} if flags else {})
        if not (args.times or args.again) and plan["made_with"] == current:
            print(f"{name}: up to date with these versions and flags")
            continue
        try:
            made = estimated_again(name, plan) if args.times else make(name, plan)
        except UserError as error:
            print(f"{name}: NOT MADE: {error}", flush=True)
            failed = True
            continue
        print(f"{name}: {moved(plan, made, TIMES if args.times else COMPARED)}", flush=True)
        plans[name] = made
        write_plans(plans)
    return int(failed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    only: tuple[str, ...] = option(
        "only plans whose names contain all of these words", (), metavar="WORD"
    )
    again: bool = option("also remake plans of these versions, after a change of the program")
    list: bool = option("print what each plan was made with, and make none")
    times: bool = option("only re-estimate times with today's cost model")


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
