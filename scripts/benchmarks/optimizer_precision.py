"""Compares the loss of a small model whose weights and moments have fewer bits with float32's.

    python -m scripts.benchmarks.optimizer_precision [--steps 200]

A model of four layers, from scratch, reads the bytes of this repository's pages: the same rows in
every run, float32 products. Each run's losses are the means of its last 20 steps and of held-out
rows. `nearest` rounds weights to the nearest bfloat16 instead of at random.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from data.paths import output_files
from scripts.benchmarks.commands import write_json
from scripts.benchmarks.results import ROOT
from trainer.config.schema import OptimizerConfig
from trainer.options import AtLeastOne, command, option

ROWS, LENGTH, LAST = 8, 128, 20
RUNS = {
    "float32": OptimizerConfig(),
    "moments bfloat16": OptimizerConfig(moment_dtype="bfloat16"),
    "moments 8bit": OptimizerConfig(moment_dtype="8bit"),
    "weights bfloat16": OptimizerConfig(weight_dtype="bfloat16"),
    "weights bfloat16, moments 8bit": OptimizerConfig(moment_dtype="8bit", weight_dtype="bfloat16"),
    "weights bfloat16, nearest": OptimizerConfig(weight_dtype="bfloat16"),
}


@functools.cache
def page_bytes() -> np.ndarray:
    """Returns the bytes of the repository's pages, one after the other."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return np.frombuffer(b"".join(page.read_bytes() for page in pages), np.uint8)


def rows(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens [steps, ROWS, LENGTH + 1] for training, and [8, ROWS, LENGTH + 1] held out:
    the last tenth of the bytes."""
    numbers = np.random.default_rng(0)
    text = page_bytes().astype(np.int32)
    split = len(text) * 9 // 10

    def cut(first: int, last: int, count: int) -> np.ndarray:
        starts = numbers.integers(first, last - LENGTH - 1, count * ROWS)
        taken = text[starts[:, None] + np.arange(LENGTH + 1)]
        return taken.reshape(count, ROWS, LENGTH + 1)

    return cut(0, split, steps), cut(split, len(text), 8)


def make_builder(optimizer: OptimizerConfig, steps: int):
    """Returns the StepBuilder of the small model's step."""
    import jax
    import jax.numpy as jnp

    from model.config import TransformerConfig
    from model.language_model import LanguageModel
    from trainer.config.schema import MeshConfig, TrainConfig
    from trainer.mesh import make_mesh
    from trainer.step import StepBuilder
    from trainer.text import text_batch

    config = TransformerConfig.preset(
        "tiny", vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4
    )
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    model = LanguageModel(config, mesh, dtype=jnp.dtype("float32"))
    return StepBuilder(
        model,
        model.loss,
        text_batch(ROWS, LENGTH, mesh),
        optimizer,
        TrainConfig(steps=steps, batch_size=ROWS),
    )


def make_batch(builder, tokens: np.ndarray) -> dict[str, Any]:
    """Returns rows of one document each, placed as the step takes them."""
    import jax

    index = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "index": index,
        "positions": index,
        "segment_ids": np.ones_like(index),
        "loss_weights": np.ones(index.shape, np.float32),
    }
    return {
        name: jax.device_put(x, builder.abstract_batch[name].sharding) for name, x in batch.items()
    }


def train(name: str, steps: int, rate: float) -> dict[str, Any]:
    """Returns a run's losses, and the bytes of its weights and moments per parameter."""
    import jax

    optimizer = dataclasses.replace(RUNS[name], learning_rate=rate, warmup_steps=10)
    builder = make_builder(optimizer, steps)
    with contextlib.ExitStack() as changes:
        if "nearest" in name:
            nearest = mock.patch("trainer.rounding.to_bfloat16", lambda x, _: x.astype("bfloat16"))
            changes.enter_context(nearest)
        step = builder.lower_train().compile()
    params = builder.stored(builder.model.init(0))
    state = builder.init_optimizer(params)
    taken, held_out = rows(steps)
    losses = []
    for number, tokens in enumerate(taken):
        batch = make_batch(builder, tokens)
        params, state, metrics = step(params, {}, state, batch, np.int32(number))
        losses.append(float(metrics.loss))
    evaluate = builder.lower_evaluate().compile()
    sums = [evaluate(params, make_batch(builder, tokens)) for tokens in held_out]
    count = sum(x.size for x in params.values())
    return {
        "run": name,
        "loss": float(np.mean(losses[-LAST:])),
        "held_out": float(sum(s.total for s in sums) / sum(s.weight for s in sums)),
        "bytes_per_parameter": sum(x.nbytes for x in jax.tree.leaves((params, state))) / count,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    steps: AtLeastOne = option("of each run", 200)
    rate: float = option("learning rate at its peak", 1e-3)
    output: Path = option("folder for results", Path("runs/optimizer_precision"))


def work(args: Options) -> None:
    """Prints the table, and writes OUTPUT/optimizer_precision.json."""
    output_files(args.output, {"optimizer_precision.json": b'"held_out"'})
    print(f"{'run':32} {'loss':>8} {'held out':>9} {'bytes a parameter':>18}")
    results = []
    for name in RUNS:
        result = train(name, args.steps, args.rate)
        results.append(result)
        print(
            f"{name:32} {result['loss']:8.4f} {result['held_out']:9.4f} "
            f"{result['bytes_per_parameter']:18.2f}",
            flush=True,
        )
    write_json(args.output / "optimizer_precision.json", results)


main = command(Options, work, output="output")


if __name__ == "__main__":
    sys.exit(main())
