"""Plans: every query block is paired with every key block exactly once, and bytes match closed
forms."""

import dataclasses
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from model.attention import Mask, TokenCoords, get_schedule
from model.attention.coords import visible
from model.attention.layout import permutation
from model.attention.schedules import plan

BLOCK = plan.Block(batch=2, tokens=12, query_heads=8, kv_heads=2, head_dim=16)
SCHEDULES = [
    "ring",
    {"name": "ring", "bidirectional": True},
    "all_gather",
    "balanced",
    {"name": "balanced", "split": True},
    "ulysses",
    {"name": "ulysses", "degree": 2},
    {"name": "ulysses", "degree": 2, "inner": {"name": "balanced", "split": True}},
    {"name": "ulysses", "degree": 2, "inner": {"name": "attention2d", "overlap": True}},
    {"name": "ulysses", "degree": 2, "inner": {"name": "ulysses", "degree": 2}},
    "attention2d",
    {"name": "attention2d", "columns": 2},
    {"name": "attention2d", "overlap": True},
    {"name": "attention2d", "columns": 2, "overlap": True},
    "ring_self_attention",
]
MASKS = (Mask(), Mask(window=14), Mask(causal=False), Mask(causal=False, window=14))
CASES = [
    case
    for case in itertools.product(SCHEDULES, ("contiguous", "striped"), (2, 3, 4, 5, 8), MASKS)
    if case[2] % 2 == 0 or isinstance(case[0], str) or not {"degree", "columns"} & set(case[0])
]


def times_computed(rounds, size):
    """Returns how often each [query block, key block] is computed, in shares of queries, keys,
    heads and products."""
    times = np.full((size, size), Fraction(0))
    for task in (task for round_ in rounds for task in round_.tasks):
        shares = (task.part, task.key_part, task.heads)
        assert all(0 <= part < parts for part, parts in shares)
        times[np.ix_(task.queries, task.keys)] += Fraction(*task.products) / math.prod(
            parts for _, parts in shares
        )
    return times


@pytest.mark.parametrize(("schedule", "layout", "size", "mask"), CASES)
def test_every_visible_pair_of_blocks_is_computed_once(schedule, layout, size, mask):
    """The dense mask decides what is visible; other pairs may be computed or not. Each of RSA's
    ring passes does some of the products."""
    order = permutation(size * BLOCK.tokens, size, layout)[None]
    coords = TokenCoords(order, np.ones_like(order))
    seen = (
        np.asarray(visible(coords, coords, mask))
        .reshape(size, BLOCK.tokens, size, BLOCK.tokens)
        .any((1, 3))
    )
    for rounds in get_schedule(schedule, size, layout).plan(size, BLOCK, mask):
        times = times_computed(rounds, size)
        assert (times <= 1).all() and (times[seen] == 1).all()


@pytest.mark.parametrize(("schedule", "layout", "size", "mask"), CASES)
def test_a_rank_holds_or_has_received_what_it_computes(schedule, layout, size, mask):
    """A rank that never receives anything computes only its own blocks."""
    for rounds in get_schedule(schedule, size, layout).plan(size, BLOCK, mask):
        reached = {target for round_ in rounds for send in round_.sends for _, target in send.pairs}
        for task in (task for round_ in rounds for task in round_.tasks):
            assert task.rank in reached or {*task.queries, *task.keys} == {task.rank}


