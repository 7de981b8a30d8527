"""Measures the loss by position in the text: do more tokens before a target improve predictions?

    python -m scripts.loss_by_position --config RECIPE --checkpoint DIR_OR_HF [...] --output DIR
    python -m scripts.loss_by_position --data.path DATA --checkpoint DIR_OR_HF [...] --output DIR

Data, packing and mesh are the recipe's, or as train.py has them without one; `model.path`, for an
adapter `adapter.path`, is set to each checkpoint in turn, which has its own RoPE unless a flag
--model.overrides gives another. Targets are grouped by the number of tokens before them in the same
document and row, into buckets between powers of two. Writes loss_by_position.json and
loss_by_position.png to --output.

With --without-earlier W each target is also predicted from at most W preceding tokens: every
document is cut into pieces of W tokens that cannot attend to each other. If the model uses earlier
text, the curves diverge beyond W tokens. A table of the differences for the same targets says by
how much: above 0 the earlier text helps, below 0 it hurts, as it does beyond a model's trained
length.

Measures the held-out split if the recipe has one. For the training split, --skip should be the
number of trained steps, so that the model has not seen the measured rows.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from data import printable
from data.outputs import PICTURE, PICTURE_METADATA, output_files, write_text
from eval.pictures import short_names
from trainer import entry
from trainer.options import (
    FIELDS,
    AtLeastOne,
    AtLeastZero,
    EachOnce,
    StorePath,
    Tokens,
    command,
    option,
    other_words,
)

if TYPE_CHECKING:
    from data.loader import Loader
    from trainer.config.schema import RunConfig
    from trainer.text import TextObjective

BUCKETS = 32  # for up to 2^32 - 1 tokens before the target


@dataclasses.dataclass
class Buckets:
    """Sums over targets, by bucket: bucket k has 2^k .. 2^(k+1) - 1 tokens before the target."""

    count: Float[np.ndarray, " K"] = dataclasses.field(default_factory=lambda: np.zeros(BUCKETS))
    total: Float[np.ndarray, " K"] = dataclasses.field(default_factory=lambda: np.zeros(BUCKETS))
    """Sum of the losses, in nats."""
    squares: Float[np.ndarray, " K"] = dataclasses.field(default_factory=lambda: np.zeros(BUCKETS))
    """Sum of the squared losses."""

    def add(
        self,
        losses: Float[np.ndarray, "*B L"],
        positions: Int[np.ndarray, "*B L"],
        weights: Float[np.ndarray, "*B L"] | Int[np.ndarray, "*B L"],
    ) -> None:
        """Adds the targets of a batch.

        Args:
            losses: the loss of each token's target, in nats; tokens may be in any order.
            positions: the position in its document of each token before a target.
            weights: above 0 if the target counts.
        """
        counted = weights > 0
        # frexp is exact; the logarithm of a power of two might be rounded down.
        bucket = np.frexp(positions[counted] + 1.0)[1] - 1
        losses = losses[counted].astype(np.float64)
        length = len(self.count)
        self.count += np.bincount(bucket, minlength=length)
        self.total += np.bincount(bucket, losses, minlength=length)
        self.squares += np.bincount(bucket, losses**2, minlength=length)

    def rows(self) -> list[dict]:
        """Returns a row of loss_by_position.json for each bucket with a target.

        The standard error assumes independent targets; since neighbouring targets are correlated,
        the true error is somewhat larger.
        """
        rows = []
        for k in np.flatnonzero(self.count):
            count, mean = self.count[k], self.total[k] / self.count[k]
            variance = max(self.squares[k] / count - mean**2, 0.0)
            rows.append(
                {
                    "tokens_before_from": 2 ** int(k),
                    "tokens_before_to": 2 ** (int(k) + 1) - 1,
                    "targets": int(count),
                    "loss_nats_per_target": float(mean),
                    "standard_error": math.sqrt(variance / (count - 1)) if count > 1 else None,
                }
            )
        return rows


class Measurement(NamedTuple):
    """The result of `measure` for one checkpoint."""

    rows: list[dict]
    """See Buckets.rows."""
    rows_without_earlier: dict[int, list[dict]]
    """Piece length in tokens -> rows for the same targets without the text before their piece."""
    gains: dict[int, list[dict]]
    """Piece length in tokens -> rows for the loss without the earlier
    text minus the loss with it."""
    about: dict
    """What was measured: split, batches, rows, lengths, data."""
    targets: Int[np.ndarray, "B L"]
    """The first batch's targets."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    checkpoint: tuple[StorePath, ...] = option(
        "checkpoints, runs, Hugging Face models or adapters with the same tokenizer; each gives a "
        "curve",
        metavar="DIR_OR_HF",
        action=EachOnce,
    )
    output: Path = option("folder for the table and the plot", metavar="DIR")
    split: str | None = option(
        "documents to measure (default: held_out if the recipe has one and --skip is not set, "
        "otherwise train)",
        None,
        choices=("train", "held_out"),
    )
    skip: AtLeastZero = option(
        "number of batches to skip at the start of the split's first epoch, because the model "
        "was trained on them",
        0,
    )
    batches: AtLeastOne = option("number of batches to measure, at most the rest of the epoch", 8)
    without_earlier: tuple[Tokens, ...] = option(
        "also measure with documents cut into pieces of W tokens; each W gives a curve",
        (),
        metavar="W",
        action=EachOnce,
    )
    stage: int | None = option("stage of a recipe with stages, from 1 (default: the last)", None)
    words: tuple[str, ...] = other_words(
        "[--config RECIPE.yaml] [--section.field value ...]", FIELDS
    )


