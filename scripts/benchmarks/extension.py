"""Runs SmolLM2-135M at 16,384 tokens, twice its length: as is, with RoPE rescaled, and trained.

    python -m scripts.benchmarks.extension --model HF_DIR --text TEXT.txt --book BOOK.txt

Trains configs/smollm2_16k.yaml on a text, and predicts another book from rows of 16,384 tokens. The
targets have at least 8,192 tokens before them, and are predicted three times: from at most 1,024
and 8,192 preceding tokens, and from all of them. If a model uses the whole row, its loss falls each
time. The same command continues after an interruption. Writes docs/results/extension.json.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from scripts.benchmarks.commands import python, read_json, training_seconds
from scripts.benchmarks.results import ROOT, renew, row
from trainer.options import command, option

RECIPE = "configs/smollm2_16k.yaml"
KNOWN, LENGTH = 8192, 16384  # tokens of the model's original training; of a row here
PIECES = (1024, KNOWN)
ROWS = 4  # of the book
FALLS, FALLS_NOT = "loss falls with context, by the interval", "loss does not fall with context"
GOALS = {"as it is": FALLS_NOT, "RoPE rescaled": "", "rescaled and trained": FALLS}


def train(args: Options) -> Path:
    """Trains the recipe on the text, unless done; returns the run's folder."""
    folder = Path(args.output) / "run"
    source = yaml.safe_load((ROOT / RECIPE).read_text(encoding="utf-8"))["data"]["sources"][0]
    python(
        "train.py --config {recipe} --model.path {model} --run_dir {run} --data.sources {sources}",
        recipe=RECIPE,
        model=args.model,
        run=folder,
        sources=json.dumps([{**source, "path": args.text}]),
    )
    return folder


def losses(
    checkpoint: str, args: Options, name: str, overrides: dict[str, Any] | None = None
) -> dict:
    """Predicts the book unless done; returns the losses of targets beyond KNOWN tokens.

    Args:
      checkpoint: a run or a Hugging Face folder; name: its folder within --output; overrides: RoPE
        that replaces the checkpoint's.

    Returns:
      Two dictionaries of Buckets.rows, in nats: `losses` by the length of pieces in tokens (LENGTH
      for the whole text), and `gains` of the whole text over pieces of that length.
    """
    table = Path(args.output) / name / "loss_by_position.json"
    if not table.exists():
        python(
            "-m scripts.loss_by_position --config {recipe} --checkpoint {checkpoint} "
            f"--output {{output}} --batches {ROWS} --split train "
            f"--without-earlier {' '.join(map(str, PIECES))} --data.sources {{sources}} "
            "--model.overrides {overrides}",
            recipe=RECIPE,
            checkpoint=checkpoint,
            output=table.parent,
            sources=json.dumps([{"path": args.book, "format": "text"}]),
            overrides=json.dumps(overrides or {}),
        )
    result = read_json(table)
    curves, gains = (
        [
            next(bucket for bucket in curve if bucket["tokens_before_from"] == KNOWN)
            for curve in result[kind].values()
        ]
        for kind in ("curves", "gains")
    )
    return {
        "losses": dict(zip((LENGTH, *PIECES), curves, strict=True)),
        "gains": dict(zip(PIECES, gains, strict=True)),
    }


def gain(bucket: dict) -> str:
    """Returns the mean of a row of Buckets.rows, in nats, with its 95% interval."""
    return f"{bucket['loss_nats_per_target']:+.3f} +- {1.96 * bucket['standard_error']:.3f}"


def is_falling(model: dict) -> bool:
    """Returns whether a model predicts better from longer pieces, by more than the interval."""
    bucket = model["gains"][KNOWN]
    ordered = [model["losses"][tokens]["loss_nats_per_target"] for tokens in (*PIECES, LENGTH)]
    return (
        ordered == sorted(ordered, reverse=True)
        and bucket["loss_nats_per_target"] > 1.96 * bucket["standard_error"]
    )


def save_result(models: dict[str, dict], took: float) -> None:
    """Writes the result: the gain of the whole text over the model's trained length.

    Args:
      models: what `losses` returns, by the names of GOALS; took: seconds of the training.
    """
    rows = {}
    for name, model in models.items():
        held = {FALLS: is_falling(model), FALLS_NOT: not is_falling(model), "": None}[GOALS[name]]
        label = f"SmolLM2 {name}: nats per token gained with 16,384 tokens of context over 8,192"
        rows[name.lower().replace(" ", "_")] = row(
            label, gain(model["gains"][KNOWN]), GOALS[name], held
        )
    renew("extension", rows, seconds=took)


def work(args: Options) -> None:
    """Measures the model unchanged and rescaled, trains, measures again, and saves."""
    recipe = yaml.safe_load((ROOT / RECIPE).read_text(encoding="utf-8"))
    before = (
        losses(args.model, args, "as_it_is"),
        losses(args.model, args, "rescaled", recipe["model"]["overrides"]),
    )
    trained = train(args)
    models = dict(zip(GOALS, (*before, losses(str(trained), args, "trained")), strict=True))
    save_result(models, training_seconds(trained))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    model: str = option("SmolLM2's folder, such as scripts.make_smollm2 makes")
    text: str = option("a text to train on", metavar="TEXT.txt")
    book: str = option("another, to predict", metavar="BOOK.txt")
    output: str = option("folder of the run and the tables", "runs/extension")


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
