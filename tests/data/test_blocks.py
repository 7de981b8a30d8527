"""Plans in blocks: every document is used as often as its weight says, sources are mixed, and rows
match best fit."""

import numpy as np
import pytest

from data import blocks, packing
from data.blocks import BlockedPlan, count_rows

LENGTH = 100
STARTS = np.array([0, 150, 151, 151, 400])  # four sources: 150 documents, 1, none, 249


@pytest.fixture
def lengths(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 64)
    return np.random.default_rng(0).integers(0, 230, 400).astype(np.int32)


def _plan(lengths, epoch=0, seed=5, weights=None):
    return BlockedPlan(lengths, STARTS, LENGTH, seed, epoch, weights)


@pytest.mark.parametrize("seed", range(20))
def test_counted_rows_match_best_fit(seed):
    draw = np.random.default_rng(seed)
    context = int(draw.integers(1, 300))
    lengths = draw.integers(0, draw.choice([context, 2 * context, 8]) + 1, draw.integers(0, 2000))
    assert count_rows(lengths, context) == len(packing.plan(lengths, context, seed, 0))


def test_rows_contain_every_token_once(lengths):
    plan = _plan(lengths)
    rows = [plan.row(number) for number in range(len(plan))]
    assert all(0 < sum(piece.length for piece in row) <= LENGTH for row in rows)
    seen = [np.zeros(length, int) for length in lengths]
    for row in rows:
        for document, start, length in row:
            seen[document][start : start + length] += 1
    assert all((counts == 1).all() for counts in seen)
    assert plan.padding_share == pytest.approx(1 - lengths.sum() / (len(plan) * LENGTH))
    assert sorted(plan.documents) == list(range(400))


def test_a_block_has_a_share_of_every_source_in_few_runs(lengths):
    plan = _plan(lengths)
    for block in range(7):
        numbers = plan.documents_of(block)
        assert abs((numbers < 150).sum() - 150 / 7) <= 4
        assert abs((numbers > 150).sum() - 249 / 7) <= 4
        assert (np.diff(np.sort(numbers)) > 1).sum() <= 3 * blocks.CHUNKS, "consecutive documents"


def test_rows_depend_only_on_seed_and_epoch_and_stay_within_blocks(lengths):
    plan, again, later, other = (_plan(lengths, *x) for x in ((0, 5), (0, 5), (1, 5), (0, 6)))
    order = [17, 3, len(plan) - 1, 0, 40]  # whatever the order of the requests
    assert [plan.row(n) for n in order] == [again.row(n) for n in reversed(order)][::-1]
    assert plan.row(0) not in (later.row(0), other.row(0))
    first = set(plan.documents_of(0))
    assert {piece.document for piece in plan.row(0)} <= first
    assert not first & {piece.document for piece in plan.row(len(plan) - 1)}


def test_weights_set_how_often_documents_repeat(lengths):
    weights = np.array([2.5, 1.0, 1.0, 0.25])
    assert set(np.bincount(_plan(lengths, weights=weights).documents)[:150]) == {2, 3}
    used = [
        np.bincount(_plan(lengths, epoch, weights=weights).documents, minlength=400)
        for epoch in range(20)
    ]
    for documents, weight in ((slice(150), 2.5), (150, 1), (slice(151, 400), 0.25)):
        assert np.all(sum(used)[documents] == 20 * weight)
    assert {int(epoch[:150].sum()) for epoch in used} == {375}
    assert {int(epoch[151:].sum()) for epoch in used} <= {61, 62, 63, 64}
