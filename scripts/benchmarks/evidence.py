"""Makes the plans of docs/plans again with the installed compilers, and prints what moved: what `make evidence` runs.

    python -m scripts.benchmarks.evidence                  # every plan that other versions or flags made
    python -m scripts.benchmarks.evidence --only h100 1m   # those whose path has all of these words
    python -m scripts.benchmarks.evidence --again          # also those that the same versions made, as code has changed since
    python -m scripts.benchmarks.evidence --list           # which plan was made with what; makes none
    python -m scripts.benchmarks.evidence --times          # estimated times anew by today's cost model; compiles nothing

A plan's own fields are its command, but for plans of recipes, which are made from the recipe. Each new plan replaces its file;
one that no longer fits is printed, and its file stays. Table 3 has a command of its own (scripts.benchmarks.table3).
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from planning.memory_options import MEMORY_OPTIONS
from planning.plan import VARIABLES, made_with
from scripts.benchmarks.commands import make_parser, read_json
from scripts.benchmarks.results import ROOT
from scripts.plan import estimates
from scripts.plan_options import job_of, parser

FOLDER = ROOT / "docs" / "plans"
COMPARED = ("peak_gib", "host_gib", "temporaries_gib")


def stored_plans(words: list[str]) -> dict[Path, dict[str, Any]]:
    """Returns the plans by path whose path has all of the words."""
    plans = {}
    for path in sorted(FOLDER.rglob("*.json")):
        content = read_json(path)
        plan = content.get("longest", content)
        name = path.relative_to(FOLDER).as_posix()
        if "peak_gib" in plan and all(word in name for word in words):
            plans[path] = plan
    return plans


def command_of(path: Path, plan: dict[str, Any]) -> list[str]:
    """Returns the arguments of scripts.plan that ask for this plan."""
    recipe = ROOT / "configs" / f"{os.path.relpath(path.parent, FOLDER)}.yaml"
    command = ["--compile", "--model", plan["model"], "--topology", plan["topology"]]
    if recipe.exists():
        return [*command, "--config", str(recipe)]
    mesh = [f"{axis}={int(size)}" for axis, size in plan["mesh"].items() if size and axis not in ("dcn", "order", "simulate")]
    mesh += [f"dcn.{axis}={size}" for axis, size in plan["mesh"].get("dcn", {}).items()]
    command += ["--context", str(plan["context"]), "--batch", str(plan["batch"]), "--schedule", plan["schedule"], "--mesh",
                ",".join(mesh)]
    for name in MEMORY_OPTIONS:
        value, flag = plan.get(name), "--" + name.replace("_", "-")
        if value is True:
            command.append(flag)
        elif value is not None and value is not False:
            command += [flag, str(value)]
    return command


def flags_of(plan: dict[str, Any]) -> dict[str, str]:
    """Returns the environment variables with the compilers' flags that a plan was made with."""
    if "made_with" in plan:
        return dict(plan["made_with"]["flags"])
    return {"LIBTPU_INIT_ARGS": plan["compiler_flags"]} if "compiler_flags" in plan else {}


def versions_of(plan: dict[str, Any]) -> str:
    """Returns what a plan was made with, in one line."""
    made = plan.get("made_with", {"jax": plan.get("jax", "not recorded")})
    return ", ".join(f"{name} {version}" for name, version in made.items() if name != "flags")


def make(path: Path, plan: dict[str, Any]) -> str:
    """Makes one plan again and replaces its file; returns what moved, in one line."""
    environment = {**{name: value for name, value in os.environ.items() if name not in VARIABLES}, **flags_of(plan)}
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder) / "plan.json"
        done = subprocess.run([sys.executable, "-m", "scripts.plan", *command_of(path, plan), "--output", str(new)], cwd=ROOT,
                              env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"NOT MADE: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
        made = read_json(new)
    stored = read_json(path)
    content = {**stored, "longest": made} if "longest" in stored else made
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return moved(plan, made)


def estimate_again(path: Path, plan: dict[str, Any]) -> str:
    """Replaces the estimated times of a stored plan by those of today's cost model; returns what moved, in one line."""
    args = parser().parse_args(command_of(path, plan))
    times = estimates(plan, job_of(args), args)
    stored, name = read_json(path), "estimated_step_seconds"
    content = {**stored, "longest": plan | times} if "longest" in stored else plan | times
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if name not in times or plan.get(name) == times[name]:
        return "nothing moved"
    return f"{name} {plan.get(name, 0.0):.4g} -> {times[name]:.4g}"


def moved(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Returns the compared figures that differ in their second decimal, or that none does."""
    changes = [f"{name} {before.get(name, 0.0):.2f} -> {after[name]:.2f}" for name in COMPARED
               if f"{before.get(name, 0.0):.2f}" != f"{after[name]:.2f}"]
    return "; ".join(changes) or "nothing moved"


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 1 if a plan could not be made."""
    options = make_parser("evidence", __doc__)
    options.add_argument("--only", nargs="+", default=[], metavar="WORD", help="plans whose path has all of these words")
    options.add_argument("--again", action="store_true",
                         help="also those that these versions made: after a change of what is compiled")
    options.add_argument("--list", action="store_true", help="print what each plan was made with, and make none")
    options.add_argument("--times", action="store_true", help="estimate times anew by today's cost model, and compile nothing")
    args = options.parse_args(argv)
    failed = False
    for path, plan in stored_plans(args.only).items():
        name = path.relative_to(FOLDER).as_posix()
        if args.list:
            print(f"{name}: {versions_of(plan)}")
            continue
        if args.times:
            print(f"{name}: {estimate_again(path, plan)}")
            continue
        if not args.again and plan.get("made_with") == {**made_with(plan["topology"]), "flags": flags_of(plan)}:
            print(f"{name}: made with these versions and flags")
            continue
        result = make(path, plan)
        failed |= result.startswith("NOT MADE")
        print(f"{name}: {result}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
