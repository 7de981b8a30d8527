"""Writes BENCHMARKS.md, and the pages of docs/benchmarks, from the result files in docs/results.

python -m scripts.benchmarks.page            # write the pages
python -m scripts.benchmarks.page --check    # exit with 1 if a page is not what the results give
"""

from __future__ import annotations

import dataclasses
import posixpath
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from scripts.benchmarks.results import ROOT, Result, changed, load_all
from trainer.options import command, option

PAGE = ROOT / "BENCHMARKS.md"
OLD = " (old)"  # marks a headline whose measured program has changed
INTRODUCTION = """\
# Benchmarks

The main figures, each with its goal or the fastest peer's figure, machine, date and command. All
missed goals are listed. Other figures are in [docs/benchmarks](docs/benchmarks), by theme; attempts
and reasons are in [docs/notes](docs/notes).

`python -m scripts.benchmarks.page` makes these pages from [docs/results](docs/results); do not edit
them by hand. `make bench` repeats stale measurements that take minutes; `python -m
scripts.benchmarks --stale` lists all stale results. GPU speeds were measured on one H200. All other
memory, transfers and overlap of TPUs and GPUs come from the compilers' output, on a machine with 2
CPU cores: no group of accelerators has run these steps.

- met, **missed**: whether the measured figure reaches the goal.
- (old): the measured program has changed since, as of the page's last writing.
- by hand: not measured by a committed command, or by an earlier one.
"""
THEME = """\
# {title}

Made by `python -m scripts.benchmarks.page`; do not edit it by hand.
[Headlines and goals missed](../../BENCHMARKS.md).
The result files have all figures, commands, machines, versions and commits.
"""
# Users' first questions, and the NAME.ROW with the answer.
HEADLINES = (
    (
        "A step of Llama 3.2 1B on an H200, relative to transformers + Liger, 8K tokens",
        "gpu_steps.1b_8k",
    ),
    ("The same, 32K tokens", "gpu_steps.1b_32k"),
    ("The same, 32K tokens of 16 documents", "gpu_steps.1b_32k_packed"),
    ("The same, 32K tokens, layers recomputed", "gpu_steps.1b_32k_recomputing"),
    ("A step of 8 layers of 8B on an H200, 32K tokens: tokens/s, MFU", "gpu_steps.8b_32k"),
    ("The same, 128K tokens", "gpu_steps.8b_128k"),
    (
        "Attention on an H200 as a model calls it, 32K causal, both passes: TFLOP/s, of the "
        "fastest peer's",
        "gpu.diagonal_backward_32768",
    ),
    (
        "Longest context, LLaMA-3.1-8B on 8 x H100-80GB, 204 GiB of host memory per GPU",
        "contexts.h100_8_16m",
    ),
    ("The same within 100 GiB of host memory per GPU", "contexts.h100_8_8m"),
    ("Longest context, LLaMA-3.1-8B on one H200, 602 GiB of host memory", "contexts.h200_1_2m"),
    ("LLaMA-7B at 1M tokens on 64 TPU v4 chips, GiB per chip", "memory_1m.nothing"),
    (
        "Ring Attention's Table 3: rows whose ring context our step reaches, with host memory",
        "table3.rows_held",
    ),
    ("The same like for like: one row, tensor parallel, float32, A100", "table3.like_for_like"),
    ("Training step on a CPU, 4,096 tokens, relative to torch", "step.speed_4096"),
    ("The same, 2,048 tokens, on the slowest processor tried, an Intel Xeon", "step.least_2048"),
    ("Attention kernel on a CPU, 16K tokens, relative to torch", "kernels.both_16384"),
    ("Striped over contiguous ring at 16K, of the bound", "balance_time.striped_16384"),
    ("Logits against transformers, SmolLM2, 8,192 tokens", "exactness.smollm2_logits"),
    ("All schedules against dense float64", "exactness.all_pairs"),
    ("Loss and gradients, any mesh against one device", "exactness.five_meshes"),
    ("Killed with -9 and resumed", "exactness.resume"),
    ("Quickstart: lines retrieved, 8 simulated devices", "quickstart.retrieval"),
    ("SmolLM2-135M: one of 60 lines in LongChat's words, after practising", "retrieval.lines_60"),
    ("LongChat's own 200 lines, after practising", "retrieval.lines_200"),
    (
        "From scratch to 16,384 tokens: one of 2,700 lines, keys and numbers never seen",
        "curriculum.lines_2700",
    ),
)
# Page of docs/benchmarks -> its title, and results by heading, in order.
THEMES: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "exactness": (
        "Exactness",
        {
            "Against references": ("exactness", "gemma3"),
            "The tests": ("suite",),
            "Attacks, an hour of training, a slow store": ("robustness", "hour", "slow_store"),
        },
    ),
    "speed": (
        "Speed",
        {
            "Steps on one H200, against transformers + Liger": ("gpu_steps",),
            "Kernels and steps on one H200": ("gpu",),
            "On a CPU": ("step", "kernels", "rings"),
            "Preparing data": ("data",),
        },
    ),
    "compiled": (
        "The kernels, by their compilers",
        {
            "Cycles of the TPU kernels, by the TPU's compiler": ("kernel_cycles",),
            "Registers of the kernels for GPUs, by the CUDA compiler": ("kernel_registers",),
        },
    ),
    "schedules": (
        "Schedules",
        {
            "Balance": ("balance", "balance_time"),
            "What schedules send, and what hides it": (
                "bytes",
                "overlap",
            ),
        },
    ),
    "memory": (
        "Memory and contexts",
        {
            "Memory": ("memory_1m",),
            "Longest contexts": ("contexts", "adapter_contexts"),
            "Ring Attention's Table 3": ("table3",),
            "Plans of recipes and pods": ("recipes", "pods"),
        },
    ),
    "estimates": (
        "The cost model",
        {
            "Measured steps, and ours by the cost model": ("measured_steps",),
            "The papers, by the cost model": ("papers",),
        },
    ),
    "learning": (
        "What models learned",
        {
            "The quickstart, identity conversations": ("quickstart", "identity"),
            "SmolLM2-135M before and after practising retrieval": ("retrieval",),
            "SmolLM2-135M by preferences: short answers": ("preference",),
            "Pairs whose prompt is computed once": ("shared_prompts",),
            "SmolLM2-135M at twice the length it knows": ("extension",),
            "A curriculum of lengths, from scratch": ("curriculum",),
            "In-context reinforcement learning": ("in_context",),
        },
    ),
}
TERMS = {
    "compiled": """\
- bundle: the instructions that a TPU core issues in one cycle; fewer bundles take fewer cycles.
- 2 a core: two thread blocks of the kernel fit on a streaming multiprocessor of the GPU at a time.
""",
    "schedules": (
        "- bytes off the formula: the largest deviation of received bytes from the "
        "paper's formula, at most.\n"
    ),
    "learning": """\
- AT 8, DT, BC-10%: Agentic Transformer with 8 episodes in a context, Decision Transformer,
  behaviour cloning of the best tenth.
""",
}
# Results of which the page shows only these rows.
SELECTED = {
    "pods": (
        "ring_hidden",
        "llama_3_1_8b_1048576_v5e_16x16",
        "llama_3_1_8b_1048576_v5p_8x8x4",
        "llama_3_1_70b_1048576_v5e_16x16",
        "llama_3_1_70b_1048576_v5p_8x8x4",
        "llama_3_1_70b_8388608_v5p_8x8x4",
    ),
}


