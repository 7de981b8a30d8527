"""The report of a line-retrieval evaluation: a table, results.json, and plots against lines and against tokens."""

import dataclasses
import itertools
import json
import pathlib
import textwrap
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
    """The scores as plain tables of at most 80 columns, one for each family of keys."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    for family in dict.fromkeys(one.family for one in scores):
        table = Table(title=f"Line retrieval, {family}", title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("cases from", overflow="fold")
        table.add_column("length")
        for name in ("lines", "tokens", "right", "accuracy", "interval", "chance"):
            table.add_column(name, justify="right", no_wrap=True)
        for one in scores:
            if one.family == family:
                table.add_row(
                    Text(one.source), "beyond" if one.beyond_trained_length else "within", str(one.num_lines),
                    f"{one.mean_prompt_tokens:,.0f}", f"{one.right}/{one.cases}", f"{one.accuracy:.2f}",
                    f"{one.low:.2f}-{one.high:.2f}", f"{one.chance:.3f}",
                )  # fmt: skip
        console.print(table)
    if scores:
        console.print("length: within or beyond the trained; interval: 95%, Wilson; chance: 1 / lines")


def curves(scores: list[Score]) -> dict[tuple[str, bool], list[Score]]:
    """Scores that may be joined by a line: the same keys, and all within or all beyond the trained length."""
    found: dict[tuple[str, bool], list[Score]] = {}
    for one in scores:
        found.setdefault((one.family, one.beyond_trained_length), []).append(one)
    return found


def plot(scores: list[Score], path: str | pathlib.Path, title: str = "") -> None:
    """Accuracy with its interval and chance, against lines and, with several lengths, against tokens as well; each key
    family is a curve of its own."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {"lines": lambda one: one.num_lines, "prompt tokens (mean)": lambda one: round(one.mean_prompt_tokens)}
    if alone := len({one.num_lines for one in scores}) <= 1:
        del panels["prompt tokens (mean)"]
    width = 5 * len(panels)
    figure = Figure(figsize=(width, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    families = list(dict.fromkeys(one.family for one in scores))
    for axis, (name, place) in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels.items(), strict=True):
        for (family, beyond), group in curves(scores).items():
            group = sorted(group, key=place)
            across, accuracy = [place(one) for one in group], [one.accuracy for one in group]
            below = [max(one.accuracy - one.low, 0) for one in group]
            above = [max(one.high - one.accuracy, 0) for one in group]
            axis.errorbar(
                across, accuracy, yerr=[below, above], capsize=3, marker="o", color=f"C{families.index(family)}",
                linestyle="--" if beyond else "-", markerfacecolor="white" if beyond else None,
                label=family + (", beyond trained length" if beyond else ""),
            )  # fmt: skip
            axis.plot(across, [one.chance for one in group], "k:", marker="_", markersize=12)
            for one in group if alone else ():
                told = f"{one.right}/{one.cases}\n{one.mean_prompt_tokens:,.0f} tokens"
                axis.annotate(told, (place(one), one.accuracy), (10, 0), textcoords="offset points", va="center")
        axis.plot([], [], "k:", marker="_", markersize=12, label="chance")
        places = sorted({place(one) for one in scores})
        if all(10 * (after - before) > places[-1] - places[0] for before, after in itertools.pairwise(places)):
            axis.set_xticks(places, [f"{at:,}" for at in places])
        axis.set(xlabel=name, ylim=(-0.03, 1.03))
        axis.grid(alpha=0.3)
        if name == "lines":
            axis.set_ylabel("accuracy (95% Wilson interval)")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=len(panels), fontsize="small")
    note = ["curves differ in their keys and prompt's end: not one curve"] if len(families) > 1 else []
    lines = [*textwrap.wrap(f"Line retrieval  {title}".strip(), 12 * width), *note]
    figure.suptitle("\n".join(lines), fontsize="medium")
    figure.savefig(path, dpi=120)


def _outcome_json(one: Outcome) -> dict[str, Any]:
    return {
        "source": one.case.source, "num_lines": one.case.num_lines, "correct_line": one.case.correct_line,
        "expected_number": one.case.expected_number, "answer": one.answer, "right": one.right,
        "generated": one.generated, "prompt_tokens": one.prompt_tokens,
        "beyond_trained_length": one.beyond_trained_length,
    }  # fmt: skip
