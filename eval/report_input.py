"""Reads a run's folder for its report: metrics, evaluations with cases, losses by position."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.errors import UserError, first_line
from data.untrusted_files import read_json, read_text
from trainer.config.fields import check_kinds
from trainer.config.yaml_text import InvalidYAML, parse
from trainer.reporting.rows import is_number, read_rows, read_steps
from trainer.run.bucket import in_bucket
from trainer.run.directory import EARLIER_STAGES
from trainer.run.results import evaluated, is_of_run

CONFIG = "config.yaml"
RESULTS = "results.json"
CURVES = "loss_by_position.json"
# Metrics that count from the beginning of the run or of the stage.
COUNTS = ("step", "tokens_seen", "compile_seconds")


@dataclasses.dataclass(frozen=True)
class Score:
    """A row of any evaluation's results.

    Attributes:
      size: length of the context, in `unit`.
      low, high: ends of the interval; None without one.
      folder: of the evaluation, if several in a run have rows with the same key; else "".
    """

    evaluation: str
    task: str
    size: int
    unit: str
    depth: float | None
    cases: int
    score: float
    low: float | None
    high: float | None
    beyond: bool
    folder: str = ""

    def __post_init__(self) -> None:
        """Raises TypeError for a value of the wrong kind, since files may hold anything."""
        for name in ("size", "cases", "score", "low", "high"):
            value = getattr(self, name)
            if value is None and name in ("low", "high"):
                continue
            if not (is_number(value) and math.isfinite(value)):
                raise TypeError(f"{name} is {value!r}, not a number")
        if self.depth is not None and not (is_number(self.depth) and math.isfinite(self.depth)):
            raise TypeError(f"depth is {self.depth!r}, not a number")
        if not (isinstance(self.evaluation, str) and isinstance(self.task, str)):
            raise TypeError(f"{self.evaluation!r}, {self.task!r} are not names")

    @property
    def key(self) -> tuple:
        """Identifies rows of two runs to compare: (evaluation, task, folder, unit, size, depth).

        A run may have two scores of one key, within and beyond its trained length.
        """
        return (
            self.evaluation,
            self.task,
            self.folder,
            self.unit,
            self.size,
            -1.0 if self.depth is None else self.depth,
        )

    @property
    def length(self) -> str:
        """The length as text; empty for a task of lm-eval, which has none."""
        return f"{self.size:,} {self.unit}" if self.size else ""

    @property
    def interval(self) -> str:
        """The interval as text; "none" without one."""
        return "none" if self.low is None else f"{self.low:.2f} to {self.high:.2f}"

    @property
    def label(self) -> str:
        """The task, and the folder if needed."""
        return f"{self.task} ({self.folder})" if self.folder else self.task


@dataclasses.dataclass(frozen=True)
class EvaluationResults:
    """One results.json, and the cases next to it."""

    path: Path
    scores: list[Score]
    about: dict[str, Any]
    samples: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Run:
    """The contents of a run's folder.

    Attributes:
      config: of the run, or of its last stage that has begun.
      logs: the rows of each JSONL file of metrics, by name, over all stages.
      curves: losses by position, by the checkpoint's name.
    """

    folder: Path
    config: dict[str, Any]
    logs: dict[str, list[dict[str, Any]]]
    evaluations: list[EvaluationResults]
    curves: dict[str, list[dict[str, Any]]]

    @property
    def name(self) -> str:
        """Its folder's name, which the report shows."""
        return self.folder.absolute().name

    @property
    def location(self) -> str:
        """The run's location: a bucket if its configuration says so, else its folder."""
        run_dir = str(self.config.get("run_dir") or "")
        return run_dir if in_bucket(run_dir) else str(self.folder)

    def folder_of(self, evaluation: EvaluationResults) -> str:
        """Returns an evaluation's folder, relative to the run's folder if it is inside."""
        return _shown(evaluation.path.parent, self.folder)