def cell(text: str) -> str:
    """Returns a text as a table cell."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table in Markdown."""
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines) + "\n"


def links(results: Mapping[str, Result], folder: str = "") -> str:
    """Returns a page's link definitions: `[NAME]` for results, `[NAME note]` for notes.

    Args:
      results: those that the page names.
      folder: of the page, below the repository's root.
    """
    notes = sorted({result.note for result in results.values()} - {""})
    targets = {name: f"docs/results/{name}.json" for name in results} | {
        f"{Path(note).stem} note": note for note in notes
    }
    return "".join(
        f"[{name}]: {posixpath.relpath(target, folder or '.')}\n"
        for name, target in targets.items()
    )


def note(result: Result) -> str:
    """Returns the link to the page that says what was tried and why; empty where there is none."""
    return f"[{Path(result.note).stem} note]" if result.note else ""


def verdict(row: Mapping[str, str]) -> str:
    """Returns a row's verdict as the page shows it."""
    return {"held": "met", "short": "**missed**", "no goal": ""}.get(row["verdict"], row["verdict"])


def step_times(results: Mapping[str, Result]) -> str:
    """Returns the table of our ranges for an 8B model and others' measurements."""
    rows = [
        (row["what"], row["found"], row["goal"])
        for row_id, row in results["measured_steps"].rows.items()
        if row_id.startswith("ours_")
    ]
    times = table(("machine, tokens", "our range", "measured by others"), rows)
    held_out = table(
        ("steps of", "inside; the slowest, of the range's end"),
        [
            (row["what"].partition(", ranges set")[0], row["found"])
            for row_id, row in results["measured_steps"].rows.items()
            if row_id.startswith("held_out_")
        ],
    )
    return (
        f"## Seconds per step, LLaMA-3.1-8B, one row\n\n{times}\n"
        "Our ranges, not measured: from matrix products alone at full rate to the slowest step\n"
        "measured on such machines ([measured_steps]). TRL's is Qwen3-8B. How far such a range\n"
        "can be trusted: a system's measured steps, and ranges that other systems' steps set.\n\n"
        f"{held_out}"
    )


