"""Writes BENCHMARKS.md from the result files in docs/results.

    python -m scripts.benchmarks.page            # write the page
    python -m scripts.benchmarks.page --check    # exit with 1 if the page is not what the results give
"""
from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from scripts.benchmarks.results import ROOT, Result, load_all

PAGE = ROOT / "BENCHMARKS.md"
INTRODUCTION = """\
# Benchmarks

Made by `python -m scripts.benchmarks.page` from the files in [docs/results](docs/results); do not edit it by hand.
`make bench` measures again what takes minutes and whose code has changed, writes its result files and makes this page anew;
`python -m scripts.benchmarks --stale` lists the results whose code has changed since they were measured.

Every row names its result file, which holds all figures, the command, the machine, versions and commit.
[docs/notes](docs/notes) says what was tried and why. Speeds on a GPU are those of one H200, under a heading of their own. All
other memory, transfers and overlap of TPUs and GPUs were read from what compilers make, on a machine with 2 CPU cores.

- met, **missed**: whether the measured figure reaches the goal.
- bundle: the instructions that a TPU core issues in one cycle; a program of fewer bundles takes fewer cycles.
- 2 a core: two thread blocks of the kernel fit on a streaming multiprocessor of the GPU at a time.
- bytes off the formula: by how much what a rank receives differs from the paper's formula, at most.
- AT 8, DT, BC-10%: Agentic Transformer with 8 episodes in a context, Decision Transformer, behaviour cloning of the best tenth.
"""
PROVENANCE = """\
## When, at which commit, by which command

Commands that are cut short stand whole in the result files, as do the dates and commits of single rows. `carried`: taken over
from the hand-written page of before, with the commit that recorded the figures. `inputs`:
a digest of the programs that the result depends on.
"""
# What users ask first: question, and the NAME.ROW that answers it.
HEADLINES = (
    ("Longest context, LLaMA-3.1-8B on 8 x H100-80GB", "contexts.h100_8_16m"),
    ("The same within 100 GiB of host memory a GPU", "contexts.h100_8_8m"),
    ("Longest context, LLaMA-3.1-8B on one H200", "contexts.h200_1_2m"),
    ("Longest context, LLaMA-7B on 256 TPU v4 chips", "table3.v4_8x8x4_7b"),
    ("Ring Attention's Table 3: rows whose ring context our step reaches", "table3.rows_held"),
    ("LLaMA-7B at 1M tokens on 64 TPU v4 chips, GiB a chip", "memory_1m.nothing"),
    ("Attention kernel on an H200, forward, heads of 128: TFLOP/s", "gpu.part_forward"),
    ("Training step on an H200, 8 layers of 8B, 32K: tokens a second, MFU", "gpu.step_32k_everything"),
    ("Training step on a CPU, 4,096 tokens, beside torch", "step.speed_4096"),
    ("Attention kernel on a CPU, 16K tokens, beside torch", "kernels.both_16384"),
    ("Striped over contiguous ring at 16K, of the bound", "balance_time.striped_16384"),
    ("Logits against transformers, SmolLM2, 8,192 tokens", "exactness.smollm2_logits"),
    ("All schedules against dense float64", "exactness.all_pairs"),
    ("Loss and gradients, any mesh against one device", "exactness.five_meshes"),
    ("Killed with -9 and resumed", "exactness.resume"),
    ("Striped Attention's theoretical speed-ups", "papers.striped_bounds"),
    ("Quickstart: lines retrieved, 8 simulated devices", "quickstart.retrieval"),
    ("SmolLM2-135M: one of 60 lines in LongChat's words, after practising", "retrieval.lines_60"),
    ("From scratch to 16,384 tokens: one of 2,700 lines, keys and numbers never seen", "curriculum.lines_2700"),
)
# Heading -> results whose rows are shown, in order.
SECTIONS = {
    "Exactness": ("exactness", "exactness_by_hand", "gemma3", "suite"),
    "Speed on a CPU": ("step", "step_parts", "kernels", "rings"),
    "Cycles of the TPU kernels, by the TPU's compiler": ("kernel_cycles",),
    "On one H200": ("gpu",),
    "Registers of the kernels for GPUs, by the CUDA compiler": ("kernel_registers",),
    "Balance": ("balance", "balance_time"),
    "What schedules send, and what hides it": ("bytes", "distflashattn_volume", "overlap", "placement", "launch_flags"),
    "Memory": ("memory_length", "activation_memory", "memory_1m", "megatron_memory", "export_memory",
               "trajectory_memory"),
    "Longest contexts": ("contexts", "adapter_contexts"),
    "Ring Attention's Table 3": ("table3",),
    "Measured steps, and ours by the cost model": ("measured_steps",),
    "Plans of recipes and pods": ("recipes", "pods"),
    "The papers, by the cost model": ("papers",),
    "SmolLM2-135M before and after practising retrieval": ("retrieval",),
    "SmolLM2-135M at twice the length it knows": ("extension",),
    "A curriculum of lengths, from scratch": ("curriculum",),
    "Decoding, and many questions to one context": ("decoding", "questions"),
    "Attacks, an hour of training, a slow store": ("robustness", "hour", "slow_store"),
    "Training for real": ("quickstart", "identity", "data", "books"),
    "In-context reinforcement learning": ("in_context",),
}
# Results of which the page shows these rows only.
SELECTED = {
    "exactness": ("smollm2_logits", "small_logits", "all_pairs", "pallas_kernels", "tpu_kernel_compiles", "five_meshes",
                  "twenty_steps_loss", "twenty_steps_end", "collectives", "rope_angles", "templates", "resume",
                  "import_export", "ten_kills"),
    "exactness_by_hand": ("one_two_four_processes", "axis_of_eight", "float32_text", "float32_random"),
    "bytes": ("ring", "all_gather", "balanced", "ulysses", "attention2d"),
    "pods": ("ring_hidden", "llama_3_1_8b_1048576_v5e_16x16", "llama_3_1_8b_1048576_v5p_8x8x4",
             "llama_3_1_70b_1048576_v5e_16x16", "llama_3_1_70b_1048576_v5p_8x8x4", "llama_3_1_70b_8388608_v5p_8x8x4"),
}


