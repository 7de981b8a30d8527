"""Evaluates SmolLM2-135M before and after practising retrieval: lines, a book, short tasks.

    python -m scripts.benchmarks.retrieval --model HF_DIR --like LINES.jsonl --text TEXT --book BOOK

Trains configs/extension/smollm2_lines_4k.yaml, with lines in the file's wording, also on the
beginning of a text. Evaluates generated records in that wording with (key, number) pairs absent
from all training texts (data/synthetic/split.py), the file's cases, the loss on another book, and
two short tasks from that book (scripts.make_short_tasks; needs requirements-eval.txt). The same
command continues after an interruption. Writes docs/results/retrieval.json and docs/retrieval.png.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import yaml

from data.outputs import output_file
from data.untrusted_files import read_text
from eval.line_report import plot, read
from eval.scoring import Score
from scripts.benchmarks.commands import python, read_json, training_seconds
from scripts.benchmarks.results import ROOT, renew, row
from trainer.options import command, option

RECIPE = "configs/extension/smollm2_lines_4k.yaml"
LINES = (10, 20, 40, 60)
CASES, QUESTIONS = 48, 8  # of generated records; about each of them
NEW_TOKENS = 48
LETTERS = 3_000_000  # of the training text: half of all tokens
SHORT_TASKS = ("book_next_sentence", "book_last_word")
GOAL = "accuracy +0.3, or at least 0.95; 95% intervals do not overlap"
GENERATED, OWN = "generated", "LongChat's own"


def evaluate(checkpoint: str, args: Options, name: str) -> Path:
    """Answers generated and given cases, unless done; returns the folder with the results."""
    folder = Path(args.output) / name
    if not (folder / "results.json").exists():
        python(
            "-m eval.line_retrieval --checkpoint {checkpoint} --output {folder} --like {like} "
            f"--lines {' '.join(map(str, LINES))} --count {CASES} --questions {QUESTIONS} "
            f"--cases {{like}} --limit {args.limit} --max-new-tokens {NEW_TOKENS} "
            "--compute-dtype float32",
            checkpoint=checkpoint,
            folder=folder,
            like=args.like,
        )
    return folder


def train(args: Options) -> Path:
    """Trains with lines in the file's wording and the text, unless done; returns the run."""
    folder, text = Path(args.output) / "run", Path(args.output) / "text.txt"
    passage = read_text(args.text)[:LETTERS]
    output_file(text, passage[:1000].encode()).write_text(passage, encoding="utf-8")
    recipe = (
        (ROOT / RECIPE)
        .read_text(encoding="utf-8")
        .replace("LINES.jsonl", args.like)
        .replace("BOOK.txt", str(text))
    )
    python(
        "train.py --config {recipe} --model.path {model} --run_dir {run} --data.sources {sources}",
        recipe=RECIPE,
        model=args.model,
        run=folder,
        sources=json.dumps(yaml.safe_load(recipe)["data"]["sources"]),
    )
    return folder


def book_losses(run_folder: Path, model: str, book: str, folder: Path) -> list[float]:
    """Returns the mean loss on a book before and after, in nats per token, to see whether text is
    forgotten.

    Args:
      model: the folder of the initial model.
      folder: keeps the measurements, in `book`.
    """
    table = folder / "book" / "loss_by_position.json"
    if not table.exists():
        python(
            "-m scripts.loss_by_position --config {recipe} --checkpoint {model} {run} "
            "--output {output} --batches 8 --split train --model.path {model} --stages [] "
            "--data.sources {sources} --data.held_out_fraction 0 --data.context_length 1024 "
            "--train.batch_size 1 --train.steps 8",
            recipe=RECIPE,
            model=model,
            run=run_folder,
            output=table.parent,
            sources=json.dumps([{"path": book, "format": "text"}]),
        )
    curves = read_json(table)["curves"]
    totals = [
        sum(bucket["loss_nats_per_target"] * bucket["targets"] for bucket in curve)
        for curve in curves.values()
    ]
    return [
        total / sum(bucket["targets"] for bucket in curve)
        for total, curve in zip(totals, curves.values(), strict=True)
    ]


