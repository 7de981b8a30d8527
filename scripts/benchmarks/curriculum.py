"""A small model from scratch by a curriculum of lengths, and without one: finds one line among tens to thousands.

    python -m scripts.benchmarks.curriculum --output runs/curriculum

Trains configs/extension/lines_16k.yaml; and beside it the same model on its last stage's rows alone, for as many steps as take
the same time. Both answer questions about records that fill up to the trained length, whose keys and numbers no training text
has in any pair, and about longer ones. Whatever was finished is not done again: the same command goes on. Writes
docs/results/curriculum.json and docs/curriculum.png.
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from eval.line_report import plot, read
from eval.scoring import Score
from scripts.benchmarks.results import ROOT, measured, row, save
from scripts.benchmarks.retrieval import run, seconds

RECIPE = "configs/extension/lines_16k.yaml"
LIKE = "data/fixtures/line_cases.jsonl"
LINES = (20, 50, 100, 200, 500, 1000, 2000)  # and as many as fill the trained length
BEYOND = (3000, 3400)  # of at most 3,490 reserved keys
CASES, QUESTIONS = 96, 8  # of generated records; about each of them
NEW_TOKENS = 16
GOAL = "0.9 or more, by the interval"
DEPENDS_ON = (RECIPE, "data/synthetic/*.py", "data/fixtures/lines_tokenizer/*", "eval/line_*.py", "eval/runner.py",
              "model/decode.py", "model/cache.py")


def recipe() -> dict:
    """Returns the recipe's sections."""
    return yaml.safe_load((ROOT / RECIPE).read_text(encoding="utf-8"))


def train(output: Path) -> tuple[Path, Path]:
    """Trains with and without the curriculum, unless that is done; returns both runs' folders."""
    staged, alone = output / "curriculum", output / "alone"
    run("train.py", "--config", RECIPE, "--run_dir", str(staged))
    last = recipe()["stages"][-1]
    step = json.loads((staged / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])["wall_seconds"] / last["steps"]
    run("train.py", "--config", RECIPE, "--run_dir", str(alone), "--stages", "[]", "--data.context_length",
        str(last["context_length"]), "--train.steps", str(round(seconds(staged) / step)))
    return staged, alone


def evaluate(checkpoint: Path) -> list[Score]:
    """Answers the questions, unless that is done; returns the scores, by the number of lines."""
    folder = checkpoint / "lines"
    if not (folder / "results.json").exists():
        run("-m", "eval.line_retrieval", "--checkpoint", str(checkpoint), "--output", str(folder), "--like", LIKE, "--unseen",
            "--lines", *map(str, (*LINES, *BEYOND)), "--tokens", str(recipe()["stages"][-1]["context_length"]), "--count",
            str(CASES), "--questions", str(QUESTIONS), "--max-new-tokens", str(NEW_TOKENS), "--compute-dtype", "float32")
    return sorted(read(folder), key=lambda score: score.num_lines)


def save_result(staged: list[Score], alone: list[Score], took: float) -> None:
    """Writes the result: a row for each number of lines."""
    trained = recipe()["stages"][-1]["context_length"]
    rows, lines = {}, []
    for score, other in zip(staged, alone, strict=True):
        within = score.mean_prompt_tokens + NEW_TOKENS <= trained
        texts = [f"{each.right} of {each.cases} ({each.low:.2f} to {each.high:.2f})" for each in (score, other)]
        rows[f"lines_{score.num_lines}"] = row(
            f"{score.num_lines:,} lines, {score.mean_prompt_tokens:,.0f} tokens", f"{score.right} of {score.cases}",
            GOAL if within else "none: longer than any text trained on", score.low >= 0.9 if within else None)
        lines.append([f"{score.num_lines:,}", f"{score.mean_prompt_tokens:,.0f}", *texts])
    stages = ", ".join(f"{stage['steps']:,} steps of {stage['context_length']:,} tokens x {stage.get('batch_size', 1)}"
                       for stage in recipe()["stages"])
    facts = [f"Stages: {stages}; striped ring attention on 8 simulated devices. {took / 60:.0f} minutes, and as many without.",
             "A line, as in \"line amber-otter: 41234\", takes 7 tokens at most. Keys and numbers are in no training text.",
             "One training seed; 95% intervals are Wilson's."]
    tables = {"right answers": {"columns": ["lines", "tokens", "with the curriculum", "16,384 tokens alone"], "rows": lines}}
    save("curriculum", measured("A curriculum of lengths: a small model from scratch finds one line of many", rows,
                                "python -m scripts.benchmarks.curriculum", DEPENDS_ON, tables=tables, facts=facts,
                                seconds=took, note="docs/notes/retrieval.md"))


def main(argv: Sequence[str] | None = None) -> None:
    """Trains both, evaluates both, and saves."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.curriculum", description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="runs/curriculum", help="folder of the runs (default runs/curriculum)")
    args = parser.parse_args(argv)
    staged, alone = train(Path(args.output))
    scores = {"curriculum of lengths": evaluate(staged), "16,384 tokens alone": evaluate(alone)}
    save_result(*scores.values(), seconds(staged))
    plot(scores, ROOT / "docs" / "curriculum.png", "One line of many, by a model of 0.4 million parameters")


if __name__ == "__main__":
    main()