def formula(name: str, size: int) -> tuple[float, float]:
    """Returns mean bytes received forward and backward, by the closed forms at the top of the
    schedules' files; bfloat16, P ranks."""
    block = BLOCK
    rows = block.batch * block.tokens
    q, kv = rows * block.query_heads * 16 * 2, 2 * rows * block.kv_heads * 16 * 2
    out, dkv, lse, coords = 2 * q, 2 * kv, rows * block.query_heads * 4, rows * 8
    others = size - 1
    if name in ("ring", "ring bidirectional"):
        return others * (kv + coords), others * (kv + coords) + size * dkv
    if (
        name == "ring_self_attention"
    ):  # K, V; K, V and K except for its first hop, gradients after the last two
        return others * (kv + coords), others * (1.5 * kv + coords) - 0.5 * kv + size * dkv
    if (
        name == "ring window"
    ):  # keys less than 14 tokens away, in blocks of 12: two hops onwards, then home
        return 2 * (kv + coords), 2 * (kv + coords) + 3 * dkv
    if name == "all_gather":
        return others * (kv + coords), others * (kv + coords + dkv)
    if (
        name == "ulysses"
    ):  # 8 query heads on at most 8 ranks; two KV heads are replicated for more than two ranks
        kv_share = max(1, size // 2)
        return (
            others / size * (2 * q + kv_share * kv + lse) + others * coords,
            others / size * (2 * q + kv_share * kv + 2 * lse + out + kv_share * dkv)
            + others * coords,
        )
    if name == "square":
        root = int(size**0.5) - 1
        return (
            root * (q + coords + kv + coords + 2 * lse + out + lse),
            root * (2 * q + 2 * lse + coords + kv + coords + out + dkv),
        )
    if name == "square overlap":  # one lse instead of the maximum and sum for merging
        root = int(size**0.5) - 1
        return (
            root * (q + coords + kv + coords + out + lse),
            root * (2 * q + 2 * lse + coords + kv + coords + out + dkv),
        )
    # DistFlashAttn: of the P (P - 1) / 2 pairs below the diagonal, those nearer than P / 2 fetch
    # keys, the others send queries.
    near = sum(size - t for t in range(1, size // 2 + 1)) / size
    far = sum(t for t in range(1, (size + 1) // 2)) / size
    return near * (kv + coords) + far * (q + coords + out + lse), (
        near * (kv + coords + dkv) + far * (2 * q + 2 * lse + coords + out)
    )


NAMED = {"ring bidirectional": {"name": "ring", "bidirectional": True}, "ring window": "ring"}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *itertools.product(
            ("ring", "ring bidirectional", "all_gather", "ulysses", "ring_self_attention"),
            (2, 4, 8),
        ),
        *itertools.product(["balanced"], (2, 3, 4, 5, 8)),
        *itertools.product(["ring window"], (4, 8)),
        *itertools.product(("square", "square overlap"), (4, 16, 64, 256)),
    ],
)
def test_received_bytes_match_the_closed_forms(name, size):
    square = {"name": "attention2d", "columns": int(size**0.5), "overlap": name.endswith("overlap")}
    schedule = square if name.startswith("square") else NAMED.get(name, name)
    mask = Mask(window=14) if name.endswith("window") else Mask()
    planned = get_schedule(schedule, size, "contiguous").plan(size, BLOCK, mask)
    for rounds, expected in zip(planned, formula(name, size), strict=True):
        assert plan.received(rounds, size).mean() == pytest.approx(expected, rel=1e-12)
        if name.startswith(("ring", "balanced", "square overlap")):
            assert plan.kinds(rounds) == {plan.PERMUTE}


@pytest.mark.parametrize("overlap", [False, True])
def test_bytes_of_attention2d_fall_with_the_root_of_the_ranks(overlap):
    """Each of P ranks receives (sqrt(P) - 1) / P of all keys, values and queries; in a ring (P - 1)
    / P."""
    share = {}
    for size in (4, 16, 64, 256):
        planned = get_schedule(
            {"name": "attention2d", "columns": int(size**0.5), "overlap": overlap}, size
        ).plan(size, BLOCK)
        share[size] = plan.received(planned.forward, size).max() / size
    whole = share[4] * 4
    assert all(share[size] == pytest.approx(whole * (size**0.5 - 1) / size) for size in share)


@pytest.mark.parametrize("schedule", ["ring", "all_gather", "balanced", "ring_self_attention"])
def test_document_starts_are_sent_as_a_third_coordinate(schedule):
    """For global tokens: 4 more bytes for each token whose coordinates are received."""
    rounds = [
        get_schedule(schedule, 3).plan(3, block).forward
        for block in (BLOCK, dataclasses.replace(BLOCK, coordinates=3))
    ]
    two, three = (plan.received(direction, 3) for direction in rounds)
    assert (three - two == 2 * 4 * BLOCK.batch * BLOCK.tokens).all()