def read_run(folder: Path, evaluations: Sequence[Path] = ()) -> Run:
    """Reads a run's folder, and evaluations in other folders.

    A warning names results of other models in the run's folder.

    Raises:
      UserError: it is not a run, a file cannot be read, or `evaluations` have results of another
        model.
    """
    stages = _stage_folders(folder)
    if not stages:
        raise UserError(
            f"{folder}: not a run (config.yaml is missing); a folder written by train.py would work"
        )
    for path in evaluations:
        if not path.is_dir():
            raise UserError(f"--evaluations: {path} is not a folder")
    found = {root: _result_files(root) for root in (*evaluations, folder)}
    # By the resolved path, since --evaluations may name folders of the run.
    files = sorted(
        {
            os.path.realpath(path): (path, root) for root, paths in found.items() for path in paths
        }.values()
    )
    results = [
        evaluation
        for path, root in files
        if path.name == RESULTS and (evaluation := _evaluation(path, root))
    ]
    for evaluation in results:
        _check_model(evaluation, folder)
    curves = _curves([pair for pair in files if pair[0].name == CURVES], folder)
    return Run(folder, _config(stages[-1] / CONFIG, folder), _logs(stages, folder), results, curves)


def _shown(folder: Path, run: Path) -> str:
    """Returns a folder, relative to the run's folder if it is inside."""
    return str(folder.relative_to(run) if folder.is_relative_to(run) else folder)


def _curves(files: Sequence[tuple[Path, Path]], run: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the losses by position in files, by name; folders tell apart equal names.

    Args:
      files: each with the folder that was searched.

    Raises:
      UserError: a file cannot be read, or has something else.
    """
    found = []
    for path, root in files:
        losses = _json(path, root).get("curves", {})
        if not (isinstance(losses, dict) and all(map(_is_curve, losses.values()))):
            raise UserError(
                f"{path}: its curves are not tables of losses; without it, the report can be made"
            )
        found += [(name, _shown(path.parent, run), rows) for name, rows in losses.items()]
    counts = collections.Counter(name for name, _, _ in found)
    return {
        f"{name} ({folder})" if counts[name] > 1 else name: rows for name, folder, rows in found
    }


def _result_files(root: Path) -> list[Path]:
    """Returns the files of results below a folder; a warning names folders that may not be read."""

    def warn(error: OSError) -> None:
        print(
            f"warning: {error.filename}: cannot be read ({error.strerror}); evaluations in it are "
            "not in the report",
            file=sys.stderr,
        )

    return [
        Path(folder, name)
        for folder, _, names in os.walk(root, onerror=warn)
        for name in {RESULTS, CURVES}.intersection(names)
    ]


def _is_curve(rows: Any) -> bool:
    """Returns whether these are losses by position."""
    names = ("tokens_before_from", "tokens_before_to", "loss_nats_per_target")
    return isinstance(rows, list) and all(
        isinstance(row, dict)
        and all(is_number(row.get(name)) for name in names)
        and all(0 <= row[name] < math.inf for name in names[:2])
        for row in rows
    )


def _check_model(evaluation: EvaluationResults, run: Path) -> None:
    """Refuses an evaluation of a model other than the run's, or warns within the run's folder.

    Raises:
      UserError: such an evaluation outside the run's folder.
    """
    if is_of_run(evaluation.about, run):
        return
    found = (
        f"{evaluation.path}: evaluates {evaluated(evaluation.about)}, which is not a checkpoint of "
        f"{run}"
    )
    if not evaluation.path.resolve().is_relative_to(run.resolve()):
        raise UserError(f"--evaluations: {found}; an evaluation of --checkpoint {run} would work")
    print(f"warning: {found}; the report shows it anyway", file=sys.stderr)


def _config(path: Path, folder: Path) -> dict[str, Any]:
    try:
        config = parse(read_text(path, folder), str(path))
    except (OSError, ValueError, InvalidYAML) as error:
        raise UserError(
            f"{path}: cannot be read ({first_line(error)}); the one written by train.py would work"
        ) from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: has no sections; the one written by train.py would work")
    check_kinds(config, str(path))
    return config


def _stage_folders(folder: Path) -> list[Path]:
    """Returns the folders of a run's stages that have begun, in order, or the run's folder."""
    earlier = sorted(
        (folder / EARLIER_STAGES).glob("*"), key=lambda path: (len(path.name), path.name)
    )
    return [stage for stage in (*earlier, folder) if (stage / CONFIG).exists()]


def _logs(stages: Sequence[Path], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of each JSONL file of metrics, with counts continued over the stages."""
    logs: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    before: dict[str, float] = dict.fromkeys(COUNTS, 0)
    for stage in stages:
        ended = dict(before)
        for path in sorted(stage.glob("*.jsonl")):
            rows = [
                row
                | {name: row[name] + before[name] for name in COUNTS if is_number(row.get(name))}
                for row in read_steps(path, folder)
            ]
            ended |= {
                name: max(ended[name], row[name])
                for row in rows
                for name in COUNTS
                if is_number(row.get(name))
            }
            if rows:
                logs[path.stem] += rows
        before = ended
    return dict(logs)


def _json(path: Path, folder: Path) -> dict[str, Any]:
    try:
        content = read_json(path, folder)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); without it, the report can be made"
        ) from None
    if not isinstance(content, dict):
        raise UserError(
            f"{path}: found {type(content).__name__} where a table is needed; without it, the "
            "report can be made"
        )
    return content


