"""Striped Attention: theoretical maximum speed-ups, and the bound with whole tiles."""

from __future__ import annotations

import functools
import math

from model.attention.schedules.plan import Block
from model.config import TransformerConfig
from planning.costs.rounds import rounds
from scripts.benchmarks.papers import published as paper
from scripts.benchmarks.papers.row import Row

_row = functools.partial(Row, "Striped Attention")

# The cost of an attention FLOP relative to other FLOPs: on A100, attention in TF32 runs at half the
# rate of bfloat16.
STRIPED_ATTENTION_COST = {"A100": 2.0, "TPU v4": 1.0}
STRIPED_MISS = (
    "a bound: whole tiles, transfers hidden; the paper mentions exposed transfers and work other "
    "than matrix products"
)


def striped_attention() -> list[Row]:
    """Returns the theoretical speed-ups (TMS), and the measured ones with the whole-tile bound."""
    bounds, measured = [], []
    for (table, device, model, tensor, shards), rows in paper.STRIPED_ATTENTION.items():
        cost, tile = STRIPED_ATTENTION_COST[device], paper.STRIPED_TILES[device]
        for number, bound, speedup in rows:
            length = number * shards if table == "Table 5" else number
            label = f"{device} {model} {tensor} x {shards}, {length} tokens"
            bounds.append(
                _row(
                    table,
                    f"TMS {label}",
                    bound,
                    striped_speedup(model, length, shards, cost),
                    digits=2,
                )
            )
            measured.append(
                _row(
                    table,
                    f"speed-up {label}",
                    speedup,
                    striped_speedup(model, length, shards, cost, tile),
                    note=STRIPED_MISS,
                )
            )
    for model, speedups in paper.STRIPED_TABLE_2.items():
        for (device, shards), speedup in zip((("A100", 4), ("TPU v4", 8)), speedups, strict=True):
            predicted = striped_speedup(
                model, 262144, shards, STRIPED_ATTENTION_COST[device], paper.STRIPED_TILES[device]
            )
            label = f"speed-up {device} {model} 2 x {shards}, 262144 tokens"
            measured.append(_row("Table 2", label, speedup, predicted, note=STRIPED_MISS))
    return bounds + measured


def striped_speedup(
    model: str, length: int, shards: int, attention_cost: float, tile: tuple[int, int] | None = None
) -> float:
    """Returns the striped ring's speed-up over the contiguous ring, by the busiest rank's FLOPs.

    Args:
      attention_cost: the cost of an attention FLOP relative to other FLOPs.
      tile: queries and keys of a tile, which is computed as a whole; None for single pairs.
    """
    config = TransformerConfig.preset(model)
    hidden = config.hidden_size
    # The paper counts two of the three feed-forward matrices.
    weights = (
        config.num_hidden_layers * hidden * (4 * hidden + 2 * config.intermediate_size)
        + hidden * paper.STRIPED_VOCABULARY
    )
    linear = 2.0 * weights
    attention = 4.0 * length * hidden * config.num_hidden_layers * attention_cost
    if tile is None:
        contiguous, striped = (shards - 0.5) / shards, 0.5
    else:
        contiguous, striped = (
            busiest_share(shards, length // shards, layout, tile)
            for layout in ("contiguous", "striped")
        )
    return (linear + attention * contiguous) / (linear + attention * striped)


def busiest_share(shards: int, tokens: int, layout: str, tile: tuple[int, int]) -> float:
    """Returns the share of a rank's query-key pairs that the rounds' busiest ranks compute."""
    count = math.ceil(tokens / tile[0]), math.ceil(tokens / tile[1])
    forward, _ = rounds("ring", shards, layout, Block(1, tokens, 1, 1, 1), count)
    return sum(planned.tiles.max() for planned in forward) / (shards * count[0] * count[1])
