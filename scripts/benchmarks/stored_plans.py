"""Turns the plans of docs/plans/plans.json into results: recipes, pods and longest contexts.

    python -m scripts.plan --config configs/NAME.yaml --machine MACHINE --compile --output plan.json
    python -m scripts.benchmarks.stored_plans --add NAME plan.json
    python -m scripts.benchmarks.stored_plans

The first command makes a plan with the real compiler for a machine that need not be present; the
second stores it under a name (for a recipe, its path below configs/). `make evidence` remakes all
stored plans. The third writes the results `recipes`, `pods`, `contexts` and `memory_1m`. Memory is
the compiler's figure; seconds range from the highest MFU measured on such a chip to the cost
model's estimate, or the slowest step that others measured.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

from scripts.benchmarks.commands import read_json
from scripts.benchmarks.plan_store import read_plans, write_plans
from scripts.benchmarks.results import ROOT, renew, row
from trainer.options import command, option

# Recipe -> GB per GPU that TRL measured at the same length on the same machine
# (huggingface/trl#6845).
TRL_GB = {
    "qwen3_8b_1m_h100": 56.2,
    "qwen3_30b_a3b_1m_h100": 46.0,
    "qwen3_32b_1m_h100": 60.8,
}
PODS = "pods/"  # prefix of their names
# Row -> plan, GPUs, goal in tokens, goal in words. The 8M goal was set without query chunks; 16M
# had no separate goal.
CONTEXTS = {
    "h100_8_16m": ("llama_3_1_8b_16m_h100_8", "8 x H100", 8 << 20, "8M (best known 5M)"),
    "h100_8_8m": ("llama_3_1_8b_8m_h100_8", "8 x H100", 8 << 20, "8M (best known 5M)"),
    "h200_1_2m": ("llama_3_1_8b_2m_h200_1", "1 x H200", 2 << 20, "2M (best known 1.2M)"),
    "h100_8_4m": ("llama_3_1_8b_h100_8", "8 x H100", 3_700_000, "3.7M (ALST)"),
}
# Row -> plan of LLaMA-7B, 1,048,576 tokens on v4:4x4x4, nothing offloaded.
MEMORY_1M = {
    "nothing": "llama_7b_1m_v4",
    "nothing_prefetch": "llama_7b_1m_v4_prefetch",
    "save_attention": "llama_7b_1m_v4_save_attention",
}
MEMORY_1M_GIB = 14


def two_digits(number: float) -> str:
    """Returns a number with two significant digits."""
    return f"{float(f'{number:.2g}'):,g}"


def memory_text(plan: dict[str, Any]) -> str:
    """Returns a plan's GiB per device, and the available GiB."""
    return f"{plan['peak_gib']:.1f} of {plan['device_gib']:.1f}"


def seconds_text(plan: dict[str, Any]) -> str:
    """Returns the range of a planned step's seconds."""
    return " to ".join(two_digits(plan[f"estimated_step_seconds_{end}"]) for end in ("low", "high"))


def recipe_plans(plans: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the plans of recipes, by the recipe's path below configs/ without its suffix."""
    return {
        name: plan for name, plan in plans.items() if (ROOT / "configs" / f"{name}.yaml").exists()
    }


def save_recipes(plans: dict[str, dict[str, Any]]) -> None:
    """Saves the result of the plans of recipes."""
    planned, rows = recipe_plans(plans), {}
    for name, plan in planned.items():
        recipe = name.rpartition("/")[2]
        rows[recipe] = row(
            f"{recipe}, {plan['topology']}: GiB per device; host GiB per device",
            f"{memory_text(plan)}; {plan['host_gib']:.1f}",
            "fits",
            plan["peak_gib"] <= plan["device_gib"],
        )
        rows[f"{recipe}_seconds"] = row(
            f"{recipe}: seconds per step, by the cost model", seconds_text(plan)
        )
        if recipe in TRL_GB:
            ours = plan["peak_gib"] * 2**30 / 1e9
            rows[f"{recipe}_gb"] = row(
                f"{recipe}: planned GB per GPU",
                f"{ours:.1f}",
                f"TRL measured {TRL_GB[recipe]}",
                ours <= TRL_GB[recipe],
            )
    renew("recipes", rows)


def save_pods(stored: dict[str, dict[str, Any]]) -> None:
    """Saves the result of the plans of pods."""
    plans = {
        name.removeprefix(PODS): plan for name, plan in stored.items() if name.startswith(PODS)
    }
    hidden = [
        plan["communication"]["collective-permute"]["hidden"]
        for plan in plans.values()
        if plan["schedule"] == "ring"
    ]
    rows = {
        "ring_hidden": row(
            "256 chips, ring: share of the permutes' bytes that compute hides",
            f"{min(hidden):.1%} to {max(hidden):.1%}",
            "all",
            min(hidden) == 1,
        )
    }
    for plan in sorted(plans.values(), key=lambda plan: plan["context"]):
        name = f"{plan['model']}_{plan['context']}_{plan['topology']}"
        rows[re.sub("[^a-z0-9]", "_", name)] = row(
            f"{plan['model']}, {plan['context']:,} tokens, {plan['topology']}: GiB per chip; "
            "seconds per step",
            f"{memory_text(plan)}; {seconds_text(plan)}",
            "fits",
            plan["peak_gib"] <= plan["device_gib"],
        )
    renew("pods", rows)


def save_contexts(stored: dict[str, dict[str, Any]]) -> None:
    """Saves the result of the plans of the longest contexts on GPUs."""
    plans = {name: stored[plan] for name, (plan, *_) in CONTEXTS.items()}
    rows = {}
    for name, (_, gpus, goal, words) in CONTEXTS.items():
        plan = plans[name]
        rows[name] = row(
            f"longest context, LLaMA-3.1-8B on {gpus}, remat {policy(plan)}, "
            f"{plan['host_gib']:.1f} GiB of host memory per GPU",
            f"{plan['context']:,}",
            words,
            plan["context"] >= goal,
        )
    renew("contexts", rows)


def save_memory_1m(stored: dict[str, dict[str, Any]]) -> None:
    """Saves the result of the plans of LLaMA-7B at 1M tokens."""
    plans = {name: stored[plan] for name, plan in MEMORY_1M.items()}
    rows = {
        name: row(
            f"LLaMA-7B at 1M tokens on 64 v4 chips, remat {policy(plan)}: GiB per chip",
            f"{plan['peak_gib']:.2f}",
            str(MEMORY_1M_GIB),
            plan["peak_gib"] <= MEMORY_1M_GIB,
        )
        for name, plan in plans.items()
    }
    renew("memory_1m", rows)


def policy(plan: dict[str, Any]) -> str:
    """Describes what a plan keeps for the backward pass."""
    words = plan["remat"] + (f" {plan['every_k']}" if plan.get("every_k") else "")
    words += f", {plan['query_chunks']} query chunks" if plan["query_chunks"] > 1 else ""
    return words + (", prefetch" if plan["prefetch"] else "")


def work(args: Options) -> None:
    """Saves all four results, or adds one plan to the stored ones."""
    plans = read_plans()
    if args.add:
        name, file = args.add
        content = read_json(Path(file))
        write_plans(plans | {name: content.get("longest", content)})
        return
    for save_result in (save_recipes, save_pods, save_contexts, save_memory_1m):
        save_result(plans)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    add: tuple[str, ...] = option(
        "store a file's plan under this name, and stop", (), nargs=2, metavar=("NAME", "FILE")
    )


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
