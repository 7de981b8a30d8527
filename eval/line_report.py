"""The report of a line-retrieval evaluation: a table, result files, and plots."""

import collections
import dataclasses
import hashlib
import json
import pathlib
import textwrap
from typing import TYPE_CHECKING, Any

from data import printable
from data.errors import UserError
from data.outputs import PICTURE_METADATA, write_texts
from data.untrusted_files import read_json
from eval import pictures
from eval.scoring import Outcome, Score, group_of, score, wilson

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

BEYOND = ", beyond trained length"
DEPTHS = 5  # equal parts of a prompt for counting errors


def read(folder: str | pathlib.Path) -> list[Score]:
    """Returns the scores in an evaluation's folder.

    Raises:
        UserError: it has no line-retrieval results.
    """
    path = pathlib.Path(folder) / "results.json"
    try:
        results = read_json(path, folder)
        fields = [field.name for field in dataclasses.fields(Score)]
        rows = results["within_trained_length"] + results["beyond_trained_length"]
        scores = [Score(**{field: row[field] for field in fields}) for row in rows]
        for row in scores:
            if not (
                all(0 <= value <= 1 for value in (row.low, row.accuracy, row.high))
                and row.num_lines >= 1
                and row.mean_prompt_tokens >= 0
            ):
                raise ValueError(f"{row} is no accuracy")
        return scores
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: not line-retrieval results ({type(error).__name__}: {error}); a folder "
            "written by eval.line_retrieval would work"
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
        output: the folder, which receives results.json, cases.jsonl, line_retrieval.png and
          line_depth.png.
        about: what was evaluated and how (checkpoint, trained length, seed, ...), for results.json
          and the plot's title.
        others: scores of other evaluations, by name, for the plot.
    """
    folder = pathlib.Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    scores = score(outcomes)
    depths = by_depth(outcomes)
    write_texts(
        folder,
        {
            "cases.jsonl": "".join(json.dumps(_outcome_json(each)) + "\n" for each in outcomes),
            "results.json": json.dumps(as_json(scores, about, depths), indent=2) + "\n",
        },
    )
    title = str(about.get("checkpoint", ""))
    plot(
        {title: scores, **(others or {})} if others else scores,
        folder / "line_retrieval.png",
        f"Line retrieval: {title}",
    )
    plot_depths(depths, folder / "line_depth.png", title)
    print_table(scores)
    return scores


def by_depth(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Returns accuracies and 95% Wilson intervals by depth, of the groups of `scoring.score`.

    The depth is the interval of the prompt, from depth_from to depth_to, where the requested line
    begins.
    """
    groups: dict[tuple[str, int, str, bool, int], list[Outcome]] = {}
    for outcome in outcomes:
        part = min(int(outcome.case.depth * DEPTHS), DEPTHS - 1)
        groups.setdefault((*group_of(outcome), part), []).append(outcome)
    rows = []
    for (family, lines, source, beyond, part), group in sorted(groups.items()):
        right = sum(outcome.right for outcome in group)
        low, high = wilson(right, len(group))
        rows.append(
            {
                "family": family,
                "source": source,
                "num_lines": lines,
                "beyond_trained_length": beyond,
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
    """Returns the content of results.json, which separates lengths beyond the trained one."""
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
        "scoring": "the generated text's last integer is the expected one; 95% Wilson interval",
        "within_trained_length": [row for row in rows if not row["beyond_trained_length"]],
        "beyond_trained_length": [row for row in rows if row["beyond_trained_length"]],
        "by_depth": depths,
    }


def print_table(scores: list[Score], console: "Console | None" = None) -> None:
    """Prints a table of at most 80 columns per family of keys."""
    from rich.text import Text

    console = console or printable.console()
    for family in dict.fromkeys(item.family for item in scores):
        table = printable.plain_table(f"Line retrieval, {family}")
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
    """Groups the scores of one curve: one family, within or beyond the trained length, and one
    source if two of the family have equal numbers of lines."""
    sides = ((item.family, item.num_lines, item.beyond_trained_length) for item in scores)
    apart = {family for (family, *_), count in collections.Counter(sides).items() if count > 1}
    groups: dict[tuple[str, bool], list[Score]] = {}
    for item in scores:
        name = f"{item.family}, {item.source}" if item.family in apart else item.family
        groups.setdefault((name, item.beyond_trained_length), []).append(item)
    return groups


def plot_depths(rows: list[dict[str, Any]], path: str | pathlib.Path, title: str = "") -> None:
    """Plots accuracy and interval against depth, a curve per source and number of lines; dashed
    with open markers beyond the trained length. The label has the source if two have equal numbers
    of lines."""
    from matplotlib.figure import Figure

    curves: dict[tuple[str, int, str, bool], list[dict[str, Any]]] = {}
    for row in rows:
        key = row["family"], row["num_lines"], row["source"], row["beyond_trained_length"]
        curves.setdefault(key, []).append(row)
    sources = collections.Counter(key[:2] for key in {key[:3] for key in curves})
    figure = Figure(figsize=(8, 4 + 0.2 * len(curves)), layout="constrained")
    axes = figure.subplots()
    for number, ((family, lines, source, beyond), group) in enumerate(curves.items()):
        pictures.curve(
            axes,
            [
                (row["depth_from"] + 0.5 / DEPTHS, row["accuracy"], row["low"], row["high"])
                for row in group
            ],
            **pictures.style(number),
            **_line_style(beyond),
            label=f"{family}, {lines:,} lines"
            + (f", {source}" if sources[family, lines] > 1 else "")
            + (BEYOND if beyond else ""),
        )
    axes.set(
        xlabel="depth of the line in the prompt",
        ylabel="accuracy (95% Wilson interval)",
        xlim=(0, 1),
        ylim=(-0.03, 1.03),
    )
    axes.grid(alpha=0.3)
    if rows:
        figure.legend(loc="outside lower center", fontsize="small")
    figure.suptitle(
        textwrap.fill(f"Line retrieval by depth  {title}".strip(), 80), fontsize="medium"
    )
    figure.savefig(path, dpi=120, metadata=PICTURE_METADATA)


def plot(
    scores: list[Score] | dict[str, list[Score]], path: str | pathlib.Path, title: str = ""
) -> None:
    """Plots accuracies with 95% intervals, and chance, against the number of lines.

    The axis of lines is logarithmic; its labels also give the mean number of prompt tokens. Each
    family of keys is a curve. A dictionary of scores by evaluation gives each evaluation a color
    and a marker.
    """
    from matplotlib.figure import Figure

    evaluations = scores if isinstance(scores, dict) else {"": scores}
    every = [item for group in evaluations.values() for item in group]
    names, styles = pictures.short_names(filter(None, evaluations)), dict[tuple[str, str], int]()
    drawn = [
        (name, key, part) for name in evaluations for key, part in curves(evaluations[name]).items()
    ]
    figure = Figure(figsize=(8, 4 + 0.2 * len(drawn)), layout="constrained")
    axes = figure.subplots()
    for name, (family, beyond), curve in drawn:
        number = styles.setdefault((name, family), len(styles))
        label = ": ".join(filter(None, (names.get(name), family)))
        _plot_curve(axes, curve, label, pictures.style(number), beyond)
    chances = {item.num_lines: item.chance for item in every}
    # With markers: a line of one number of lines would not be visible.
    axes.plot(
        *zip(*sorted(chances.items()), strict=True) if chances else ([], []), "k_:", label="chance"
    )
    _label_lines(axes, every)
    axes.set(ylabel="accuracy (95% Wilson interval)", ylim=(-0.03, 1.03))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize="small")
    if not isinstance(scores, dict) and len({item.family for item in scores}) > 1:
        title += "\ncurves differ in their keys and the prompt's end"
    figure.suptitle(
        "\n".join(textwrap.fill(line, 80) for line in title.split("\n")), fontsize="medium"
    )
    figure.savefig(path, dpi=120, metadata=PICTURE_METADATA)