def cell(text: str) -> str:
    """Returns a text as a table cell."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table in Markdown."""
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines) + "\n"


def links(results: Mapping[str, Result]) -> str:
    """Returns the definitions of the page's links, `[NAME]` to a result file and `[NAME note]` to a page of docs/notes."""
    notes = {result.note for result in results.values()}
    lines = [f"[{name}]: docs/results/{name}.json" for name in results]
    return "\n".join(lines + [f"[{Path(note).stem} note]: {note}" for note in sorted(notes - {""})]) + "\n"


def note(result: Result) -> str:
    """Returns the link to the page that says what was tried and why; empty where there is none."""
    return f"[{Path(result.note).stem} note]" if result.note else ""


def verdict(row: Mapping[str, str]) -> str:
    """Returns a row's verdict as the page shows it."""
    return {"held": "met", "short": "**missed**", "no goal": ""}.get(row["verdict"], row["verdict"])


def step_times(results: Mapping[str, Result]) -> str:
    """Returns the table of our ranges for an 8B model beside what others measured."""
    rows = [(row["what"], row["found"], row["goal"])
            for row_id, row in results["measured_steps"].rows.items() if row_id.startswith("ours_")]
    times = table(("machine, tokens", "our range", "measured by others"), rows)
    return (f"## Seconds a step, LLaMA-3.1-8B, one row\n\n{times}\n"
            "Ours was not measured: from matrix products at full rate alone, to as slow as the slowest step that was\n"
            "measured on such machines ([measured_steps]). TRL's is Qwen3-8B.\n")


def headlines(results: Mapping[str, Result]) -> str:
    """Returns the table of HEADLINES."""
    rows = []
    for question, reference in HEADLINES:
        name, row_id = reference.split(".")
        row = results[name].rows[row_id]
        rows.append((question, row["found"], row["goal"], verdict(row), f"[{name}]"))
    return table(("question", "measured", "goal", "verdict", "source"), rows)


