"""Loss against a token's place in its text: does a model predict better with more of a long text before it?

    python -m scripts.loss_by_position --config RECIPE.yaml --checkpoint DIR_OR_HF [...] --output DIR [--section.field ...]

The recipe says which data are measured, how they are packed and on which mesh; `model.path` is each checkpoint in turn. A
target's place is the number of tokens before it in its document and row, in buckets of powers of two. Writes
loss_by_position.json and loss_by_position.png to --output. Measured is the held-out split where the recipe has one. Rows of
the training split begin at --skip: give the steps that were trained, so that only what the model has not seen is measured.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path

import numpy as np

from data.paths import output_folder
from trainer import entry


@dataclasses.dataclass
class Buckets:
    """Weighted losses by place: bucket k holds the targets with 2^k .. 2^(k+1) - 1 tokens before them."""

    count: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(32))
    total: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(32))
    squares: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(32))

    def add(self, losses: np.ndarray, positions: np.ndarray, weights: np.ndarray) -> None:
        """Counts the targets of a batch, arrays of one shape in any order; positions: of the token before the target."""
        here = weights > 0
        # frexp is exact where a logarithm of a power of two may round down.
        place = np.frexp(positions[here] + 1.0)[1] - 1
        losses = losses[here].astype(np.float64)
        for sums, values in ((self.count, np.ones_like(losses)), (self.total, losses), (self.squares, losses**2)):
            sums += np.bincount(place, values, minlength=len(sums))

    def rows(self) -> list[dict]:
        """A row for each bucket with a target: its places, targets, mean loss in nats, and the mean's standard error as if
        the targets were independent (neighbours are not: the truth is somewhat wider)."""
        rows = []
        for k in np.flatnonzero(self.count):
            count, mean = self.count[k], self.total[k] / self.count[k]
            variance = max(self.squares[k] / count - mean**2, 0.0)
            rows.append({"tokens_before_from": 2**int(k), "tokens_before_to": 2**(int(k) + 1) - 1, "targets": int(count),
                         "loss_nats_per_target": float(mean),
                         "standard_error": math.sqrt(variance / (count - 1)) if count > 1 else None})
        return rows


def parse(argv=None) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and the flags that belong to the recipe."""
    parser = argparse.ArgumentParser(prog="python -m scripts.loss_by_position", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="RECIPE.yaml", help="the recipe; its fields may follow as flags")
    parser.add_argument("--checkpoint", required=True, nargs="+", metavar="DIR_OR_HF",
                        help="checkpoints, runs or Hugging Face models, all with the same tokenizer; a curve each")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for the table and the plot")
    parser.add_argument("--split", choices=["train", "held_out"], help="documents to measure on (default: held_out where the "
                        "recipe has one and --skip is not given, else train)")
    parser.add_argument("--skip", type=int, default=0, help="batches of the split's first epoch to leave out, those already "
                        "trained on (default 0)")
    parser.add_argument("--batches", type=int, default=8, help="batches to measure, at most the rest of the epoch (default 8)")
    return parser.parse_known_args(argv)


