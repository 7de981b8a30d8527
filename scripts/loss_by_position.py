"""Loss against a token's place in its text: does a model predict better with more of a long text before it?

    python -m scripts.loss_by_position --config RECIPE.yaml --checkpoint DIR_OR_HF [...] --output DIR [--section.field ...]

The recipe says which data are measured, how they are packed and on which mesh; `model.path` is each checkpoint in turn. A
target's place is the number of tokens before it in its document and row, in buckets of powers of two. Writes
loss_by_position.json and loss_by_position.png to --output. Rows of the training split begin at --skip: give the steps that
were trained, so that only rows which the model has not seen are measured.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
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
    parser.add_argument("--split", default="train", choices=["train", "held_out"], help="documents to measure on")
    parser.add_argument("--skip", type=int, default=0, help="batches of the first epoch to leave out, those already trained on")
    parser.add_argument("--batches", type=int, default=8, help="batches to measure, at most the rest of the epoch (default 8)")
    return parser.parse_known_args(argv)


def measure(checkpoint: str, args: argparse.Namespace, flags: list[str]) -> tuple[list[dict], dict]:
    """The buckets' rows of one checkpoint, and what was measured."""
    import jax

    from data.batch import permute
    from data.errors import UserError
    from data.loader import Loader
    from trainer import config as configuration
    from trainer.mesh import make_mesh, place_batch, simulate
    from trainer.objective import TextObjective
    from trainer.step import text_batch

    config = configuration.load(["--config", args.config, *flags, "--model.path", checkpoint])
    if config.mesh.simulate:
        simulate(config.mesh.simulate)
    objective = TextObjective(config, make_mesh(config.mesh, schedule=config.attention.schedule))
    size = config.train.batch_size
    loader = Loader(objective.prepared, config.data.context_length, size, config.data.seed, split=args.split)
    steps = range(args.skip, min(args.skip + args.batches, len(loader) // size))
    if not steps:
        raise UserError(f"--skip: found {args.skip}, but the split {args.split} has {len(loader) // size} batches of {size} "
                        f"rows in its first epoch; fewer would work")
    model, params = objective.model, objective.read_params()
    shapes = text_batch(size, config.data.context_length, model.mesh)
    token_losses = jax.jit(model.token_losses).lower(params, shapes).compile()
    buckets = Buckets()
    for step in steps:
        batch = permute(loader.batch(step), objective.order)
        losses = np.asarray(token_losses(params, place_batch(batch, model.mesh)))
        buckets.add(losses, batch["positions"], batch["loss_weights"])
        print(f"batch {step}: {np.average(losses, weights=batch['loss_weights']):.3f} nats per target", flush=True)
    about = {"context_length": config.data.context_length, "split": args.split, "first_batch": steps.start,
             "batches": len(steps), "batch_size": size, "data": [source.path for source in config.data.sources]}
    return buckets.rows(), about


def plot(curves: dict[str, list[dict]], path: Path, title: str) -> None:
    """Mean loss, with a band of two standard errors, against the tokens before the target."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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
    axes.set_xlabel("tokens of the text before the target, buckets of powers of two")
    axes.set_ylabel("loss, nats per target (band: two standard errors)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    axes.set_title(title, fontsize="medium")
    figure.savefig(path, dpi=120)


def print_table(curves: dict[str, list[dict]]) -> None:
    """Every bucket of every checkpoint, in the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Loss by position")
    for name in ("checkpoint", "tokens before", "targets", "nats per target", "standard error"):
        first = name == "checkpoint"
        table.add_column(name, justify="left" if first else "right", overflow="fold", no_wrap=not first)
    for name, rows in curves.items():
        for row in rows:
            error = "-" if row["standard_error"] is None else f"{row['standard_error']:.3f}"
            table.add_row(name, f"{row['tokens_before_from']:,} .. {row['tokens_before_to']:,}", f"{row['targets']:,}",
                          f"{row['loss_nats_per_target']:.3f}", error)
    Console().print(table)


def run(args: argparse.Namespace, flags: list[str]) -> dict[str, list[dict]]:
    """Measures every checkpoint, writes the table and the plot, and gives the curves: checkpoint -> rows."""
    output_folder(args.output)
    entry.keep_compiled()
    curves = {}
    for checkpoint in args.checkpoint:
        curves[checkpoint], about = measure(checkpoint, args, flags)
    (args.output / "loss_by_position.json").write_text(json.dumps({"about": about, "curves": curves}, indent=2) + "\n",
                                                       encoding="utf-8")
    plot(curves, args.output / "loss_by_position.png",
         f"Loss by position: rows of {about['context_length']:,} tokens, {about['batches'] * about['batch_size']} of them")
    print_table(curves)
    return curves


def main(argv=None) -> int:
    """Entry point."""
    args, flags = parse(argv)
    return entry.run(lambda: run(args, flags))


if __name__ == "__main__":
    sys.exit(main())
