"""The report of a line-retrieval evaluation: a table, result files, and plots against lines, tokens and depth."""

import dataclasses
import hashlib
import itertools
import json
import pathlib
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from data import printable
from data.errors import UserError
from eval.scoring import Outcome, Score, score, wilson

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

DEPTHS = 5  # equal parts of a prompt, in which errors are counted


def read(folder: str | pathlib.Path) -> list[Score]:
    """Returns the scores in another evaluation's folder.

    Raises:
        UserError: it has no results of line retrieval.
    """
    path = pathlib.Path(folder) / "results.json"
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        fields = [field.name for field in dataclasses.fields(Score)]
        rows = results["within_trained_length"] + results["beyond_trained_length"]
        return [Score(**{field: row[field] for field in fields}) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: no results of line retrieval ({type(error).__name__}: {error}); a folder that "
            "eval.line_retrieval wrote would work"
        ) from None


def write(
    outcomes: list[Outcome],
    output: str | pathlib.Path,
    about: dict[str, Any],
    others: dict[str, list[Score]] | None = None,
) -> list[Score]:
    """Writes the report into a folder, prints its table, and returns the scores.

    Args:
        outcomes: the answered cases.
        output: the folder, which receives results.json, cases.jsonl, line_retrieval.png and line_depth.png.
        about: what was evaluated and how (checkpoint, trained length, seed, ...), for results.json and the plot's title.
        others: scores of other evaluations, by name, for the plot.
    """
    folder = pathlib.Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    scores = score(outcomes)
    depths = by_depth(outcomes)
    (folder / "results.json").write_text(
        json.dumps(as_json(scores, about, depths), indent=2) + "\n", encoding="utf-8"
    )
    with open(folder / "cases.jsonl", "w", encoding="utf-8") as file:
        for outcome in outcomes:
            file.write(json.dumps(_outcome_json(outcome)) + "\n")
    title = str(about.get("checkpoint", ""))
    plot(
        {title: scores, **(others or {})} if others else scores,
        folder / "line_retrieval.png",
        title,
    )
    plot_depths(depths, folder / "line_depth.png", title)
    print_table(scores)
    return scores