def _plot_curve(
    axes: "Axes", scores: list[Score], label: str, style: dict[str, Any], beyond: bool
) -> None:
    """Plots one curve; dashed with open markers beyond the trained length."""
    pictures.curve(
        axes,
        sorted((item.num_lines, item.accuracy, item.low, item.high) for item in scores),
        **style,
        **_line_style(beyond),
        label=label + (BEYOND if beyond else ""),
    )


def _line_style(beyond: bool) -> dict[str, Any]:
    return {"linestyle": "--" if beyond else "-", "markerfacecolor": "white" if beyond else None}


def _label_lines(axes: "Axes", scores: list[Score]) -> None:
    """Makes the x axis logarithmic, labelled where there is room: lines above mean tokens."""
    tokens = {item.num_lines: item.mean_prompt_tokens for item in scores}
    axes.set_xscale("log")
    axes.minorticks_off()
    ticks: list[int] = []
    room = (max(tokens) / min(tokens)) ** (1 / 10) if tokens else 1.0
    for lines in sorted(tokens):
        if not ticks or lines >= ticks[-1] * room:
            ticks.append(lines)
    axes.set_xticks(ticks, [f"{lines:,}\n{tokens[lines]:,.0f}" for lines in ticks])
    axes.set_xlabel("lines, and below them the prompt's tokens (mean)")


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    """Returns a line of cases.jsonl; a hash of the prompt lets eval.compare pair answers."""
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
