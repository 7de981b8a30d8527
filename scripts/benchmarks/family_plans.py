"""Collects the plans of the recipes for Qwen3, Mistral and Gemma, and puts them beside what others measured.

    python -m scripts.plan --config configs/NAME.yaml --model PRESET --machine MACHINE --compile \\
        --output docs/plans/NAME/plan.json
    python -m scripts.benchmarks.family_plans

The first command makes one plan, by the real compiler of a machine that is absent; `make evidence` makes those again that are
there. The second writes docs/results/family_plans.json from the plans in docs/plans. Memory is the compiler's own figure;
seconds are between the full rate of the matrix units and what the cost model says, or the slowest step that others measured.
"""
from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from scripts.benchmarks.commands import read_json
from scripts.benchmarks.results import ROOT, measured, row, save

MODELS = ("qwen3", "mistral", "gemma")
DEPENDS_ON = ("configs/*.yaml", "docs/plans/*/plan.json", "scripts/benchmarks/family_plans.py")
# Recipe -> GB of each GPU that TRL measured at the same length on the same machine (huggingface/trl#6845).
TRL_GB = {"qwen3_8b_1m_h100": 56.2, "qwen3_32b_1m_h100": 60.8}
TITLE = "Recipes for Qwen3, Mistral and Gemma, planned by the machines' compilers"


def plans() -> dict[str, dict[str, Any]]:
    """Returns the plan of each recipe of these models that has one, by the recipe's name."""
    paths = sorted((ROOT / "docs/plans").glob("*/plan.json"))
    recorded = {path.parent.name: read_json(path) for path in paths if (ROOT / f"configs/{path.parent.name}.yaml").exists()}
    return {name: plan for name, plan in recorded.items() if plan["model"].startswith(MODELS)}


def two_digits(number: float) -> str:
    """Returns a number with two significant digits."""
    return f"{float(f'{number:.2g}'):,g}"


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the plans and saves the result."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.family_plans", description=__doc__.splitlines()[0])
    parser.parse_args(argv)
    recipes = [path.stem for path in (ROOT / "configs").glob("*.yaml") if path.stem.startswith(MODELS)]
    compiled, lines = plans(), []
    rows = {"compiled": row("recipes of these models planned by a machine's compiler, the others by estimate",
                            f"{len(compiled)} of {len(recipes)}", "all", len(compiled) == len(recipes))}
    for name, plan in compiled.items():
        peak, device, host = (plan[field] for field in ("peak_gib", "device_gib", "host_gib"))
        low, high = (two_digits(plan[f"estimated_step_seconds_{end}"]) for end in ("low", "high"))
        memory = f"{peak:.1f} of {device:.1f}"
        rows[name] = row(f"{name}, {plan['topology']}: GiB of a device; of the host", f"{memory}; {host:.1f}")
        if name in TRL_GB:
            ours = peak * 2**30 / 1e9
            rows[f"{name}_gb"] = row(f"{name}: GB of each GPU, planned", f"{ours:.1f}", f"TRL measured {TRL_GB[name]}",
                                     ours <= TRL_GB[name])
        mesh = ", ".join(f"{axis} {size}" for axis, size in plan["mesh"].items() if isinstance(size, int) and size > 1)
        made = ", ".join(f"{package} {version}" for package, version in plan["made_with"].items() if package != "flags")
        lines.append([name, plan["topology"], mesh, plan["remat"], memory, f"{host:.1f}", f"{low} to {high}", made])
    columns = ["recipe", "machine", "mesh", "remat", "GiB of a device", "GiB of its host", "estimated seconds of a step",
               "compiled with"]
    save("family_plans", measured(TITLE, rows, "python -m scripts.benchmarks.family_plans", DEPENDS_ON,
                                  tables={"plans": {"columns": columns, "rows": lines}}, note="docs/notes/pods.md"))


if __name__ == "__main__":
    main()
