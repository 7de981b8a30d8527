"""Finds where the time of a training step on a CPU goes: each of its parts alone, compiled by XLA and run by torch.

    python -m scripts.benchmarks.step_parts [--length 2048] [--turns 3] [--output DIR]

The parts are those of `bench_step`'s step: a llama in float32 on one row. A part runs forward and backward, as often as a step
runs it; products are told apart by shape and by what they compute (the result, dx, dw). The two sides take turns in processes
of their own, so that a machine that becomes slower or faster does so for both. Printed is each side's median turn and their
spread. What the parts leave unexplained of a step (bench_step's seconds) is memory traffic between them, and whatever fusion
saves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from data.paths import output_folder
from model.config import TransformerConfig
from scripts.benchmarks.commands import add_output_folder, in_own_process, make_parser, write_json
from trainer import entry

REPEATS = 5  # runs of a part in a turn, of which the fastest counts
SIDES = ("ours", "torch")


class Product(NamedTuple):
    """A matrix product of activations [T, rows] with a weight [rows, columns], and how often a step computes it."""

    name: str
    rows: int
    columns: int
    count: int

    def flops(self, tokens: int) -> float:
        """Returns the FLOPs of all of a step's, in one of the three directions."""
        return 2.0 * tokens * self.rows * self.columns * self.count


def products(config: TransformerConfig) -> list[Product]:
    """Returns the products of a step, those of one shape together."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    heads, key_heads = (
        config.num_attention_heads * config.head_dim,
        config.num_key_value_heads * config.head_dim,
    )
    return [
        Product("query", hidden, heads, layers),
        Product("output", heads, hidden, layers),
        Product("key, value", hidden, key_heads, 2 * layers),
        Product("gate, up", hidden, config.intermediate_size, 2 * layers),
        Product("down", config.intermediate_size, hidden, layers),
        Product("head", hidden, config.vocab_size, 1),
    ]


def fastest(run: Callable[[], object]) -> float:
    """Returns the seconds of the fastest of REPEATS runs, after one that is not counted."""
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def vectors(*shape: int) -> np.ndarray:
    """Returns random float32 numbers, the same for both sides."""
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def seconds_compiled(function: Callable, *arrays: object, donated: tuple[int, ...] = ()) -> float:
    """Returns the seconds of a function of pytrees of arrays, compiled by XLA.

    Args:
      donated: indices of the arguments that it may overwrite; its results, as many, are the next run's.
    """
    import jax
    import jax.numpy as jnp

    arguments = [jax.tree.map(jnp.asarray, x) for x in arrays]
    compiled = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()

    def run():
        nonlocal arguments
        results = jax.block_until_ready(compiled(*arguments))
        if donated:
            arguments = [*results, *arguments[len(results) :]]

    return fastest(run)


def seconds_both_ways(function: Callable, *arrays: np.ndarray) -> float:
    """Returns the seconds of a function and its gradient for all of its arguments, compiled by XLA."""
    import jax

    def run(dy, *arrays):
        y, pull = jax.vjp(function, *arrays)
        return y, pull(dy)

    dy = np.ones(jax.eval_shape(function, *arrays).shape, np.float32)
    return seconds_compiled(run, dy, *arrays)


def parts_of_ours(config: TransformerConfig, length: int) -> dict[str, float]:
    """Returns the seconds that a step spends in each part, compiled by XLA as our step's are."""
    return {
        **_our_products(config, length),
        **_our_layer_parts(config, length),
        "clip, AdamW": _our_update(config),
    }


def _our_products(config: TransformerConfig, length: int) -> dict[str, float]:
    seconds = {}
    for product in products(config):
        x, w, y = (
            vectors(1, length, product.rows),
            vectors(product.rows, product.columns),
            vectors(1, length, product.columns),
        )
        for direction, equation, operands in (
            ("result", "bte,ef->btf", (x, w)),
            ("dx", "btf,ef->bte", (y, w)),
            ("dw", "bte,btf->ef", (x, y)),
        ):
            seconds[f"{product.name}: {direction}"] = product.count * seconds_compiled(
                _einsum(equation), *operands
            )
    return seconds


