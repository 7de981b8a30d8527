"""Trains a small model from scratch to find one line, with and without a curriculum of lengths.

    python -m scripts.benchmarks.curriculum --output runs/curriculum

Trains configs/extension/lines_16k.yaml and, for comparison, the same model only on its last stage's
rows, for the same time. Both answer questions about records up to the trained length, with keys and
numbers absent from all training texts, and about longer records. The same command continues after
an interruption. Writes docs/results/curriculum.json and docs/curriculum.png.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import yaml

from eval.line_report import plot, read
from eval.scoring import Score
from scripts.benchmarks.commands import python, read_lines, training_seconds
from scripts.benchmarks.results import ROOT, renew, row
from trainer.options import command, option

RECIPE = "configs/extension/lines_16k.yaml"
LIKE = "data/fixtures/line_cases.jsonl"
# 2,700 lines fill the trained length; 3,490 keys are in no training text.
LINES = (20, 50, 100, 200, 500, 1000, 2000, 2700, 3400)
LONGER = (5400, 10800)  # of keys and numbers from training texts, but in new pairs
CASES, LONGER_CASES, QUESTIONS = 96, 48, 8  # of generated records; about each of them
NEW_TOKENS = 16
GOAL = "0.9 or more, by the 95% interval"


def recipe() -> dict:
    """Returns the recipe's sections."""
    return yaml.safe_load((ROOT / RECIPE).read_text(encoding="utf-8"))


def train_staged(folder: Path) -> Path:
    """Trains the recipe, unless done; returns the run's folder."""
    python("train.py --config {recipe} --run_dir {run}", recipe=RECIPE, run=folder)
    return folder


def train_alone(folder: Path, staged: Path) -> Path:
    """Trains only at the last stage's length for the time of all stages, unless done.

    Returns the run's folder.
    """
    last = recipe()["stages"][-1]
    step = read_lines(staged / "metrics.jsonl")[-1]["wall_seconds"] / last["steps"]
    python(
        "train.py --config {recipe} --run_dir {run} --stages [] "
        f"--data.context_length {last['context_length']} "
        f"--train.steps {round(training_seconds(staged) / step)}",
        recipe=RECIPE,
        run=folder,
    )
    return folder


def evaluate(checkpoint: Path) -> list[Score]:
    """Answers the questions, unless done; returns the scores by number of lines."""
    scores: list[Score] = []
    for name, lines, cases, flag in (
        ("lines", LINES, CASES, "--unseen"),
        ("longer", LONGER, LONGER_CASES, ""),
    ):
        folder = checkpoint / name
        if not (folder / "results.json").exists():
            python(
                "-m eval.line_retrieval --checkpoint {checkpoint} --output {folder} --like {like} "
                f"--lines {' '.join(map(str, lines))} --count {cases} --questions {QUESTIONS} "
                f"--max-new-tokens {NEW_TOKENS} --compute-dtype float32 {flag}",
                checkpoint=checkpoint,
                folder=folder,
                like=LIKE,
            )
        scores += sorted(read(folder), key=lambda score: score.num_lines)
    return [dataclasses.replace(score, family="lines") for score in scores]  # one curve in the plot


def save_result(staged: list[Score], alone: list[Score], took: float) -> None:
    """Writes the result: a row for each number of lines.

    Args:
      staged, alone: scores with and without the curriculum, of the same cases; took: seconds of all
        stages.
    """
    trained = recipe()["stages"][-1]["context_length"]
    rows = {}
    for score, other in zip(staged, alone, strict=True):
        within = score.mean_prompt_tokens + NEW_TOKENS <= trained
        rows[f"lines_{score.num_lines}"] = row(
            f"one line of {score.num_lines:,} found, {score.mean_prompt_tokens:,.0f} tokens",
            f"{score.right} of {score.cases} (trained only at {trained:,} tokens: {other.right})",
            GOAL if within else "none: longer than any training text",
            score.low >= 0.9 if within else None,
        )
    renew("curriculum", rows, seconds=took)


def work(args: Options) -> None:
    """Trains both, evaluates both, and saves."""
    staged = train_staged(Path(args.output) / "curriculum")
    grown = evaluate(staged)
    at_once = evaluate(train_alone(Path(args.output) / "alone", staged))
    scores = {"growing lengths": grown, "16,384 tokens from the start": at_once}
    save_result(grown, at_once, training_seconds(staged))
    plot(
        scores,
        ROOT / "docs" / "curriculum.png",
        "A small model learns to retrieve only when training lengths grow",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    output: str = option("folder of the runs", "runs/curriculum")


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
