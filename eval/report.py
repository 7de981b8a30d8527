"""The report of a line-retrieval evaluation: a table, results.json, and plots against lines and against tokens."""

import dataclasses
import json
import pathlib
from typing import Any

from eval.scoring import Outcome, Score, score


def write(outcomes: list[Outcome], output: str | pathlib.Path, about: dict[str, Any]) -> list[Score]:
    """Write results.json, cases.jsonl and line_retrieval.png into `output`, print the table, and return the scores.

    about: what was evaluated and how (checkpoint, trained length, seed, ...); goes into results.json and the title.
    """
    folder = pathlib.Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    scores = score(outcomes)
    (folder / "results.json").write_text(json.dumps(as_json(scores, about), indent=2) + "\n", encoding="utf-8")
    with open(folder / "cases.jsonl", "w", encoding="utf-8") as file:
        for one in outcomes:
            file.write(json.dumps(_outcome_json(one)) + "\n")
    plot(scores, folder / "line_retrieval.png", str(about.get("checkpoint", "")))
    print_table(scores)
    return scores


def as_json(scores: list[Score], about: dict[str, Any]) -> dict[str, Any]:
    """Results as plain values; lengths within and beyond the trained one are listed apart."""
    rows = [dataclasses.asdict(one) | {"chance": one.chance, "above_chance": one.above_chance} for one in scores]
    return {
        "about": about,
        "scoring": "last integer of the generated text equals the expected one; 95% Wilson interval",
        "within_trained_length": [row for row in rows if not row["beyond_trained_length"]],
        "beyond_trained_length": [row for row in rows if row["beyond_trained_length"]],
    }


def print_table(scores: list[Score], console=None) -> None:
    """The scores as a table, in the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Line retrieval", caption="interval: 95%, Wilson; chance: 1 / lines")
    for name in ("cases from", "keys", "length"):
        table.add_column(name)
    for name in ("lines", "tokens", "right", "accuracy", "interval", "chance"):
        table.add_column(name, justify="right")
    for one in scores:
        table.add_row(
            one.source, one.family, "beyond trained length" if one.beyond_trained_length else "trained",
            str(one.num_lines), f"{one.mean_prompt_tokens:,.0f}", f"{one.right}/{one.cases}", f"{one.accuracy:.2f}",
            f"{one.low:.2f} to {one.high:.2f}", f"{one.chance:.3f}",
        )  # fmt: skip
    (console or Console()).print(table)


def curves(scores: list[Score]) -> dict[tuple[str, bool], list[Score]]:
    """Scores that may be joined by a line: the same keys, and all within or all beyond the trained length."""
    found: dict[tuple[str, bool], list[Score]] = {}
    for one in scores:
        found.setdefault((one.family, one.beyond_trained_length), []).append(one)
    return found


def plot(scores: list[Score], path: str | pathlib.Path, title: str = "") -> None:
    """Accuracy with its interval, against lines and against tokens; each key family is a curve of its own."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    families = list(dict.fromkeys(one.family for one in scores))
    for axis, name in ((axes[0], "lines"), (axes[1], "prompt tokens (mean)")):
        for (family, beyond), group in curves(scores).items():
            across = [(one.num_lines if name == "lines" else one.mean_prompt_tokens) for one in group]
            order = sorted(range(len(group)), key=across.__getitem__)
            group, across = [group[place] for place in order], [across[place] for place in order]
            accuracy = [one.accuracy for one in group]
            below = [max(one.accuracy - one.low, 0) for one in group]
            above = [max(one.high - one.accuracy, 0) for one in group]
            axis.errorbar(
                across, accuracy, yerr=[below, above], capsize=3, marker="o", color=f"C{families.index(family)}",
                linestyle="--" if beyond else "-", markerfacecolor="white" if beyond else None,
                label=family + (", beyond trained length" if beyond else ""),
            )  # fmt: skip
        if name == "lines":
            counts = sorted({one.num_lines for one in scores})
            axis.plot(counts, [1 / lines for lines in counts], "k:", marker="_", label="chance")
            if len(counts) <= 12:
                axis.set_xticks(counts)
        axis.set_xlabel(name)
        axis.set_ylim(-0.03, 1.03)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy (95% Wilson interval)")
    if scores:
        axes[0].legend(fontsize="small")
    note = "  (curves differ in their keys and prompt's end: not one curve)" if len(families) > 1 else ""
    figure.suptitle(f"Line retrieval  {title}{note}".strip(), fontsize="medium")
    figure.savefig(path, dpi=120)


def _outcome_json(one: Outcome) -> dict[str, Any]:
    return {
        "source": one.case.source, "num_lines": one.case.num_lines, "correct_line": one.case.correct_line,
        "expected_number": one.case.expected_number, "answer": one.answer, "right": one.right,
        "generated": one.generated, "prompt_tokens": one.prompt_tokens,
        "beyond_trained_length": one.beyond_trained_length,
    }  # fmt: skip