def _our_layer_parts(config: TransformerConfig, length: int) -> dict[str, float]:
    import jax
    import jax.numpy as jnp

    from model.attention import AttentionOp, Keys, Queries, TokenCoords, attend, get_kernel
    from model.feedforward import rms_norm
    from model.loss import token_losses
    from model.rope import apply_rope, inverse_frequencies
    from model.sharding import TensorParallel

    seconds = {}
    heads, key_heads, size, layers = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.num_hidden_layers,
    )
    index = np.arange(length, dtype=np.int32)[None]
    coords = TokenCoords(jnp.asarray(index), jnp.ones_like(index))
    op = AttentionOp.create(
        size, schedule="local", kernel=get_kernel("auto"), axis="sequence", size=1
    )
    query, key = vectors(1, length, heads, size), vectors(1, length, key_heads, size)
    seconds["attention"] = layers * seconds_both_ways(
        lambda q, k, v: attend(op, Queries(q, coords), Keys(k, v, coords)).out, query, key, key
    )
    frequencies = inverse_frequencies(config.rope, size)
    seconds["rope"] = layers * seconds_both_ways(
        lambda q: apply_rope(q, jnp.asarray(index), frequencies),
        vectors(1, length, heads + key_heads, size),
    )
    hidden = vectors(1, length, config.hidden_size)
    seconds["norms"] = (2 * layers + 1) * seconds_both_ways(
        lambda x, w: rms_norm(x, w, config.rms_norm_eps), hidden, vectors(config.hidden_size)
    )
    wide = vectors(1, length, config.intermediate_size)
    seconds["silu(gate) up"] = layers * seconds_both_ways(
        lambda gate, up: jax.nn.silu(gate) * up, wide, wide
    )
    targets, parallel = np.zeros((1, length), np.int32), TensorParallel.of(config, 1)
    seconds["cross-entropy"] = seconds_both_ways(
        lambda logits: token_losses(logits, jnp.asarray(targets), parallel).sum(),
        vectors(1, length, config.vocab_size),
    )
    return seconds


def _our_update(config: TransformerConfig) -> float:
    import jax
    import jax.numpy as jnp
    import optax

    from trainer.config.schema import OptimizerConfig
    from trainer.optimizer import clipping, make_optimizer

    options = OptimizerConfig()
    optimizer, clip = make_optimizer(options, 100), clipping(options)
    params = {name: vectors(*shape) for name, shape in _matrices(config).items()}
    gradients = {name: np.full_like(value, 1e-3) for name, value in params.items()}

    def update(params, moments, gradients):
        gradients, _ = clip.update(gradients, clip.init(params))
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    return seconds_compiled(
        update, params, optimizer.init(jax.tree.map(jnp.asarray, params)), gradients, donated=(0, 1)
    )


def _einsum(equation: str) -> Callable:
    import jax.numpy as jnp

    return lambda a, b: jnp.einsum(equation, a, b)