def headlines(results: Mapping[str, Result], mark_old: bool = True) -> str:
    """Returns the table of HEADLINES with machine and day, stale ones marked if `mark_old`."""
    rows = []
    for question, reference in HEADLINES:
        name, row_id = reference.split(".")
        result = results[name]
        row = result.rows[row_id]
        date = row.get("date", result.date) + (OLD if mark_old and changed(result) else "")
        rows.append(
            (question, row["found"], row["goal"], verdict(row), machine(result), date, f"[{name}]")
        )
    return table(("question", "measured", "goal", "verdict", "on", "date", "source"), rows)


def machine(result: Result) -> str:
    """Returns the machine that measured a result, in a few words."""
    gpus = result.hardware.get("gpus")
    if isinstance(gpus, list) and gpus:
        return f"{len(gpus)} x {str(gpus[0]).removeprefix('NVIDIA ')}"
    return " ".join(str(result.hardware.get("processor") or "not recorded").split()[:4])


def section(heading: str, names: Iterable[str], results: Mapping[str, Result]) -> str:
    """Returns one heading, the table of its results' rows that have a goal, and notes."""
    names = list(names)
    rows = [
        (row["what"], row["goal"], row["found"], verdict(row), f"[{name}]")
        for name in names
        for row_id, row in results[name].rows.items()
        if row["goal"] and row_id in SELECTED.get(name, results[name].rows)
        if not row_id.startswith("ours_")
    ]
    notes = list(dict.fromkeys(note(results[name]) for name in names if results[name].note))
    more = f"\nAttempts and reasons: {', '.join(notes)}.\n" if notes else ""
    return f"## {heading}\n\n{table(('what', 'goal', 'measured', 'verdict', 'source'), rows)}{more}"


def selected(
    wanted: str, results: Mapping[str, Result]
) -> list[tuple[str, str, Mapping[str, str]]]:
    """Returns (result name, row id, row) of all rows with one verdict."""
    return [
        (name, row_id, row)
        for name, result in results.items()
        for row_id, row in result.rows.items()
        if row["verdict"] == wanted
    ]


