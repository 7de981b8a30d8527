"""Collects the plans of docs/plans into results: those of recipes, with and without adapters, of pods, and single ones.

    python -m scripts.plan --config configs/NAME.yaml --model PRESET --machine MACHINE --compile \\
        --output docs/plans/NAME/plan.json
    python -m scripts.benchmarks.stored_plans

The first command makes one plan, by the real compiler of a machine that is absent, those of configs/adapters in
docs/plans/adapters; `make evidence` makes those again that are there. The second writes docs/results/recipes.json,
family_plans.json, adapter_plans.json, pods.json, contexts.json and memory_1m.json from the plans in docs/plans. Memory is the
compiler's own figure; seconds are between the full rate of the matrix units and what the cost model says, or the slowest step
that others measured.
"""
from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from scripts.benchmarks.commands import make_parser, read_json
from scripts.benchmarks.evidence import versions_of
from scripts.benchmarks.results import ROOT, measured, row, save
from trainer import entry

# Recipe -> GB of each GPU that TRL measured at the same length on the same machine (huggingface/trl#6845).
TRL_GB = {"qwen3_8b_1m_h100": 56.2, "qwen3_32b_1m_h100": 60.8}
PODS = ROOT / "docs/plans/pods"
COLUMNS = ["plan", "machine", "mesh", "tokens", "schedule", "remat", "GiB of a device", "GiB of its host",
           "ring: bytes beside compute", "gathers: GiB; beside compute", "estimated seconds of a step", "compiled with"]


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
        return f"configs/{within}*.yaml", f"docs/plans/{within}*/plan.json", "scripts/benchmarks/stored_plans.py"


RECIPES = {
    "recipes": Recipes("Recipes for LLaMA on big machines, planned by the machines' compilers", "",
                       ("llama31", "sharegpt_llama13b")),
    "family_plans": Recipes("Recipes for Qwen3, Mistral and Gemma, planned by the machines' compilers", "",
                            ("qwen3", "mistral", "gemma")),
    "adapter_plans": Recipes("Recipes of LoRA and QLoRA, planned by the machines' compilers", "adapters", ("llama", "qwen3")),
}

# Row -> plan, GPUs, goal in tokens, goal in words. The 8M goal was set without query chunks; 16M had none of its own.
CONTEXTS = {
    "h100_8_16m": ("llama_3_1_8b_16m_h100_8.json", "8 x H100", 8 << 20, "8M (best known 5M)"),
    "h100_8_8m": ("llama_3_1_8b_8m_h100_8.json", "8 x H100", 8 << 20, "8M (best known 5M)"),
    "h200_1_2m": ("llama_3_1_8b_2m_h200_1.json", "1 x H200", 2 << 20, "2M (best known 1.2M)"),
    "h100_8_4m": ("llama_3_1_8b_h100_8/plan.json", "8 x H100", 0, ""),
}
# Row -> plan of LLaMA-7B, 1,048,576 tokens on v4:4x4x4, nothing offloaded.
MEMORY_1M = {"nothing": "llama_7b_1m_v4.json", "nothing_prefetch": "llama_7b_1m_v4_prefetch.json",
             "save_attention": "llama_7b_1m_v4_save_attention.json"}
MEMORY_1M_GIB = 14


def two_digits(number: float) -> str:
    """Returns a number with two significant digits."""
    return f"{float(f'{number:.2g}'):,g}"


def memory_text(plan: dict[str, Any]) -> str:
    """Returns the GiB of a device that a plan takes, and how many there are."""
    return f"{plan['peak_gib']:.1f} of {plan['device_gib']:.1f}"


def seconds_text(plan: dict[str, Any]) -> str:
    """Returns the range of a planned step's seconds."""
    return " to ".join(two_digits(plan[f"estimated_step_seconds_{end}"]) for end in ("low", "high"))


def line(name: str, plan: dict[str, Any]) -> list[str]:
    """Returns a plan's line of the table, under COLUMNS."""
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan["mesh"].items() if isinstance(size, int) and size > 1)
    sent = plan.get("communication") or {}
    permutes, gathers = sent.get("collective-permute"), sent.get("all-gather")
    return [name, plan["topology"], mesh or "one device", f"{plan['context']:,}", str(plan["schedule"]),
            plan["remat"] + (", prefetch" if plan.get("prefetch") else ""), memory_text(plan), f"{plan['host_gib']:.1f}",
            f"{permutes['hidden']:.1%}" if permutes else "",
            f"{gathers['received_gib']:.1f}; {gathers['hidden']:.1%}" if gathers else "", seconds_text(plan), versions_of(plan)]


