"""Tunes SmolLM2-135M-Instruct on pairs that prefer short answers, and measures the effects.

    python -m scripts.benchmarks.preference --model HF_DIR --book BOOK.txt

Writes pairs (scripts.make_preferences), trains configs/preference/smollm2_dpo.yaml on them, and
trains it once more, killed twice with SIGKILL and resumed. Compares the answers to the held-out
prompts before and after training, and the loss on a book. The same command continues after an
interruption. Writes docs/results/preference.json.
"""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from scripts.benchmarks.commands import (
    ProcessFailed,
    python,
    read_json,
    read_lines,
    run_python,
    training_seconds,
)
from scripts.benchmarks.results import ROOT, renew, row
from scripts.benchmarks.retrieval import book_losses
from trainer.options import command, option

RECIPE = "configs/preference/smollm2_dpo.yaml"
NEW_TOKENS = 40
KILLS = (4, 14)  # logged steps after which the second run is killed: without a checkpoint, with one
ACCURACY, NATS = 0.9, 0.05  # goals
# What two runs of the same steps do not share.
TIMES = re.compile("seconds|per_second|mfu|gib")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    model: str = option("SmolLM2's folder, such as scripts.make_smollm2 makes")
    book: str = option("a text that is not trained on", metavar="BOOK.txt")
    output: str = option("folder of the pairs and runs", "runs/preference")


def training(args: Options, run: Path, prompts: list[str]) -> list[str]:
    """Returns Python's arguments that train the recipe in a folder."""
    folder = Path(args.output).resolve()
    return [
        "train.py",
        f"--config={RECIPE}",
        f"--model.path={args.model}",
        f"--data.path={folder / 'pairs/train.jsonl'}",
        f"--data.held_out_path={folder / 'pairs/held_out.jsonl'}",
        f"--data.prepared={folder / 'prepared'}",
        f"--run_dir={run}",
        f"--samples.prompts={json.dumps(prompts)}",
        f"--samples.new_tokens={NEW_TOKENS}",
    ]


def train_killed(words: list[str], run: Path) -> None:
    """Trains a run, which is killed after each of KILLS and resumed, unless that is done."""
    record = run.with_name(f"{run.name}.json")
    done = read_json(record) if record.exists() else []
    for step in KILLS[len(done) :]:
        print(f"kills {run} after step {step}", flush=True)
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT)
        while len(read_lines(run / "metrics.jsonl")) < step:
            if process.poll() is not None:
                raise ProcessFailed(words, f"ended with {process.returncode}")
            time.sleep(0.5)
        process.send_signal(signal.SIGKILL)
        process.wait()
        done = [*done, step]
        record.write_text(json.dumps(done), encoding="utf-8")
    run_python(words)


def same_metrics(runs: list[Path]) -> bool:
    """Whether two runs logged the same numbers, bit for bit, but for times and memory."""
    first, second = (
        [
            {name: value for name, value in line.items() if not TIMES.search(name)}
            for line in read_lines(run / "metrics.jsonl")
        ]
        for run in runs
    )
    return bool(first) and first == second


def same_checkpoints(runs: list[Path]) -> bool:
    """Whether the last checkpoints of two runs hold the same arrays, bit for bit."""
    from trainer.checkpoint.manifest import verify
    from trainer.checkpoint.readers import stored_arrays
    from trainer.checkpoint.store import CheckpointStore

    arrays = []
    for run in runs:
        store = CheckpointStore(run)
        path = store.path(store.steps()[-1])
        verify(path)
        arrays.append(
            {
                (item, name): np.asarray(array).tobytes()
                for item in ("model", "optimizer")
                for name, array in stored_arrays(path, item, verified=True).items()
            }
        )
    return bool(arrays[0]) and arrays[0] == arrays[1]


def words_of(answers: dict[str, str]) -> float:
    """Returns the mean number of words of answers."""
    return float(np.mean([len(answer.split()) for answer in answers.values()]))


def right(answers: dict[str, str], records: list[dict[str, str]]) -> int:
    """Returns how many answers have the word of the record's chosen completion."""
    wanted = {record["prompt"]: record["chosen"].rstrip(".") for record in records}
    return sum(
        re.search(rf"\b{re.escape(wanted[prompt])}\b", answer, re.IGNORECASE) is not None
        for prompt, answer in answers.items()
    )


def rows_and_facts(
    run: Path, records: list[dict[str, str]], book: list[float], bitwise: bool
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Returns the rows of the result, and some answers before and after.

    Args:
      book: mean loss on the book before and after, nats per token.
      bitwise: whether the killed run's metrics and last checkpoint are the other run's.
    """
    held_out = read_lines(run / "held_out.jsonl")[-1]
    samples = read_lines(run / "samples.jsonl")
    before, after = (
        {prompt: text for prompt, text in samples[i].items() if prompt != "step"} for i in (0, -1)
    )
    accuracy = held_out["held_out_rewards/accuracies"]
    lengths, correct = (
        [measure(answers) for answers in (before, after)]
        for measure in (words_of, lambda answers: right(answers, records))
    )
    change = book[1] - book[0]
    count = len(records)
    rows = {
        "accuracy": row(
            f"SmolLM2-135M by DPO: reward accuracy on {count} held-out pairs",
            f"{accuracy:.3f}",
            f"above {ACCURACY}",
            accuracy > ACCURACY,
        ),
        "words": row(
            f"SmolLM2-135M by DPO: words per answer to {count} held-out prompts (at most "
            f"{NEW_TOKENS} tokens), before -> after",
            f"{lengths[0]:.1f} -> {lengths[1]:.1f}",
            "fewer",
            lengths[1] < lengths[0],
        ),
        "right": row(
            f"SmolLM2-135M by DPO: correct answers to {count} held-out prompts, before -> after",
            f"{correct[0]} -> {correct[1]}",
            "no fewer (this goal was set after the run)",
            correct[1] >= correct[0],
        ),
        "book": row(
            "SmolLM2-135M by DPO: loss on another book, nats per token, before -> after",
            f"{book[0]:.3f} -> {book[1]:.3f}",
            f"within {NATS}",
            abs(change) <= NATS,
        ),
        "resumed": row(
            f"SmolLM2-135M by DPO, killed with -9 after steps {' and '.join(map(str, KILLS))} and "
            "resumed: metrics and last checkpoint",
            "the same bits" if bitwise else "different bits",
            "the same bits",
            bitwise,
        ),
    }
    return rows, [f"{prompt} {before[prompt]!r} -> {text!r}" for prompt, text in after.items()][::9]


def work(args: Options) -> None:
    """Makes the pairs, trains twice, measures and saves."""
    folder = Path(args.output).resolve()
    python("-m scripts.make_preferences {folder}", folder=folder / "pairs")
    records = read_lines(folder / "pairs" / "held_out.jsonl")
    prompts = [record["prompt"] for record in records]
    run, killed = folder / "run", folder / "killed"
    run_python(training(args, run, prompts))
    train_killed(training(args, killed, []), killed)
    merged = folder / "merged"
    if not merged.exists():
        python("-m scripts.export_hf {run} {merged} --merge", run=run, merged=merged)
    book = book_losses(merged, args.model, args.book, folder)
    bitwise = same_metrics([run, killed]) and same_checkpoints([run, killed])
    rows, facts = rows_and_facts(run, records, book, bitwise)
    renew("preference", rows, seconds=training_seconds(run), facts=facts)


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
