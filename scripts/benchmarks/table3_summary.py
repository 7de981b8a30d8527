"""How the rows and tables of Table 3's result follow from docs/plans/table3.json, the command's own record."""

from __future__ import annotations

from pathlib import Path

from scripts.benchmarks.commands import tokens_text
from scripts.benchmarks.paper_rows import RING_ATTENTION_COLUMNS, RING_ATTENTION_CONTEXTS
from scripts.benchmarks.results import row
from scripts.benchmarks.summaries import Rows, Tables
from scripts.benchmarks.table3_cells import LIKE_FOR_LIKE, read_cells


def table3(out: Path) -> tuple[Rows, Tables]:
    """Reads docs/plans/table3.json, the command's own record."""
    cells = {
        (cell["topology"], cell["model"], cell["column"], cell["memory"]): cell
        for cell in read_cells()
    }
    contexts = {name: cell["longest"] for name, cell in cells.items()}
    rings, lines, held, twice = {}, [], 0, 0
    for topology, models in RING_ATTENTION_CONTEXTS.items():
        for model, paper in models.items():
            longest = {
                column: tuple(
                    contexts.get((topology, model, column, memory), 0)
                    for memory in ("device", "ours")
                )
                for column in RING_ATTENTION_COLUMNS
            }
            lines.append(
                [
                    topology,
                    model.removeprefix("llama-"),
                    *(
                        f"{' / '.join(map(tokens_text, longest[column]))} ({tokens_text(thousands << 10)})"
                        for column, thousands in zip(RING_ATTENTION_COLUMNS, paper, strict=True)
                    ),
                ]
            )
            device, ours = longest["ring"]
            printed = paper[RING_ATTENTION_COLUMNS.index("ring")] << 10
            held, twice = held + (ours >= printed), twice + (ours >= 2 * printed)
            size = model.removeprefix("llama-")
            host = cells[topology, model, "ring", "ours"]["plan"]["host_gib"]
            rings[f"{topology}_{size}".replace(":", "_")] = row(
                f"{size.upper()} on {topology}, ring, {host:.0f} GiB of host each (without: {tokens_text(device)})",
                tokens_text(ours),
                f"the paper's {tokens_text(printed)}",
                ours >= printed,
            )
    count = len(lines)
    rows = {
        "rows_held": row(
            "rows of the ring column at least the paper's",
            f"{held} of {count}",
            f"{count}",
            held == count,
        ),
        "rows_twice": row(
            "rows of the ring column at least twice the paper's",
            f"{twice} of {count}",
            f"{count}",
            twice == count,
        ),
    }
    for kind, gpus in (("a100", True), ("tpu", False)):
        others = [
            (
                max(
                    contexts.get((topology, model, column, memory), 0)
                    for memory in ("device", "ours")
                ),
                thousands << 10,
            )
            for topology, models in RING_ATTENTION_CONTEXTS.items()
            if topology.startswith("a100") == gpus
            for model, paper in models.items()
            for column, thousands in zip(RING_ATTENTION_COLUMNS, paper, strict=True)
            if column != "ring"
        ]
        good = sum(tokens >= printed for tokens, printed in others)
        rows[f"other_columns_{kind}"] = row(
            f"cells of the other columns at least the paper's, {'A100' if gpus else 'TPUs'}",
            f"{good} of {len(others)}",
            f"{len(others)}",
            good == len(others),
        )
    columns = ["hardware", "model", *RING_ATTENTION_COLUMNS]
    alike, alike_lines = _like_for_like(contexts)
    return rows | alike | rings, {
        "contexts": {"columns": columns, "rows": lines},
        "like for like": {"columns": columns, "rows": alike_lines},
        "rings": _rings(cells),
    }


def _rings(cells: dict[tuple[str, str, str, str], dict]) -> dict[str, list]:
    """Returns the table of the ring's longest steps: what they take, and why their double is none."""
    lines = []
    for (topology, model, column, memory), cell in cells.items():
        if column == "ring" and "plan" in cell:
            plan = cell["plan"]
            lines.append(
                [
                    topology,
                    model.removeprefix("llama-"),
                    memory,
                    tokens_text(cell["longest"]),
                    f"{plan['peak_gib']:.1f} of {plan['device_gib']:.1f}",
                    f"{plan['host_gib']:.1f}",
                    f"{cell['flops']:.2e}",
                    f"{cell['estimated_step_hours']:.1f}",
                    "; ".join(cell["next_refused"]),
                ]
            )
    return {
        "columns": [
            "hardware",
            "model",
            "memory",
            "tokens",
            "GiB a device",
            "host GiB a device",
            "FLOPs",
            "hours",
            "the double",
        ],
        "rows": sorted(lines),
    }


def _like_for_like(contexts: dict[tuple[str, str, str, str], int]) -> tuple[Rows, list[list[str]]]:
    """Returns the row and the table of the cells with the paper's own split and dtype, which were tried on GPUs."""
    lines, cells = [], []
    for topology, models in RING_ATTENTION_CONTEXTS.items():
        for model, paper in models.items():
            longest = [
                contexts.get((topology, model, column, LIKE_FOR_LIKE))
                for column in RING_ATTENTION_COLUMNS
            ]
            if None in longest:
                continue
            printed = [thousands << 10 for thousands in paper]
            lines.append(
                [
                    topology,
                    model.removeprefix("llama-"),
                    *(
                        f"{tokens_text(tokens)} ({tokens_text(theirs)})"
                        for tokens, theirs in zip(longest, printed, strict=True)
                    ),
                ]
            )
            cells += zip(longest, printed, strict=True)
    good = sum(tokens >= printed for tokens, printed in cells)
    label = "like for like on A100 (one row, tensor parallel, float32): cells at least the paper's"
    return {
        "like_for_like": row(label, f"{good} of {len(cells)}", f"{len(cells)}", good == len(cells))
    } if cells else {}, lines