def by_depth(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Returns the accuracy, with its 95% Wilson interval, by family, number of lines and depth: the part of the prompt, from
    depth_from to depth_to of it, in which the line in question begins."""
    groups: dict[tuple[str, int, int], list[Outcome]] = {}
    for outcome in outcomes:
        part = min(int(outcome.case.depth * DEPTHS), DEPTHS - 1)
        groups.setdefault((outcome.case.family, outcome.case.num_lines, part), []).append(outcome)
    rows = []
    for (family, lines, part), group in sorted(groups.items()):
        right = sum(outcome.right for outcome in group)
        low, high = wilson(right, len(group))
        rows.append(
            {
                "family": family,
                "num_lines": lines,
                "depth_from": part / DEPTHS,
                "depth_to": (part + 1) / DEPTHS,
                "cases": len(group),
                "right": right,
                "accuracy": right / len(group),
                "low": low,
                "high": high,
            }
        )
    return rows


def as_json(
    scores: list[Score], about: dict[str, Any], depths: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the contents of results.json, in which lengths within and beyond the trained one are separate."""
    rows = [
        dataclasses.asdict(item)
        | {
            "chance": item.chance,
            "above_chance": item.above_chance,
            "above_chance_reason": item.above_chance_reason,
        }
        for item in scores
    ]
    return {
        "about": about,
        "scoring": "last integer of the generated text equals the expected one; 95% Wilson interval",
        "within_trained_length": [row for row in rows if not row["beyond_trained_length"]],
        "beyond_trained_length": [row for row in rows if row["beyond_trained_length"]],
        "by_depth": depths,
    }


def print_table(scores: list[Score], console: "Console | None" = None) -> None:
    """Prints a table of at most 80 columns for each family of keys."""
    from rich.table import Table
    from rich.text import Text

    console = console or printable.console()
    for family in dict.fromkeys(item.family for item in scores):
        table = Table(
            title=f"Line retrieval, {family}",
            title_justify="left",
            box=None,
            padding=(0, 2, 0, 0),
            pad_edge=False,
        )
        table.add_column("cases from", overflow="fold")
        table.add_column("length")
        for name in ("lines", "tokens", "right", "accuracy", "interval", "chance"):
            table.add_column(name, justify="right", no_wrap=True)
        for item in scores:
            if item.family == family:
                table.add_row(
                    Text(item.source),
                    "beyond" if item.beyond_trained_length else "within",
                    str(item.num_lines),
                    f"{item.mean_prompt_tokens:,.0f}",
                    f"{item.right}/{item.cases}",
                    f"{item.accuracy:.2f}",
                    f"{item.low:.2f}-{item.high:.2f}",
                    f"{item.chance:.3f}",
                )
        console.print(table)
    if scores:
        console.print(
            "length: within or beyond the trained length; interval: 95%, Wilson; chance: 1 / lines"
        )


def curves(scores: list[Score]) -> dict[tuple[str, bool], list[Score]]:
    """Groups the scores that a line may connect: of the same family, and all within or all beyond the trained length."""
    groups: dict[tuple[str, bool], list[Score]] = {}
    for item in scores:
        groups.setdefault((item.family, item.beyond_trained_length), []).append(item)
    return groups


def plot_depths(rows: list[dict[str, Any]], path: str | pathlib.Path, title: str = "") -> None:
    """Plots the accuracy, with its interval, against the depth of the line in question; a curve for each number of lines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for family, lines in dict.fromkeys((row["family"], row["num_lines"]) for row in rows):
        group = [row for row in rows if (row["family"], row["num_lines"]) == (family, lines)]
        errors = [
            [row["accuracy"] - row["low"] for row in group],
            [row["high"] - row["accuracy"] for row in group],
        ]
        axes.errorbar(
            [(row["depth_from"] + row["depth_to"]) / 2 for row in group],
            [row["accuracy"] for row in group],
            yerr=[[max(error, 0) for error in side] for side in errors],
            capsize=3,
            marker="o",
            label=f"{family}, {lines:,} lines",
        )
    axes.set(
        xlabel="depth of the line in the prompt",
        ylabel="accuracy (95% Wilson interval)",
        xlim=(0, 1),
        ylim=(-0.03, 1.03),
    )
    axes.grid(alpha=0.3)
    if rows:
        axes.legend(fontsize="small")
    axes.set_title(
        "\n".join(textwrap.wrap(f"Line retrieval by depth  {title}".strip(), 72)), fontsize="medium"
    )
    figure.savefig(path, dpi=120)


def plot(
    scores: list[Score] | dict[str, list[Score]], path: str | pathlib.Path, title: str = ""
) -> None:
    """Plots accuracies with their intervals and chance into a file.

    One panel is against the number of lines and, if there are several, a second one against the number of tokens. Each family
    of keys is a curve of its own. Scores of several evaluations come by their names, which the curves are labelled with.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if isinstance(scores, dict):
        title = title or "  and  ".join(scores)
        scores = [
            dataclasses.replace(score, family=f"{name}: {score.family}")
            for name, group in scores.items()
            for score in group
        ]
        note = []
    else:
        families = {item.family for item in scores}
        note = (
            ["curves differ in their keys and prompt's end: not one curve"]
            if len(families) > 1
            else []
        )
    panels = {
        "lines": lambda item: item.num_lines,
        "prompt tokens (mean)": lambda item: round(item.mean_prompt_tokens),
    }
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
    lines = [*textwrap.wrap(f"Line retrieval  {title}".strip(), 12 * width), *note]
    figure.suptitle("\n".join(lines), fontsize="medium")
    figure.savefig(path, dpi=120)


def _plot_panel(
    axes: "Axes", scores: list[Score], name: str, x_of: Callable[[Score], int], annotate: bool
) -> None:
    """Plots the scores against `x_of(score)`, which `name` describes; `annotate` adds the numbers to the points."""
    families = list(dict.fromkeys(item.family for item in scores))
    for (family, beyond), curve in curves(scores).items():
        group = sorted(curve, key=x_of)
        x = [x_of(item) for item in group]
        below = [max(item.accuracy - item.low, 0) for item in group]
        above = [max(item.high - item.accuracy, 0) for item in group]
        axes.errorbar(
            x,
            [item.accuracy for item in group],
            yerr=[below, above],
            capsize=3,
            marker="o",
            color=f"C{families.index(family)}",
            linestyle="--" if beyond else "-",
            markerfacecolor="white" if beyond else None,
            label=family + (", beyond trained length" if beyond else ""),
        )
        axes.plot(x, [item.chance for item in group], "k:", marker="_", markersize=12)
        for item in group if annotate else ():
            text = f"{item.right}/{item.cases}\n{item.mean_prompt_tokens:,.0f} tokens"
            axes.annotate(
                text, (x_of(item), item.accuracy), (10, 0), textcoords="offset points", va="center"
            )
    axes.plot([], [], "k:", marker="_", markersize=12, label="chance")
    ticks = sorted({x_of(item) for item in scores})
    if all(10 * (right - left) > ticks[-1] - ticks[0] for left, right in itertools.pairwise(ticks)):
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set(xlabel=name, ylim=(-0.03, 1.03))
    axes.grid(alpha=0.3)


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    """Returns a line of cases.jsonl, where a hash stands for the prompt: eval.compare pairs the answers to equal ones."""
    return {
        "source": outcome.case.source,
        "prompt": hashlib.sha256(outcome.case.prompt.encode()).hexdigest()[:32],
        "num_lines": outcome.case.num_lines,
        "correct_line": outcome.case.correct_line,
        "depth": outcome.case.depth,
        "expected_number": outcome.case.expected_number,
        "answer": outcome.answer,
        "right": outcome.right,
        "generated": outcome.generated,
        "prompt_tokens": outcome.prompt_tokens,
        "beyond_trained_length": outcome.beyond_trained_length,
    }
