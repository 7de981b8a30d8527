"""The balance of work, from counts that the running kernels emit, against the papers'
arithmetic."""

import numpy as np
import pytest

from model.attention import get_schedule
from model.attention.layout import permutation
from model.attention.schedules.plan import Block
from scripts.benchmarks.bench_schedules.balance import (
    TILE,
    computed_tiles,
    imbalance,
    measure,
    per_round,
)

TILES = 16  # per side of a block, as in the papers' arithmetic


def contiguous_ring(size):
    """In round 0 every rank has a diagonal block; in round t, P - t of P ranks have a whole
    block."""
    n, diagonal = TILES, TILES * (TILES + 1) / 2
    return (diagonal + (size - 1) * n * n) / (diagonal + n * n * (size - 1) / 2)


def distflashattn(size):
    """P // 2 rounds of whole blocks; with even P the last one leaves half of the ranks idle."""
    n, diagonal = TILES, TILES * (TILES + 1) / 2
    return (diagonal + size // 2 * n * n) / (diagonal + n * n * (size - 1) / 2)


@pytest.mark.parametrize(
    ("schedule", "layout", "size", "expected", "most"),
    [
        pytest.param(
            "ring", "contiguous", 4, contiguous_ring(4), 2 - 1 / 4, marks=pytest.mark.slow
        ),
        ("ring", "striped", 4, 1.0, 1.07),
        pytest.param("ring", "zigzag", 4, 1.0, 1.07, marks=pytest.mark.slow),
        pytest.param(
            "balanced",
            "contiguous",
            4,
            distflashattn(4),
            1 / (1 - 1 / 4),
            marks=pytest.mark.slow,
        ),
        pytest.param("balanced", "contiguous", 3, distflashattn(3), 1.0, marks=pytest.mark.slow),
        pytest.param(
            {"name": "balanced", "split": True}, "contiguous", 4, 1.0, 1.05, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_balance_matches_the_papers_arithmetic(schedule, layout, size, expected, most):
    row = measure(schedule, layout, size, TILES)
    for which in ("forward", "backward"):
        assert row[which]["imbalance"] == pytest.approx(expected, rel=1e-12)
        assert row[which]["imbalance"] <= most
    if layout == "contiguous" and schedule == "ring":
        assert row["forward"]["imbalance"] >= 0.99 * most


def test_balanced_idles_one_in_p_plus_two():
    """DistFlashAttn with even P, a diagonal block counted as a whole one: from counts in whole
    blocks (one tile per side)."""
    row = measure("balanced", "contiguous", 4, 1)
    assert 1 - 1 / row["forward"]["imbalance"] == pytest.approx(1 / (4 + 2))


@pytest.mark.parametrize(
    "schedule",
    [
        "ring",
        pytest.param("balanced", marks=pytest.mark.slow),
        "attention2d",
        pytest.param({"name": "ulysses", "degree": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_running_kernels_compute_each_needed_tile_once(schedule):
    """Compared with the visible pairs themselves; with USP, two ranks of a line compute each tile
    for half of the heads."""
    size, tiles, layout = 4, 4, "striped"
    order = permutation(size * tiles * TILE, size, layout).reshape(-1, TILE)
    needed = {
        (q, k)
        for q, queries in enumerate(order)
        for k, keys in enumerate(order)
        if queries.max() >= keys.min()
    }
    for computed in computed_tiles(schedule, layout, size, tiles).values():
        pairs = [(qb * tiles + q, kb * tiles + k) for _, qb, q, kb, k in computed.tolist()]
        assert set(pairs) == needed
        assert len(pairs) == len(needed) * (2 if isinstance(schedule, dict) else 1)


def test_a_tile_outside_the_plan_is_an_error():
    rounds = get_schedule("ring", 2).plan(2, Block(1, 8, 2, 2, 2)).forward
    assert imbalance(per_round(np.array([[0, 0, 0, 0, 0], [1, 1, 0, 1, 0]]), rounds, 2)) == 1.0
    with pytest.raises(KeyError):
        per_round(np.array([[0, 1, 0, 0, 0]]), rounds, 2)