def parts_of_torch(config: TransformerConfig, length: int) -> dict[str, float]:
    """Returns the seconds that a step spends in each part, run by torch as transformers' model runs it."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(len(os.sched_getaffinity(0)))

    def both_ways(function: Callable, *arrays: np.ndarray) -> float:
        tensors = [torch.from_numpy(x).requires_grad_() for x in arrays]
        with torch.no_grad():
            dy = torch.ones_like(function(*tensors))

        def run():
            for tensor in tensors:
                tensor.grad = None
            function(*tensors).backward(dy)

        return fastest(run)

    seconds = {}
    for product in products(config):
        x, y = (
            torch.from_numpy(vectors(length, product.rows)),
            torch.from_numpy(vectors(length, product.columns)),
        )
        w = torch.from_numpy(
            vectors(product.columns, product.rows)
        )  # [out, in], as torch.nn.Linear keeps it
        for direction, run in (
            ("result", lambda x=x, w=w: functional.linear(x, w)),
            ("dx", lambda y=y, w=w: y @ w),
            ("dw", lambda x=x, y=y: y.T @ x),
        ):
            seconds[f"{product.name}: {direction}"] = product.count * fastest(run)
    heads, key_heads, size, layers = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.num_hidden_layers,
    )
    query, key = vectors(1, heads, length, size), vectors(1, key_heads, length, size)
    seconds["attention"] = layers * both_ways(
        lambda q, k, v: functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        ),
        query,
        key,
        key,
    )
    angles = np.arange(length)[:, None] * np.ones(size)
    cos, sin = (torch.from_numpy(table(angles).astype(np.float32)) for table in (np.cos, np.sin))

    def rotate(x):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    seconds["rope"] = layers * both_ways(rotate, vectors(1, heads + key_heads, length, size))
    epsilon = config.rms_norm_eps
    seconds["norms"] = (2 * layers + 1) * both_ways(
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)),
        vectors(length, config.hidden_size),
        vectors(config.hidden_size),
    )
    wide = vectors(length, config.intermediate_size)
    seconds["silu(gate) up"] = layers * both_ways(
        lambda gate, up: functional.silu(gate) * up, wide, wide
    )
    targets = torch.zeros(length, dtype=torch.long)
    seconds["cross-entropy"] = both_ways(
        lambda logits: functional.cross_entropy(logits, targets, reduction="sum"),
        vectors(length, config.vocab_size),
    )
    params = [
        torch.nn.Parameter(torch.from_numpy(vectors(*shape)))
        for shape in _matrices(config).values()
    ]
    optimizer = torch.optim.AdamW(params, lr=1e-5)
    for parameter in params:
        parameter.grad = torch.full_like(parameter, 1e-3)

    def update():
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    seconds["clip, AdamW"] = fastest(update)
    return seconds


def _matrices(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the model's matrices, the layers' stacked; the head counts once where it is the embedding."""
    shapes = {
        f"{product.name}": (product.count, product.rows, product.columns)
        for product in products(config)
    }
    return shapes if config.tie_word_embeddings else {**shapes, "embedding": shapes["head"]}


def report(args: argparse.Namespace) -> None:
    """Measures both sides in turns, prints the table, and writes OUTPUT/step_parts.json."""
    output_folder(args.output)
    config = TransformerConfig.preset(args.model)
    turns: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(args.turns):
        for side in SIDES:
            turns[side].append(
                in_own_process(
                    "step_parts", "--one", side, "--length", str(args.length), "--model", args.model
                )
            )
    flops = {product.name: product.flops(args.length) for product in products(config)}
    rows = [
        {
            "part": part,
            **{side: _spread([turn[part] for turn in turns[side]]) for side in SIDES},
            "gflop": flops.get(part.partition(":")[0], 0.0) / 1e9,
        }
        for part in turns["ours"][0]
    ]
    total = {side: _spread([sum(turn.values()) for turn in turns[side]]) for side in SIDES}
    rows.append({"part": "all parts", **total, "gflop": 3 * sum(flops.values()) / 1e9})
    print(
        f"{'part':24} {'ours, s':>9} {'spread':>7} {'torch, s':>9} {'spread':>7} {'ours is':>8} {'GFLOP/s':>8} {'torch':>7}"
    )
    for row in rows:
        ours, torch = row["ours"], row["torch"]
        rates = "".join(
            f"{row['gflop'] / side['median']:8.0f}" if ":" in row["part"] else f"{'':8}"
            for side in (ours, torch)
        )
        print(
            f"{row['part']:24} {ours['median']:9.3f} {ours['spread']:7.1%} {torch['median']:9.3f} {torch['spread']:7.1%} "
            f"{torch['median'] / ours['median']:7.2f}x{rates}"
        )
    write_json(args.output / "step_parts.json", rows)


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Returns the median of the turns, and the distance of the slowest from the fastest as a share of it."""
    median = statistics.median(seconds)
    return {"median": median, "spread": (max(seconds) - min(seconds)) / median}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser("step_parts", __doc__)
    parser.add_argument("--length", type=int, default=2048, help="tokens in the row (default 2048)")
    parser.add_argument(
        "--turns", type=int, default=3, help="processes of each side, in turns (default 3)"
    )
    parser.add_argument("--model", default="smollm2-135m", help="a preset (default smollm2-135m)")
    add_output_folder(parser, "runs/bench/step_parts")
    parser.add_argument("--one", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        measure = parts_of_ours if args.one == "ours" else parts_of_torch
        print(json.dumps(measure(TransformerConfig.preset(args.model), args.length)))
        return 0
    return entry.run(lambda: report(args))


if __name__ == "__main__":
    sys.exit(main())