def cut(batch: dict[str, np.ndarray], tokens: int) -> dict[str, np.ndarray]:
    """Returns a batch with documents cut into pieces of `tokens`, each with positions from 0."""
    pieces = batch["positions"] // tokens
    segment_ids = np.zeros_like(batch["segment_ids"])
    for row, (document, piece) in enumerate(
        zip(batch["segment_ids"].astype(np.int64), pieces, strict=True)
    ):
        _, number = np.unique(document * (int(pieces.max()) + 1) + piece, return_inverse=True)
        segment_ids[row] = np.where(document > 0, number + 1, 0)
    return {**batch, "segment_ids": segment_ids, "positions": batch["positions"] % tokens}


def same_targets(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns whether two checkpoints' targets are the same, up to the token that ends a text: base
    and instruction-tuned models often have different ones."""
    if a.shape != b.shape:
        return False
    differs = a != b
    return len(set(a[differs])) <= 1 and len(set(b[differs])) <= 1


def measure(checkpoint: str, args: Options, before: Measurement | None = None) -> Measurement:
    """Measures one checkpoint.

    Args:
        checkpoint: the checkpoint.
        args: the command-line options.
        before: of another checkpoint, to be compared with this one.

    Raises:
        UserError: there is no batch to measure, or the other checkpoint has other targets.
    """
    from data.errors import UserError
    from data.loader import Loader

    objective = _objective(checkpoint, args)
    config, size = objective.config, objective.config.train.batch_size
    split = args.split or (
        "held_out" if len(objective.prepared.held_out) and not args.skip else "train"
    )
    loader = Loader(
        objective.prepared, config.data.context_length, size, config.data.seed, split=split
    )
    loader.end = len(loader)  # the last batch has the rows that are left
    total = -(-len(loader) // size)
    steps = _steps(args, split, total)
    targets = loader.batch(steps.start)["targets"]
    if before is not None and not same_targets(targets, before.targets):
        raise UserError(
            f"--checkpoint: {checkpoint} has another tokenizer or chat template than "
            f"{args.checkpoint[0]}, so the same documents have other targets; a command of its "
            "own, with another --output, would work"
        )
    print(
        f"{checkpoint}: split {split}, batches {steps.start} to {steps[-1]} of {total} "
        f"({steps.start} skipped)",
        flush=True,
    )
    if split == "train" and not steps.start:
        print(
            "note: a model trained with this recipe has seen these rows; exclude them with --skip "
            "STEPS"
        )
    about = {
        "context_length": config.data.context_length,
        "split": split,
        "first_batch": steps.start,
        "batches": len(steps),
        "batch_size": size,
        "rows": min(steps.stop * size, len(loader)) - steps.start * size,
        "data": [source.path for source in config.data.sources],
    }
    measured = _measured(objective, loader, steps, args.without_earlier)
    return Measurement(*measured, about, targets)


def _objective(checkpoint: str, args: Options) -> "TextObjective":
    """Opens the checkpoint, and the data that the command line names, on the available devices."""
    import jax

    from data.errors import UserError
    from planning.auto import spread
    from trainer.config import load as configuration
    from trainer.mesh import make_mesh, simulate
    from trainer.stages import choose_stage
    from trainer.text import TextObjective

    given = {word.partition("=")[0].replace("-path", ".path") for word in args.words}
    if "--model.path" in given:
        raise UserError("--model.path: each --checkpoint takes its place; leave it out")
    config = configuration.load(
        [*args.words, "--model.path", checkpoint], command_flags=vars(args).keys() - {"words"}
    )
    if config.trajectories.path:
        raise UserError(
            f"trajectories.path: found {config.trajectories.path}; losses by position are of texts "
            "and conversations; eval.in_context plays episodes"
        )
    if config.preference.loss is not None:
        raise UserError(
            f"preference.loss: found {config.preference.loss}; losses by position are of texts and "
            "conversations, so a recipe without it, and with such data, would work"
        )
    if config.mesh.simulate:
        simulate(config.mesh.simulate)  # before a run's checkpoint is opened, which starts JAX
    config = _with_checkpoint(config, checkpoint, "--adapter.path" in given)
    model = config.model
    if not any(flag.startswith("--model.overrides") for flag in given):
        # The recipe's RoPE is in the checkpoints of its run; others have their own.
        model = dataclasses.replace(model, overrides={})
    config = dataclasses.replace(choose_stage(config, args.stage), model=model)
    if "mesh" in config.auto:
        config = spread(config, len(jax.devices()))
        print(f"mesh: {config.mesh.product}", flush=True)
    return TextObjective(config, make_mesh(config.mesh, schedule=config.attention.schedule))


def _with_checkpoint(config: "RunConfig", checkpoint: str, beside: bool) -> "RunConfig":
    """Returns the configuration with a checkpoint's model, or with its adapter on the adapter's
    base.

    Args:
        config: the recipe, whose own `adapter.path` is no part of a whole model.
        checkpoint: the checkpoint.
        beside: whether the command line has an `adapter.path`.

    Raises:
        UserError: the command line has one, and the checkpoint is another.
    """
    from data.errors import UserError
    from trainer.adapted_source import AdaptedSource
    from trainer.model_source import adapter_source, open_model

    source = open_model(checkpoint, weights=False)
    if not isinstance(source, AdaptedSource):
        path = config.adapter.path if beside else None
        return dataclasses.replace(config, adapter=dataclasses.replace(config.adapter, path=path))
    if beside:
        raise UserError(f"--adapter.path: {checkpoint} is an adapter too; leave it out")
    _, base = adapter_source(checkpoint)
    adapter = dataclasses.replace(source.adapter.config, path=checkpoint)
    if adapter.quantize == "none":  # PEFT's format does not say
        adapter = dataclasses.replace(adapter, quantize=config.adapter.quantize)
    model = dataclasses.replace(config.model, path=base)
    return dataclasses.replace(config, model=model, adapter=adapter)


def _measured(
    objective: "TextObjective", loader: "Loader", steps: range, without_earlier: tuple[int, ...]
) -> tuple[list[dict], dict[int, list[dict]], dict[int, list[dict]]]:
    """Returns what these steps' batches add up to: the first fields of a Measurement.

    Args:
        objective: the model and the order of a row's tokens.
        loader: the batches.
        steps: the steps whose batches are measured.
        without_earlier: lengths of pieces, in tokens.
    """
    import jax

    from data.batch import permute
    from trainer.mesh import place_batch
    from trainer.text import text_batch

    model, params = objective.model, objective.read_params()
    shapes = text_batch(loader.batch_size, loader.context_length, model.mesh)
    token_losses = jax.jit(model.token_losses).lower(params, shapes).compile()
    buckets = Buckets()
    without, gains = ({tokens: Buckets() for tokens in without_earlier} for _ in range(2))
    for number, step in enumerate(steps, start=1):
        batch: Any = permute(loader.batch(step), objective.order)
        losses = np.asarray(token_losses(params, place_batch(batch, model.mesh)))
        buckets.add(losses, batch["positions"], batch["loss_weights"])
        for tokens in without_earlier:
            piece_losses = np.asarray(
                token_losses(params, place_batch(cut(batch, tokens), model.mesh))
            )
            without[tokens].add(piece_losses, batch["positions"], batch["loss_weights"])
            gains[tokens].add(piece_losses - losses, batch["positions"], batch["loss_weights"])
        counted = losses[batch["loss_weights"] > 0]  # none of a row of one token
        mean = f"{counted.mean():.3f} nats per target" if counted.size else "no target"
        print(f"batch {number} of {len(steps)}: {mean}", flush=True)
    return (
        buckets.rows(),
        {tokens: sums.rows() for tokens, sums in without.items()},
        {tokens: sums.rows() for tokens, sums in gains.items()},
    )


def _steps(args: Options, split: str, total: int) -> range:
    """Returns the steps whose batches are measured.

    Args:
        args: the options of the command line.
        split: the split of the data.
        total: its batches in the first epoch.

    Raises:
        UserError: no batch is left to measure.
    """
    from data.errors import UserError

    steps = range(args.skip, min(args.skip + args.batches, total))
    if not steps:
        raise UserError(
            f"--skip: found {args.skip}, and the first epoch of the split {split} has {total} "
            "batches; a smaller number would work"
        )
    return steps


def plot(curves: dict[str, list[dict]], path: Path, title: str) -> None:
    """Plots each checkpoint's mean losses by tokens before the target, with two standard errors."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    names = short_names(curves)
    for name, rows in curves.items():
        # A bucket is plotted at its geometric mean.
        x = [math.sqrt(row["tokens_before_from"] * row["tokens_before_to"]) for row in rows]
        loss = np.array([row["loss_nats_per_target"] for row in rows])
        error = 2 * np.array([row["standard_error"] or 0.0 for row in rows])
        (line,) = axes.plot(x, loss, marker="o", markersize=4, label=names[name])
        axes.fill_between(
            x, loss - error, loss + error, color=line.get_color(), alpha=0.2, linewidth=0
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens before the target, in buckets between powers of two")
    axes.set_ylabel("loss, nats per target (band: two standard errors)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    axes.set_title(title, fontsize="medium")
    figure.savefig(path, dpi=120, metadata=PICTURE_METADATA)


def print_table(curves: dict[str, list[dict]], title: str) -> None:
    """Prints a table of each checkpoint's buckets."""
    from rich.table import Table
    from rich.text import Text

    console = printable.console(soft_wrap=True, highlight=False)
    console.print(title)
    for name, rows in curves.items():
        table = Table(
            title=Text(name), title_justify="left", box=None, padding=(0, 3, 0, 0), pad_edge=False
        )
        for column in ("tokens before", "targets", "nats per target", "standard error"):
            table.add_column(column, justify="right")
        for row in rows:
            error = "-" if row["standard_error"] is None else f"{row['standard_error']:.3f}"
            table.add_row(
                f"{row['tokens_before_from']:,} .. {row['tokens_before_to']:,}",
                f"{row['targets']:,}",
                f"{row['loss_nats_per_target']:.3f}",
                error,
            )
        console.print(table)


def work(args: Options) -> None:
    """Measures every checkpoint, and writes table and plot."""
    output_files(
        args.output, {"loss_by_position.json": b'"about"', "loss_by_position.png": PICTURE}
    )
    entry.keep_compiled()
    curves, gains, before = {}, {}, None
    for checkpoint in args.checkpoint:
        before = measure(checkpoint, args, before)
        curves[checkpoint], without, gain, about, _ = before
        for tokens in args.without_earlier:
            curves[f"{checkpoint}, pieces of {tokens} tokens"] = without[tokens]
            # Up to W tokens, most targets are predicted from the same text in both cases.
            gains[f"{checkpoint}, against pieces of {tokens} tokens"] = [
                row for row in gain[tokens] if row["tokens_before_to"] >= tokens
            ]
    table, picture = (args.output / f"loss_by_position.{suffix}" for suffix in ("json", "png"))
    content = {"about": about, "curves": curves, "gains": gains}
    write_text(table, json.dumps(content, indent=2) + "\n")
    title = (
        f"Loss by position: split {about['split']}, {about['first_batch']} batches skipped, "
        f"{about['rows']} rows of {about['context_length']:,} tokens"
    )
    plot(curves, picture, title)
    print_table(curves, title)
    if gains:
        print_table(gains, "Gain from earlier text: loss without it minus loss with it")
    print(f"wrote {table} and {picture}")


main = command(Options, work)


if __name__ == "__main__":
    entry.leave(main())