def short_tasks(checkpoint: str, args: Options, name: str) -> dict[str, dict]:
    """Returns lm-eval's result of each short task from the book; makes and answers them unless
    done."""
    tasks, folder = Path(args.output) / "short_tasks", Path(args.output) / f"{name}_short"
    if not (folder / "results.json").exists():
        python("-m scripts.make_short_tasks {book} --output {tasks}", book=args.book, tasks=tasks)
        python(
            f"-m eval.harness --checkpoint {{checkpoint}} --tasks {','.join(SHORT_TASKS)} "
            "--include-path {tasks} --output {folder} --length 1024 --max-new-tokens 8 "
            "--compute-dtype float32",
            checkpoint=checkpoint,
            tasks=tasks,
            folder=folder,
        )
    rows = read_json(folder / "results.json")["results"]
    return {task: next(row for row in rows if row["task"] == f"{task} acc") for task in SHORT_TASKS}


def named(scores: list[Score], like: str) -> list[Score]:
    """Returns scores with families that distinguish the file's cases from generated ones."""
    return [
        dataclasses.replace(score, family=OWN if score.source == Path(like).name else GENERATED)
        for score in sorted(scores, key=lambda score: score.num_lines)
    ]


def apart(before: Score, after: Score) -> bool:
    """Whether the goal holds."""
    gained = after.accuracy >= min(before.accuracy + 0.3, 0.95)
    return gained and after.low > before.high


def save_result(
    before: list[Score],
    after: list[Score],
    book: list[float],
    short: list[dict[str, dict]],
    took: float,
) -> None:
    """Writes the result: a row for each number of lines, for the book, and for each short task.

    Args:
      short: results of the short tasks before and after.
    """
    rows = {}
    for old, new in zip(before, after, strict=True):
        assert (old.num_lines, old.cases) == (new.num_lines, new.cases)
        rows[f"lines_{old.num_lines}"] = row(
            f"SmolLM2-135M: one line of {old.num_lines} found, {old.mean_prompt_tokens:,.0f} "
            f"tokens, {old.family} cases, before -> after",
            f"{old.right} -> {new.right} of {new.cases}",
            GOAL,
            apart(old, new),
        )
    rows["book"] = row(
        "SmolLM2-135M: loss on another book, nats per token, before -> after",
        f"{book[0]:.3f} -> {book[1]:.3f}",
        "at most 0.05 more",
        book[1] <= book[0] + 0.05,
    )
    for task in SHORT_TASKS:
        first, last = (results[task] for results in short)
        texts = [
            f"{each['score']:.2f} ({each['low']:.2f} to {each['high']:.2f})"
            for each in (first, last)
        ]
        rows[task] = row(
            f"SmolLM2-135M: accuracy on {task}, {last['cases']} questions, before -> after",
            " -> ".join(texts),
            "within the interval before",
            first["low"] <= last["score"] <= first["high"],
        )
    renew("retrieval", rows, seconds=took)


def work(args: Options) -> None:
    """Evaluates, trains, evaluates again, and saves."""
    before = named(read(evaluate(args.model, args, "before")), args.like)
    trained = train(args)
    after = named(read(evaluate(str(trained), args, "after")), args.like)
    short = [
        short_tasks(checkpoint, args, name)
        for checkpoint, name in ((args.model, "before"), (str(trained), "after"))
    ]
    save_result(
        before,
        after,
        book_losses(trained, args.model, args.book, Path(args.output)),
        short,
        training_seconds(trained),
    )
    plot(
        {"before": before, "after": after},
        ROOT / "docs" / "retrieval.png",
        "Practice teaches SmolLM2-135M-Instruct to find one line among many",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    model: str = option("SmolLM2's folder, such as scripts.make_smollm2 makes")
    like: str = option("LongChat's file of 200 lines", metavar="FILE.jsonl")
    text: str = option("a text to train on, in addition to the exercises", metavar="TEXT.txt")
    book: str = option("another text, for the loss before and after", metavar="BOOK.txt")
    limit: int = option("cases of the file", 48)
    output: str = option("folder of the run and the evaluations", "runs/retrieval")


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