def save_recipes(name: str, recipes: Recipes) -> None:
    """Reads the plans of these recipes and saves the result."""
    plans = recipes.plans
    rows = {"compiled": row("recipes of these models planned by a machine's compiler, the others by estimate",
                            f"{len(plans)} of {len(recipes.names)}", "all", len(plans) == len(recipes.names))}
    for recipe, plan in plans.items():
        rows[recipe] = row(f"{recipe}, {plan['topology']}: GiB of a device; of the host",
                           f"{memory_text(plan)}; {plan['host_gib']:.1f}")
        if recipe in TRL_GB:
            ours = plan["peak_gib"] * 2**30 / 1e9
            rows[f"{recipe}_gb"] = row(f"{recipe}: GB of each GPU, planned", f"{ours:.1f}", f"TRL measured {TRL_GB[recipe]}",
                                       ours <= TRL_GB[recipe])
    _save(name, recipes.title, rows, plans, recipes.depends_on)


def save_pods() -> None:
    """Reads the plans of pods and saves the result."""
    plans = {path.stem: read_json(path) for path in sorted(PODS.glob("*.json"), key=lambda path: path.stem)}
    hidden = [plan["communication"]["collective-permute"]["hidden"] for plan in plans.values() if plan["schedule"] == "ring"]
    rows = {"ring_hidden": row("256 chips, ring: bytes of all permutes that are sent beside compute",
                               f"{min(hidden):.1%} to {max(hidden):.1%}")}
    for plan in sorted(plans.values(), key=lambda plan: plan["context"]):
        name = f"{plan['model']}_{plan['context']}_{plan['topology']}"
        rows[re.sub("[^a-z0-9]", "_", name)] = row(
            f"{plan['model']}, {plan['context']:,} tokens, {plan['topology']}: GiB a chip; seconds a step",
            f"{memory_text(plan)}; {seconds_text(plan)}")
    _save("pods", "256 chips, one row, bfloat16: the mesh that the plan found", rows, plans,
          ("docs/plans/pods/*.json", "scripts/benchmarks/stored_plans.py"))


def save_contexts() -> None:
    """Reads the plans of the longest contexts on GPUs and saves the result."""
    plans = {name: read_plan(file) for name, (file, *_) in CONTEXTS.items()}
    rows = {}
    for name, (_, gpus, goal, words) in CONTEXTS.items():
        plan = plans[name]
        rows[name] = row(f"8B, {gpus}, {policy(plan)}, {plan['host_gib']:.1f} GiB of host a GPU",
                         f"{plan['context']:,}", words, plan["context"] >= goal if goal else None)
    _save("contexts", "LLaMA-3.1-8B: the longest contexts on GPUs that are not there, by the CUDA compiler", rows, plans,
          (*(f"docs/plans/{file}" for file, *_ in CONTEXTS.values()), "scripts/benchmarks/stored_plans.py"),
          "docs/notes/contexts.md")


def save_memory_1m() -> None:
    """Reads the plans of LLaMA-7B at 1M tokens and saves the result."""
    plans = {name: read_plan(file) for name, file in MEMORY_1M.items()}
    rows = {name: row(f"LLaMA-7B at 1M tokens on 64 v4 chips, {policy(plan)}: GiB a chip", f"{plan['peak_gib']:.2f}",
                      str(MEMORY_1M_GIB), plan["peak_gib"] <= MEMORY_1M_GIB) for name, plan in plans.items()}
    _save("memory_1m", "LLaMA-7B, full training step (AdamW), 1,048,576 tokens on v4:4x4x4, nothing offloaded", rows, plans,
          ("docs/plans/llama_7b_1m_v4*.json", "scripts/benchmarks/stored_plans.py"), "docs/notes/memory.md")


def read_plan(file: str) -> dict[str, Any]:
    """Returns a plan of docs/plans; of a search's plans the longest."""
    content = read_json(ROOT / "docs/plans" / file)
    return content.get("longest", content)


def policy(plan: dict[str, Any]) -> str:
    """Returns what a plan keeps for the backward pass, in a few words."""
    words = plan["remat"] + (f" {plan['every_k']}" if plan.get("every_k") else "")
    words += f", {plan['query_chunks']} query chunks" if plan["query_chunks"] > 1 else ""
    return words + (", prefetch" if plan["prefetch"] else "")


def _save(name: str, title: str, rows: dict[str, dict], plans: dict[str, dict[str, Any]], depends_on: tuple[str, ...],
          note: str = "docs/notes/pods.md") -> None:
    table = {"columns": COLUMNS, "rows": [line(*named_plan) for named_plan in plans.items()]}
    command = "python -m scripts.benchmarks.stored_plans"
    save(name, measured(title, rows, command, depends_on, tables={"plans": table}, note=note))


def main(argv: Sequence[str] | None = None) -> None:
    """Saves all six results."""
    make_parser("stored_plans", __doc__).parse_args(argv)
    for name, recipes in RECIPES.items():
        save_recipes(name, recipes)
    save_pods()
    save_contexts()
    save_memory_1m()


if __name__ == "__main__":
    sys.exit(entry.run(main))