def _evaluation(path: Path, folder: Path) -> EvaluationResults | None:
    """Returns the evaluation of a results.json, or None for one of another kind.

    Raises:
      UserError: it cannot be read or is incomplete.
    """
    content = _json(path, folder)
    try:
        return _evaluation_of(path, folder, content)
    except KeyError as error:
        raise UserError(
            f"{path}: a result has no {error}; without this file, the report can be made"
        ) from None
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: not an evaluation's results ({first_line(error)}); without it, the "
            "report can be made"
        ) from None


def _evaluation_of(path: Path, folder: Path, content: dict[str, Any]) -> EvaluationResults | None:
    if "results" in content and "evaluation" in content:
        scores = _scores(content)
    elif "within_trained_length" in content:
        scores = _line_scores(content)
    elif "returns" in content and "scores" in content:
        scores = _scores_in_context(content)
        parts = ("returns", "scores", "attention")
        content = {"about": {name: x for name, x in content.items() if name not in parts}}
    else:
        return None
    cases = path.parent / "cases.jsonl"
    rows = read_rows(cases, folder) if cases.exists() else []
    if not isinstance(about := content.get("about", {}), dict):
        raise TypeError("about is not a table")
    if not isinstance(about.get("command", []), list):
        raise TypeError("command is not a list")
    return EvaluationResults(path, scores, about, rows)


def _scores(content: dict[str, Any]) -> list[Score]:
    """Returns the scores in the results of needles, RULER, co-reference or lm-eval."""
    return [
        Score(
            content["evaluation"],
            row["task"],
            row["tokens"],
            "tokens",
            row["depth"],
            row["cases"],
            row["score"],
            row["low"],
            row["high"],
            row["beyond_trained_length"],
        )
        for row in content["results"]
    ]


def _line_scores(content: dict[str, Any]) -> list[Score]:
    """Returns the scores in the results of line retrieval, over all depths and by depth."""
    scores = [
        _line_score(row, f"{row['family']} ({row['source']})", row["beyond_trained_length"])
        for row in content["within_trained_length"] + content["beyond_trained_length"]
    ]
    return scores + [
        _line_score(
            row,
            # Rows of earlier versions lack the source and the side of the trained length.
            row["family"] + (f" ({row['source']})" if "source" in row else "") + ", by depth",
            row.get("beyond_trained_length", False),
            row["depth_from"],
        )
        for row in content.get("by_depth", ())
    ]


def _line_score(row: dict[str, Any], task: str, beyond: bool, depth: float | None = None) -> Score:
    """Returns the score in a row of line retrieval's results."""
    return Score(
        "line retrieval",
        task,
        row["num_lines"],
        "lines",
        depth,
        row["cases"],
        row["accuracy"],
        row["low"],
        row["high"],
        beyond,
    )


def _scores_in_context(content: dict[str, Any]) -> list[Score]:
    """Returns the mean returns in the results of eval.in_context; their cases are its seeds."""
    return [
        Score(
            "returns in context",
            f"{content['task']}, {name} episode",
            0,
            "",
            None,
            len(content["returns"]),
            row["mean"],
            low,
            high,
            False,
        )
        for name, row in content["scores"].items()
        for low, high in [row["interval"] or (None, None)]
    ]


def scores_by_run(runs: Sequence[Run]) -> list[list[Score]]:
    """Returns each run's scores; folders tell apart those with the same key."""
    repeated = set()
    for run in runs:
        counts = collections.Counter(
            key
            for evaluation in run.evaluations
            for key in {score.key for score in evaluation.scores}
        )
        repeated |= {key for key, count in counts.items() if count > 1}
    return [
        [
            dataclasses.replace(score, folder=run.folder_of(evaluation))
            if score.key in repeated
            else score
            for evaluation in run.evaluations
            for score in evaluation.scores
        ]
        for run in runs
    ]
