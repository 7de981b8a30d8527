"""The report of a line-retrieval evaluation: a table, result files, and plots against lines and against tokens."""

import dataclasses
import itertools
import json
import pathlib
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from eval.scoring import Outcome, Score, score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console


def write(outcomes: list[Outcome], output: str | pathlib.Path, about: dict[str, Any]) -> list[Score]:
    """Writes the report into a folder, prints its table, and returns the scores.

    Args:
        outcomes: the answered cases.
        output: the folder, which receives results.json, cases.jsonl and line_retrieval.png.
        about: what was evaluated and how (checkpoint, trained length, seed, ...), for results.json and the plot's title.
    """
    folder = pathlib.Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    scores = score(outcomes)
    (folder / "results.json").write_text(json.dumps(as_json(scores, about), indent=2) + "\n", encoding="utf-8")
    with open(folder / "cases.jsonl", "w", encoding="utf-8") as file:
        for outcome in outcomes:
            file.write(json.dumps(_outcome_json(outcome)) + "\n")
    plot(scores, folder / "line_retrieval.png", str(about.get("checkpoint", "")))
    print_table(scores)
    return scores


def as_json(scores: list[Score], about: dict[str, Any]) -> dict[str, Any]:
    """Returns the contents of results.json, in which lengths within and beyond the trained one are separate."""
    rows = [dataclasses.asdict(item) | {"chance": item.chance, "above_chance": item.above_chance} for item in scores]
    return {
        "about": about,
        "scoring": "last integer of the generated text equals the expected one; 95% Wilson interval",
        "within_trained_length": [row for row in rows if not row["beyond_trained_length"]],
        "beyond_trained_length": [row for row in rows if row["beyond_trained_length"]],
    }


def print_table(scores: list[Score], console: "Console | None" = None) -> None:
    """Prints a table of at most 80 columns for each family of keys."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    for family in dict.fromkeys(item.family for item in scores):
        table = Table(title=f"Line retrieval, {family}", title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("cases from", overflow="fold")
        table.add_column("length")
        for name in ("lines", "tokens", "right", "accuracy", "interval", "chance"):
            table.add_column(name, justify="right", no_wrap=True)
        for item in scores:
            if item.family == family:
                table.add_row(
                    Text(item.source), "beyond" if item.beyond_trained_length else "within", str(item.num_lines),
                    f"{item.mean_prompt_tokens:,.0f}", f"{item.right}/{item.cases}", f"{item.accuracy:.2f}",
                    f"{item.low:.2f}-{item.high:.2f}", f"{item.chance:.3f}",
                )
        console.print(table)
    if scores:
        console.print("length: within or beyond the trained length; interval: 95%, Wilson; chance: 1 / lines")


def curves(scores: list[Score]) -> dict[tuple[str, bool], list[Score]]:
    """Groups the scores that a line may connect: of the same family, and all within or all beyond the trained length."""
    groups: dict[tuple[str, bool], list[Score]] = {}
    for item in scores:
        groups.setdefault((item.family, item.beyond_trained_length), []).append(item)
    return groups


def plot(scores: list[Score], path: str | pathlib.Path, title: str = "") -> None:
    """Plots accuracies with their intervals and chance into a file.

    One panel is against the number of lines and, if there are several, a second one against the number of tokens. Each family
    of keys is a curve of its own.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {"lines": lambda item: item.num_lines, "prompt tokens (mean)": lambda item: round(item.mean_prompt_tokens)}
    single_point = len({item.num_lines for item in scores}) <= 1
    if single_point:
        del panels["prompt tokens (mean)"]
    width = 5 * len(panels)
    figure = Figure(figsize=(width, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (name, x_of) in zip(all_axes, panels.items(), strict=True):
        _plot_panel(axes, scores, name, x_of, annotate=single_point)
    all_axes[0].set_ylabel("accuracy (95% Wilson interval)")
    handles, labels = all_axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(panels), fontsize="small")
    families = {item.family for item in scores}
    note = ["curves differ in their keys and prompt's end: not one curve"] if len(families) > 1 else []
    lines = [*textwrap.wrap(f"Line retrieval  {title}".strip(), 12 * width), *note]
    figure.suptitle("\n".join(lines), fontsize="medium")
    figure.savefig(path, dpi=120)


def _plot_panel(
    axes: "Axes", scores: list[Score], name: str, x_of: Callable[[Score], int], annotate: bool
) -> None:
    """Plots the scores against `x_of(score)`, which `name` describes; `annotate` adds the numbers to the points."""
    families = list(dict.fromkeys(item.family for item in scores))
    for (family, beyond), group in curves(scores).items():
        group = sorted(group, key=x_of)
        x = [x_of(item) for item in group]
        below = [max(item.accuracy - item.low, 0) for item in group]
        above = [max(item.high - item.accuracy, 0) for item in group]
        axes.errorbar(
            x, [item.accuracy for item in group], yerr=[below, above], capsize=3, marker="o",
            color=f"C{families.index(family)}", linestyle="--" if beyond else "-",
            markerfacecolor="white" if beyond else None, label=family + (", beyond trained length" if beyond else ""),
        )
        axes.plot(x, [item.chance for item in group], "k:", marker="_", markersize=12)
        for item in group if annotate else ():
            text = f"{item.right}/{item.cases}\n{item.mean_prompt_tokens:,.0f} tokens"
            axes.annotate(text, (x_of(item), item.accuracy), (10, 0), textcoords="offset points", va="center")
    axes.plot([], [], "k:", marker="_", markersize=12, label="chance")
    ticks = sorted({x_of(item) for item in scores})
    if all(10 * (right - left) > ticks[-1] - ticks[0] for left, right in itertools.pairwise(ticks)):
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set(xlabel=name, ylim=(-0.03, 1.03))
    axes.grid(alpha=0.3)


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    """Returns a line of cases.jsonl."""
    return {
        "source": outcome.case.source,
        "num_lines": outcome.case.num_lines,
        "correct_line": outcome.case.correct_line,
        "expected_number": outcome.case.expected_number,
        "answer": outcome.answer,
        "right": outcome.right,
        "generated": outcome.generated,
        "prompt_tokens": outcome.prompt_tokens,
        "beyond_trained_length": outcome.beyond_trained_length,
    }
