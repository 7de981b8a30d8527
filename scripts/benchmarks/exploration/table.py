"""The table of scripts.benchmarks.exploration: scores, intervals and verdicts of finished cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from data.trajectories.tasks import TASKS
from eval.scoring import RESAMPLES
from scripts.benchmarks import results
from scripts.benchmarks.exploration.cells import (
    BASELINES,
    LONGEST,
    METHODS,
    PLAYED,
    PROTOCOLS,
    RECIPE,
    SHORTEST,
    Cell,
)
from scripts.benchmarks.exploration.figure import curves, draw
from scripts.benchmarks.results import Result, load, renew, row, save

NAME = "exploration"
TITLE = "In-context reinforcement learning on episodes of exploration without a task"
CELLS = "returns of the cells by evaluation seed, and of each episode"
SCORES = "returns, mean over seeds and 95% bootstrap intervals over training and evaluation seeds"
CELL = ("task", "protocol", "method", "training seed", "requested return")
VALUES = ("last", "best", "mean")
BY_EPISODE = ("episodes", "deviations of episodes", "attention by episode, %")
FACTS = [
    "Episodes of scripts.collect_trajectories --explorer, collected with dm_control: not ExoRL's.",
    "Our protocol: a mixture of eight actions, no action tokens, loss on a context's last episode. "
    "The paper's: one action with squared error, action tokens, loss on all. Both condition on the "
    "best return in the data.",
    f"{PLAYED} consecutive episodes are played; a new context begins after N.",
    "Steps of 16 episodes: BC-10% and DT 1000, AT N = 4 800; N = 16 continues from it with 150 "
    "steps of 16, N = 32 with 80 of 32.",
    "Sizes, seeds and protocols were chosen before any result was seen.",
    "CPU hours are those of the cell's training and evaluation, without earlier trainings.",
]
DEPENDS_ON = (
    "data/trajectories/*.py",
    "model/agentic.py",
    "model/cache.py",
    "trainer/trajectories.py",
    "eval/in_context.py",
    RECIPE,
)


class Answer(NamedTuple):
    """The result of an evaluation.

    Attributes:
      requested: the return that the model is conditioned on, in words.
      result: eval.in_context's result.
      cpu_hours: CPU hours of the training and the evaluation.
    """

    requested: str
    result: dict[str, Any]
    cpu_hours: float


def _line(cell: Cell, answer: Answer) -> list[str]:
    """Returns an evaluation's line of the table CELLS."""
    result = answer.result
    return [
        *(cell.task, cell.protocol, cell.method, str(cell.seed), answer.requested),
        *(_numbers(result["scores"][name]["by_seed"]) for name in VALUES),
        _numbers(np.mean(result["returns"], axis=0)),
        _numbers(np.std(result["returns"], axis=0)),
        _numbers(100 * np.mean(result["attention"], axis=0)) if "attention" in result else "",
        *(f"{result[name]:.1f}" for name in ("data_best", "data_mean")),
        f"{answer.cpu_hours:.2f}",
    ]


def _numbers(values: Any) -> str:
    return " ".join(f"{value:.1f}" for value in values)


def nested_bootstrap(values: Float[np.ndarray, "S E"]) -> tuple[float, float]:
    """Returns the mean's 95% interval; resamples training seeds, and evaluation seeds in each."""
    generator = np.random.default_rng(0)
    seeds, evaluations = values.shape
    rows = generator.integers(seeds, size=(RESAMPLES, seeds, 1))
    columns = generator.integers(evaluations, size=(RESAMPLES, seeds, evaluations))
    means = values[rows, columns].mean((1, 2))
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def summarize(lines: list[list[str]]) -> dict[tuple[str, ...], dict[str, Any]]:
    """Returns (task, protocol, method, requested return) -> mean and interval of each of VALUES."""
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for line in lines:
        groups.setdefault((*line[:3], line[4]), []).append(line)
    summaries = {}
    for key, group in groups.items():
        summary: dict[str, Any] = {"lines": group}
        for column, name in enumerate(VALUES, len(CELL)):
            values = np.array([[float(x) for x in line[column].split()] for line in group])
            summary[name] = (float(values.mean()), *nested_bootstrap(values))
        summaries[key] = summary
    return summaries