def measure(checkpoint: str, args: argparse.Namespace, flags: list[str]) -> tuple[list[dict], dict]:
    """The buckets' rows of one checkpoint, and what was measured."""
    import jax

    from data.batch import permute
    from data.errors import UserError
    from data.loader import Loader
    from trainer.config import load as configuration
    from trainer.mesh import make_mesh, place_batch, simulate
    from trainer.text import TextObjective, text_batch

    config = configuration.load(["--config", args.config, *flags, "--model.path", checkpoint], own=vars(args))
    if config.mesh.simulate:
        simulate(config.mesh.simulate)
    objective = TextObjective(config, make_mesh(config.mesh, schedule=config.attention.schedule))
    size = config.train.batch_size
    split = args.split or ("held_out" if len(objective.prepared.held_out) and not args.skip else "train")
    loader = Loader(objective.prepared, config.data.context_length, size, config.data.seed, split=split)
    whole = len(loader) // size
    steps = range(args.skip, min(args.skip + args.batches, whole))
    if args.skip < 0 or not steps:
        raise UserError(f"--skip {args.skip} --batches {args.batches}: the split {split} has {whole} batches of {size} rows in "
                        "its first epoch; " + ("fewer to skip" if whole else "a smaller --train.batch_size") + " would work")
    print(f"{checkpoint}: split {split}, batches {steps.start} to {steps[-1]} of {whole} ({steps.start} skipped)", flush=True)
    if split == "train" and not steps.start:
        print("note: a model that this recipe trained has seen these rows; --skip STEPS leaves out what was trained on")
    model, params = objective.model, objective.read_params()
    shapes = text_batch(size, config.data.context_length, model.mesh)
    token_losses = jax.jit(model.token_losses).lower(params, shapes).compile()
    buckets = Buckets()
    for number, step in enumerate(steps, start=1):
        batch = permute(loader.batch(step), objective.order)
        losses = np.asarray(token_losses(params, place_batch(batch, model.mesh)))
        buckets.add(losses, batch["positions"], batch["loss_weights"])
        mean = np.average(losses, weights=batch["loss_weights"])
        print(f"batch {number} of {len(steps)}: {mean:.3f} nats per target", flush=True)
    about = {"context_length": config.data.context_length, "split": split, "first_batch": steps.start,
             "batches": len(steps), "batch_size": size, "data": [source.path for source in config.data.sources]}
    return buckets.rows(), about


def plot(curves: dict[str, list[dict]], path: Path, title: str) -> None:
    """Mean loss, with a band of two standard errors, against the tokens before the target."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, rows in curves.items():
        # A bucket stands at its geometric middle.
        across = [math.sqrt(row["tokens_before_from"] * row["tokens_before_to"]) for row in rows]
        loss = np.array([row["loss_nats_per_target"] for row in rows])
        error = 2 * np.array([row["standard_error"] or 0.0 for row in rows])
        short = "/".join(part for part in Path(name).parts[-3:] if part != "checkpoints")
        line, = axes.plot(across, loss, marker="o", markersize=4, label=short)
        axes.fill_between(across, loss - error, loss + error, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens of the text before the target, buckets of powers of two")
    axes.set_ylabel("loss, nats per target (band: two standard errors)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    axes.set_title(title, fontsize="medium")
    figure.savefig(path, dpi=120)


def print_table(curves: dict[str, list[dict]], title: str) -> None:
    """A table of each checkpoint's buckets, in the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    console.print(title)
    for name, rows in curves.items():
        table = Table(title=Text(name), title_justify="left", box=None, padding=(0, 3, 0, 0), pad_edge=False)
        for column in ("tokens before", "targets", "nats per target", "standard error"):
            table.add_column(column, justify="right")
        for row in rows:
            error = "-" if row["standard_error"] is None else f"{row['standard_error']:.3f}"
            table.add_row(f"{row['tokens_before_from']:,} .. {row['tokens_before_to']:,}", f"{row['targets']:,}",
                          f"{row['loss_nats_per_target']:.3f}", error)
        console.print(table)


def run(args: argparse.Namespace, flags: list[str]) -> dict[str, list[dict]]:
    """Measures every checkpoint, writes the table and the plot, and gives the curves: checkpoint -> rows."""
    output_folder(args.output)
    entry.keep_compiled()
    curves = {}
    for checkpoint in args.checkpoint:
        curves[checkpoint], about = measure(checkpoint, args, flags)
    table, picture = (args.output / f"loss_by_position.{suffix}" for suffix in ("json", "png"))
    table.write_text(json.dumps({"about": about, "curves": curves}, indent=2) + "\n", encoding="utf-8")
    title = (f"Loss by position: split {about['split']}, {about['first_batch']} batches skipped, "
             f"{about['batches'] * about['batch_size']} rows of {about['context_length']:,} tokens")
    plot(curves, picture, title)
    print_table(curves, title)
    print(f"wrote {table} and {picture}")
    return curves


def main(argv=None) -> int:
    """Entry point."""
    args, flags = parse(argv)
    return entry.run(lambda: run(args, flags))


if __name__ == "__main__":
    entry.leave(main())