def section(heading: str, names: Iterable[str], results: Mapping[str, Result]) -> str:
    """Returns one topic's heading, table of all rows of its results, and notes."""
    names = list(names)
    rows = [(row["what"], row["goal"], row["found"], verdict(row), f"[{name}]") for name in names
            for row_id, row in results[name].rows.items()
            if row_id in SELECTED.get(name, results[name].rows) and not row_id.startswith("ours_")]
    notes = list(dict.fromkeys(note(results[name]) for name in names if results[name].note))
    more = f"\nWhat was tried and why: {', '.join(notes)}.\n" if notes else ""
    return f"## {heading}\n\n{table(('what', 'goal', 'measured', 'verdict', 'source'), rows)}{more}"


def selected(wanted: str, results: Mapping[str, Result]) -> list[tuple[str, str, Mapping[str, str]]]:
    """Returns (result name, row id, row) of all rows with one verdict."""
    return [(name, row_id, row) for name, result in results.items() for row_id, row in result.rows.items()
            if row["verdict"] == wanted]


def fell_short(results: Mapping[str, Result]) -> str:
    """Returns the section of rows that missed their goal."""
    rows = [(row["what"], row["goal"], row["found"], ", ".join(filter(None, (f"[{name}]", note(results[name])))))
            for name, _, row in selected("short", results)]
    return ("## Goals missed\n\n" + table(("what", "goal", "measured", "source"), rows)
            + "\nKnown limits that are no figures: [docs/notes/limits.md](docs/notes/limits.md)\n")


def not_measured(results: Mapping[str, Result]) -> str:
    """Returns the section of rows that nobody has measured, what each would need."""
    rows = [(row["what"], row["found"], f"[{name}]")
            for name, _, row in selected("not measured", results)]
    return "## Not measured\n\n" + table(("what", "needs", "source"), rows)


def short(command: str, width: int = 60) -> str:
    """Returns a command as code, cut after `width` characters; the result file has it whole."""
    if not command:
        return "by hand"
    return f"`{command if len(command) <= width else command[: width - 4] + ' ...'}`"


def provenance(results: Mapping[str, Result]) -> str:
    """Returns the section of dates, commits and commands. `inputs` digests what it depends on."""
    rows = []
    for name, result in results.items():
        if result.date:
            digest = hashlib.sha256(json.dumps(result.depends_on, sort_keys=True).encode()).hexdigest()[:8]
            dates = sorted({result.date, *(row["date"] for row in result.rows.values() if "date" in row)})
            commits = {result.commit, *(row["commit"] for row in result.rows.values() if "commit" in row)}
            commit = result.commit if len(commits) == 1 else f"{len(commits)} commits"
            rows.append((f"[{name}]", " to ".join(dict.fromkeys((dates[0], dates[-1]))),
                         f"{commit}{', carried' if result.carried else ''}", digest, short(result.command)))
    return f"{PROVENANCE}\n{table(('result', 'date', 'commit', 'inputs', 'command'), rows)}"


def render(results: Mapping[str, Result]) -> str:
    """Returns the whole page; KeyError where SECTIONS or HEADLINES name a result or row that is not there."""
    parts = [INTRODUCTION, step_times(results), "## Headlines\n\n" + headlines(results)]
    parts += [section(heading, names, results) for heading, names in SECTIONS.items()]
    parts += [fell_short(results), not_measured(results), provenance(results), links(results)]
    return "\n".join(parts)


def write(path: Path = PAGE) -> None:
    """Makes the page anew from the committed results."""
    path.write_text(render(load_all()), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.page", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    args = parser.parse_args(argv)
    if not args.check:
        write()
        return 0
    if PAGE.read_text(encoding="utf-8") == render(load_all()):
        return 0
    print("BENCHMARKS.md is not what docs/results gives: run python -m scripts.benchmarks.page", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