def stored_lines() -> list[list[str]]:
    """Returns the lines of the table CELLS in the result, if there is one."""
    if not (results.FOLDER / f"{NAME}.json").exists():
        return []
    return load(NAME).tables.get(CELLS, {}).get("rows", [])


def is_stored(cell: Cell) -> bool:
    """Returns whether the result has all of a cell's evaluations."""
    keys = {tuple(line[: len(CELL)]) for line in stored_lines()}
    own = (cell.task, cell.protocol, cell.method, str(cell.seed))
    return all((*own, request) in keys for request in cell.requests)


def save_result(answers: Mapping[Cell, Sequence[Answer]], text: str) -> None:
    """Stores the finished cells, and keeps cells that were measured elsewhere."""
    finished = [
        _line(cell, answer) for cell, evaluations in answers.items() for answer in evaluations
    ]
    stored = stored_lines()
    if not stored:
        save(NAME, Result(TITLE, depends_on=dict.fromkeys(DEPENDS_ON, "")))
    new = {tuple(line[: len(CELL)]) for line in finished}
    lines = finished + [line for line in stored if tuple(line[: len(CELL)]) not in new]
    lines.sort(key=_order)
    summaries = summarize(lines)
    scores = [
        [
            *key,
            *("{:.1f} ({:.1f} to {:.1f})".format(*summary[name]) for name in VALUES),
            *summary["lines"][0][-3:-1],
            str(len(summary["lines"])),
            f"{sum(float(line[-1]) for line in summary['lines']):.2f}",
        ]
        for key, summary in summaries.items()
    ]
    columns = [*CELL, *VALUES, *BY_EPISODE, "best in data", "mean of data", "CPU hours"]
    titles = [name for name in CELL if name != "training seed"]
    about = [f"{name} of {PLAYED}" for name in VALUES]
    tables = {
        SCORES: {
            "columns": [*titles, *about, *columns[-3:-1], "training seeds", columns[-1]],
            "rows": scores,
        },
        CELLS: {"columns": columns, "rows": lines},
    }
    hours = sum(float(line[-1]) for line in lines)
    facts = [*FACTS, f"{len(lines)} evaluations are measured, in {hours:.1f} CPU hours."]
    renew(NAME, dict(_rows(summaries)), command=text, facts=facts, tables=tables)


def draw_result() -> None:
    """Draws the stored result next to docs/results, as docs/exploration.png; nothing if there is
    none."""
    if lines := stored_lines():
        by_task = curves(load(NAME).tables[CELLS]["columns"], lines)
        draw(by_task, results.FOLDER.parent / f"{NAME}.png")


def _order(line: list[str]) -> tuple[int, ...]:
    task, protocol, method, seed, request = line[: len(CELL)]
    return (
        *(list(names).index(name) for names, name in ((PROTOCOLS, protocol), (TASKS, task))),
        *(METHODS.index(method), int(request != "best in the data"), int(seed)),
    )


def _rows(summaries: dict[tuple[str, ...], dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields the result's rows: the last episode of each method, per task and protocol."""
    for protocol in PROTOCOLS:
        for task in TASKS:
            last = {
                method: summaries[key]["last"]
                for method in METHODS
                if (key := (task, protocol, method, "best in the data")) in summaries
            }
            if not last:
                continue
            figures = "; ".join(f"{method} {score[0]:.0f}" for method, score in last.items())
            name = task if protocol == "ours" else f"{task}_paper"
            about = "our" if protocol == "ours" else protocol
            what = f"{task}: return of the last of {PLAYED} episodes, {about} protocol"
            goal = "N = 32 above both baselines, at least N = 4"
            if missing := [m for m in (*BASELINES, SHORTEST, LONGEST) if m not in last]:
                needs = f"the same command for {', '.join(missing)}; so far {figures}"
                yield name, {**row(what, needs, goal), "verdict": "not measured"}
                continue
            above = all(last[LONGEST][1] > last[method][2] for method in BASELINES)
            yield name, row(what, figures, goal, above and last[LONGEST][0] >= last[SHORTEST][0])
