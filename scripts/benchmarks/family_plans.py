"""Collects the plans of the recipes for Qwen3, Mistral and Gemma, and of those of adapters, beside what others measured.

    python -m scripts.plan --config configs/NAME.yaml --model PRESET --machine MACHINE --compile \\
        --output docs/plans/NAME/plan.json
    python -m scripts.benchmarks.family_plans

The first command makes one plan, by the real compiler of a machine that is absent, those of configs/adapters in
docs/plans/adapters; `make evidence` makes those again that are there. The second writes docs/results/family_plans.json and
adapter_plans.json from the plans in docs/plans. Memory is the compiler's own figure; seconds are between the full rate of the
matrix units and what the cost model says, or the slowest step that others measured.
"""
from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from scripts.benchmarks.commands import make_parser, read_json
from scripts.benchmarks.results import ROOT, measured, row, save
from trainer import entry

# Recipe -> GB of each GPU that TRL measured at the same length on the same machine (huggingface/trl#6845).
TRL_GB = {"qwen3_8b_1m_h100": 56.2, "qwen3_32b_1m_h100": 60.8}


class Recipes(NamedTuple):
    """Recipes whose plans make one result.

    Attributes:
      folder: within configs, and of their plans within docs/plans.
      models: the beginnings of their names.
    """

    title: str
    folder: str
    models: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        stems = [path.stem for path in (ROOT / "configs" / self.folder).glob("*.yaml")]
        return sorted(stem for stem in stems if stem.startswith(self.models))

    @property
    def plans(self) -> dict[str, dict[str, Any]]:
        """The plan of each recipe that has one, by the recipe's name."""
        paths = {name: ROOT / "docs/plans" / self.folder / name / "plan.json" for name in self.names}
        return {name: read_json(path) for name, path in paths.items() if path.exists()}

    @property
    def depends_on(self) -> tuple[str, ...]:
        within = f"{self.folder}/" if self.folder else ""
        return f"configs/{within}*.yaml", f"docs/plans/{within}*/plan.json", "scripts/benchmarks/family_plans.py"


RESULTS = {
    "family_plans": Recipes("Recipes for Qwen3, Mistral and Gemma, planned by the machines' compilers", "",
                            ("qwen3", "mistral", "gemma")),
    "adapter_plans": Recipes("Recipes of LoRA and QLoRA, planned by the machines' compilers", "adapters", ("llama", "qwen3")),
}


def two_digits(number: float) -> str:
    """Returns a number with two significant digits."""
    return f"{float(f'{number:.2g}'):,g}"


def save_result(name: str, recipes: Recipes) -> None:
    """Reads the plans of these recipes and saves the result."""
    plans, lines = recipes.plans, []
    rows = {"compiled": row("recipes of these models planned by a machine's compiler, the others by estimate",
                            f"{len(plans)} of {len(recipes.names)}", "all", len(plans) == len(recipes.names))}
    for recipe, plan in plans.items():
        peak, device, host = (plan[field] for field in ("peak_gib", "device_gib", "host_gib"))
        low, high = (two_digits(plan[f"estimated_step_seconds_{end}"]) for end in ("low", "high"))
        memory = f"{peak:.1f} of {device:.1f}"
        rows[recipe] = row(f"{recipe}, {plan['topology']}: GiB of a device; of the host", f"{memory}; {host:.1f}")
        if recipe in TRL_GB:
            ours = peak * 2**30 / 1e9
            rows[f"{recipe}_gb"] = row(f"{recipe}: GB of each GPU, planned", f"{ours:.1f}", f"TRL measured {TRL_GB[recipe]}",
                                       ours <= TRL_GB[recipe])
        mesh = ", ".join(f"{axis} {size}" for axis, size in plan["mesh"].items() if isinstance(size, int) and size > 1)
        made = ", ".join(f"{package} {version}" for package, version in plan["made_with"].items() if package != "flags")
        lines.append([recipe, plan["topology"], mesh or "one device", f"{plan['context']:,}", plan["remat"], memory,
                      f"{host:.1f}", f"{low} to {high}", made])
    columns = ["recipe", "machine", "mesh", "tokens", "remat", "GiB of a device", "GiB of its host",
               "estimated seconds of a step", "compiled with"]
    save(name, measured(recipes.title, rows, "python -m scripts.benchmarks.family_plans", recipes.depends_on,
                        tables={"plans": {"columns": columns, "rows": lines}}, note="docs/notes/pods.md"))


def main(argv: Sequence[str] | None = None) -> None:
    """Saves both results."""
    parser = make_parser("family_plans", __doc__)
    parser.parse_args(argv)
    for name, recipes in RESULTS.items():
        save_result(name, recipes)


if __name__ == "__main__":
    sys.exit(entry.run(main))