def fell_short(results: Mapping[str, Result]) -> str:
    """Returns the section of rows that missed their goal."""
    rows = [
        (
            row["what"],
            row["goal"],
            row["found"],
            ", ".join(filter(None, (f"[{name}]", note(results[name])))),
        )
        for name, _, row in selected("short", results)
    ]
    return (
        "## Goals missed\n\n"
        + table(("what", "goal", "measured", "source"), rows)
        + "\nKnown limits without figures: [docs/notes/limits.md](docs/notes/limits.md)\n"
    )


def not_measured(results: Mapping[str, Result]) -> str:
    """Returns the section of rows that nobody has measured, what each would need."""
    rows = [
        (row["what"], row["found"], f"[{name}]")
        for name, _, row in selected("not measured", results)
    ]
    return "## Not measured\n\n" + table(("what", "needs", "source"), rows)


def command_text(command: str, width: int = 80) -> str:
    """Returns a command as code, cut after `width` characters; the result file has it whole."""
    if not command.startswith(("python", "make", "pytest")):
        return "by hand"
    return f"`{command if len(command) <= width else command[: width - 4] + ' ...'}`"


def provenance(results: Mapping[str, Result]) -> str:
    """Returns the section of dates, commits, machines and commands of a page's results."""
    rows = []
    for name, result in results.items():
        dates = sorted(
            {result.date, *(row["date"] for row in result.rows.values() if "date" in row)}
        )
        commits = {
            result.commit,
            *(row["commit"] for row in result.rows.values() if "commit" in row),
        }
        rows.append(
            (
                f"[{name}]",
                " to ".join(dict.fromkeys((dates[0], dates[-1]))),
                result.commit if len(commits) == 1 else f"{len(commits)} commits",
                machine(result),
                command_text(result.command),
            )
        )
    return "## When, at which commit, by which command\n\n" + table(
        ("result", "date", "commit", "on", "command"), rows
    )


def theme(name: str, results: Mapping[str, Result]) -> str:
    """Returns a page of docs/benchmarks; KeyError where THEMES names a result that is not there."""
    title, sections = THEMES[name]
    own = {result: results[result] for names in sections.values() for result in names}
    parts = [THEME.format(title=title), *([TERMS[name]] if name in TERMS else [])]
    parts += [section(heading, names, results) for heading, names in sections.items()]
    return "\n".join([*parts, provenance(own), links(own, "docs/benchmarks")])


def headline_page(results: Mapping[str, Result], mark_old: bool) -> str:
    """Returns BENCHMARKS.md; KeyError where HEADLINES names a row that is not there."""
    themes = "".join(
        f"- [{title}](docs/benchmarks/{name}.md): {', '.join(sections).lower()}\n"
        for name, (title, sections) in THEMES.items()
    )
    parts = [
        INTRODUCTION,
        "## Headlines\n\n" + headlines(results, mark_old),
        step_times(results),
        fell_short(results),
        not_measured(results),
        "## By theme\n\n" + themes,
    ]
    text = "\n".join(parts)
    return (
        text
        + "\n"
        + links({name: result for name, result in results.items() if f"[{name}]" in text})
    )


def render(results: Mapping[str, Result], mark_old: bool = True) -> dict[Path, str]:
    """Returns all pages' texts by path; finding OLD headlines takes seconds."""
    pages = {
        PAGE.parent / "docs" / "benchmarks" / f"{name}.md": theme(name, results) for name in THEMES
    }
    return {PAGE: headline_page(results, mark_old), **pages}


def write() -> None:
    """Makes the pages anew from the committed results."""
    for path, text in render(load_all()).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    check: bool = option("write nothing; exit with 1 if a page is out of date")


def work(args: Options) -> int:
    """Returns the exit code."""
    if not args.check:
        write()
        return 0
    # The marks of old headlines are those of the page's last writing: not every change of a program
    # needs a new page.
    for path, text in render(load_all(), mark_old=False).items():
        if not path.exists() or path.read_text(encoding="utf-8").replace(f"{OLD} |", " |") != text:
            print(
                f"{path.name} is not what docs/results gives: run python -m "
                "scripts.benchmarks.page",
                file=sys.stderr,
            )
            return 1
    return 0


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
