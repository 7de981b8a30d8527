"""Ring Attention: Tables 1 and 2, Appendix C."""

from __future__ import annotations

import functools

from model.attention.schedules.plan import Block
from planning.costs.step import Sizes
from scripts.benchmarks.papers import published as paper
from scripts.benchmarks.papers.row import Row

_row = functools.partial(Row, "Ring Attention")


def ring_attention() -> list[Row]:
    """Returns the rows of Ring Attention: Tables 1 and 2, Appendix C."""
    return [*_ring_table_1(), *_ring_table_2(), *_ring_appendix_c()]


def _ring_table_1() -> list[Row]:
    b, h, n, s, c = 1, 4096, 32, 65536, 1024  # the paper's letters; LLaMA-7B on 64 devices
    shape = "bytes a layer at b 1, h 4096, n 32, s 65536, c 1024"
    output = Block(b, s, n, n, h // n).queries  # s x h in bfloat16
    # Six blocks of c x h: queries, keys and values, incoming keys and values, output.
    block = Block(b, c, n, n, h // n)
    ring = block.queries + 2 * block.keys + block.queries
    values = {
        "2bhs^2": (2 * b * h * s * s, 2 * b * n * s * s, "the scores are n s^2, not h s^2"),
        "8bsh": (8 * b * s * h, 4 * output, "a feed-forward four times as wide"),
        "2bsh": (2 * b * s * h, output, ""),
        "6bch": (6 * b * c * h, ring, "six blocks are 6bch numbers, 12bch bytes"),
    }
    rows = []
    for name, formula in paper.RING_TABLE_1.items():
        printed, predicted, reason = values[formula]
        rows.append(
            _row(
                "Table 1",
                f"{name}: {formula}",
                float(printed),
                float(predicted),
                note="; ".join(filter(None, (shape, reason))),
            )
        )
    return rows


def _ring_table_2() -> list[Row]:
    rows = []
    for name, (tflops, bandwidth, tokens, length) in paper.RING_TABLE_2.items():
        # A round of c queries and c keys computes 4 d c^2 FLOPs and sends K and V, 4 c d bytes:
        # equally long at c = F / B.
        least = tflops * 1e12 / (bandwidth * 1e9) / 1e3
        rows.append(
            _row(
                "Table 2",
                f"{name}: minimal block, thousands",
                tokens,
                least,
                digits=1 if tokens < 10 else None,
                goal=0.01,
                note=""
                if tokens < 10
                else "24.96; printed 24.8, of which 6 x is not its own 149.6",
            )
        )
        rows.append(
            _row("Table 2", f"{name}: minimal sequence, thousands", length, 6 * least, goal=0.01)
        )
    return rows


def _ring_appendix_c() -> list[Row]:
    name, longer, ratio = paper.RING_FIGURE_5_RATIO
    rows = [
        _row(
            "Appendix C, text",
            f"{name}: {longer} x 4K",
            ratio,
            flops_ratio(name, longer),
            digits=1,
            note="the text says 10M, which is 2441 x 4096; 162.6 belongs to 3072 x 4096",
        )
    ]
    name, longer, times = paper.RING_FIGURE_5_MILLION
    rows.append(
        _row(
            "Appendix C, text",
            f"{name}: 1M, 'approximately {times[0]}-{times[1]} times'",
            None,
            flops_ratio(name, longer),
            between=times,
        )
    )
    return rows


def flops_ratio(name: str, longer: int) -> float:
    """Returns the factor by which training FLOPs grow from 4,096 tokens to `longer` times as many.

    As in Appendix C, every pair of tokens counts and the output head does not.
    """
    hidden = paper.RING_FIGURE_5_HIDDEN[name]
    sizes = Sizes(
        layers=1,
        weights=12 * hidden * hidden,
        head_weights=0,
        query_heads=1,
        kv_heads=1,
        head_dim=hidden,
        hidden=hidden,
    )
    per_token = [sizes.needed_flops(1, length) for length in (longer * 4096, 4096)]
    return per_token[0] / per_token[1]
