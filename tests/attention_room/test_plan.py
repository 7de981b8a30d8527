"""Plans: every query block meets every key block exactly once, and bytes are what the schedules' own formulas say."""
import itertools
from fractions import Fraction

import numpy as np
import pytest

from model.attention import get_schedule
from model.attention.schedules import plan

BLOCK = plan.Block(batch=2, tokens=12, query_heads=8, kv_heads=2, head_dim=16)
SCHEDULES = ["ring", "all_gather", "balanced", {"name": "balanced", "split": True}, "ulysses", {"name": "ulysses", "degree": 2},
             {"name": "ulysses", "degree": 2, "inner": {"name": "balanced", "split": True}}, "attention2d",
             {"name": "attention2d", "columns": 2}]
CASES = [case for case in itertools.product(SCHEDULES, ("contiguous", "striped"), (2, 3, 4, 5, 8))
         if case[2] % 2 == 0 or isinstance(case[0], str) or "split" in case[0]]


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize(("schedule", "layout", "size"), CASES)
def test_every_query_block_meets_every_key_block_once(schedule, layout, size, which):
    """Counted in shares of queries and heads; with causal attention over contiguous blocks, earlier keys are enough."""
    chosen = get_schedule(schedule, size, layout)
    met = np.full((size, size), Fraction(0))
    for task in (task for one in getattr(chosen.plan(size, BLOCK), which) for task in one.tasks):
        assert 0 <= task.part[0] < task.part[1] and 0 <= task.heads[0] < task.heads[1]
        met[np.ix_(task.queries, task.keys)] += Fraction(1, task.part[1] * task.heads[1])
    assert (met <= 1).all()
    needed = np.tril(np.ones((size, size), bool)) if getattr(chosen, "ordered", False) else np.ones((size, size), bool)
    assert (met[needed] == 1).all()


@pytest.mark.parametrize(("schedule", "layout", "size"), CASES)
def test_what_a_rank_computes_it_holds_or_has_been_sent(schedule, layout, size):
    """A rank that never receives anything meets its own blocks alone."""
    for rounds in get_schedule(schedule, size, layout).plan(size, BLOCK):
        reached = {target for one in rounds for send in one.sends for _, target in send.pairs}
        for task in (task for one in rounds for task in one.tasks):
            assert task.rank in reached or {*task.queries, *task.keys} == {task.rank}


def formula(name: str, size: int) -> tuple[float, float]:
    """Mean bytes received forward and backward, by the closed forms of the files' first lines; bfloat16, P ranks."""
    block = BLOCK
    rows = block.batch * block.tokens
    q, kv = rows * block.query_heads * 16 * 2, 2 * rows * block.kv_heads * 16 * 2
    out, dkv, lse, coords = 2 * q, 2 * kv, rows * block.query_heads * 4, rows * 8
    others = size - 1
    if name == "ring":
        return others * (kv + coords), others * (kv + coords) + size * dkv
    if name == "all_gather":
        return others * (kv + coords), others * (kv + coords + dkv)
    if name == "ulysses":  # 8 query heads on at most 8 ranks; two key heads are replicated where ranks are more
        wide = max(1, size // 2)
        return (others / size * (2 * q + wide * kv + lse) + others * coords,
                others / size * (2 * q + wide * kv + 2 * lse + out + wide * dkv) + others * coords)
    if name == "square":
        root = int(size**0.5) - 1
        return (root * (q + coords + kv + coords + 2 * lse + out + lse),
                root * (2 * q + 2 * lse + coords + kv + coords + out + dkv))
    # DistFlashAttn: of P (P - 1) / 2 pairs below the diagonal, those nearer than P / 2 fetch keys, the others send queries.
    near = sum(size - t for t in range(1, size // 2 + 1)) / size
    far = sum(t for t in range(1, (size + 1) // 2)) / size
    return near * (kv + coords) + far * (q + coords + out + lse), (
        near * (kv + coords + dkv) + far * (2 * q + 2 * lse + coords + out))


@pytest.mark.parametrize(("name", "size"), [
    *itertools.product(("ring", "all_gather", "ulysses"), (2, 4, 8)), *itertools.product(["balanced"], (2, 3, 4, 5, 8)),
    ("square", 4), ("square", 16), ("square", 64), ("square", 256)])
def test_bytes_are_the_closed_forms(name, size):
    schedule = {"name": "attention2d", "columns": int(size**0.5)} if name == "square" else name
    planned = get_schedule(schedule, size, "contiguous").plan(size, BLOCK)
    for rounds, expected in zip(planned, formula(name, size), strict=True):
        assert plan.received(rounds, size).mean() == pytest.approx(expected, rel=1e-12)


def test_attention2d_falls_as_the_root():
    """Of all that P ranks hold, each receives (sqrt(P) - 1) / P; on a ring (P - 1) / P."""
    share = {}
    for size in (4, 16, 64, 256):
        planned = get_schedule({"name": "attention2d", "columns": int(size**0.5)}, size).plan(size, BLOCK)
        share[size] = plan.received(planned.forward, size).max() / size
    whole = share[4] * 4
    assert all(share[size] == pytest.approx(whole * (size**0.5 - 1) / size) for size in share)
