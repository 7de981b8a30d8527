"""The packing plan: every token once, without overlaps, with little padding, the same on every
machine."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.packing import plan, visits

LENGTHS = st.lists(st.integers(0, 90), max_size=60)


def rows_of(packed):
    return tuple(packed.row(number) for number in range(len(packed)))


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 64), st.integers(-3, 2**70), st.integers(0, 5))
def test_rows_contain_each_token_once_and_fit(lengths, context_length, seed, epoch):
    packed = plan(lengths, context_length, seed, epoch)
    seen = [np.zeros(length, int) for length in lengths]
    for row in rows_of(packed):
        assert row and sum(length for _, _, length in row) <= context_length
        for document, start, length in row:
            assert length > 0 and start + length <= lengths[document]
            seen[document][start : start + length] += 1
    assert all((count == 1).all() for count in seen)
    assert rows_of(packed) == rows_of(plan(np.array(lengths), context_length, seed, epoch))


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.integers(1, 64))
def test_row_count_is_the_same_in_every_epoch(lengths, context_length):
    assert len({len(plan(lengths, context_length, 1, epoch)) for epoch in range(4)}) == 1


def test_the_order_depends_on_seed_and_epoch_and_matches_the_record():
    lengths = [5, 9, 3, 7, 7, 2, 8, 4]
    plans = [plan(lengths, 12, seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len(set(map(rows_of, plans))) == 9
    # Recorded: a run that resumes with another version of numpy must have the same order.
    assert rows_of(plan(lengths, 12, 0, 0)) == RECORDED


RECORDED = (
    ((5, 0, 2), (3, 0, 7)),
    ((4, 0, 7), (0, 0, 5)),
    ((7, 0, 4), (6, 0, 8)),
    ((2, 0, 3), (1, 0, 9)),
)


@pytest.mark.parametrize("context_length", [4096, 16384])
def test_padding_of_chats_is_at_most_two_percent(context_length):
    # Log-normal like the lengths of shared chats: a median of 700 tokens and a long tail.
    lengths = np.exp(np.random.default_rng(0).normal(6.5, 1.1, 20000)).astype(int) + 20
    assert plan(lengths, context_length, 0, 0).padding_share <= 0.02


def test_the_padding_share_by_hand():
    """Rows of 10: 6 and 4 tokens fill one, 7 leave 3 of another; 3 of 20. No rows have no
    padding."""
    assert plan([6, 7, 4], 10, 0, 0).padding_share == pytest.approx(3 / 20)
    assert plan([], 10, 0, 0).padding_share == 0


def _times(documents, weights, seed, epoch):
    """Returns how often an epoch's plan has each document."""
    packed = plan([10] * documents, 40, seed, epoch, weights)
    return np.bincount(packed.documents, minlength=documents)


@settings(max_examples=60, deadline=None)
@given(st.decimals(0, 4, places=3), st.integers(1, 60), st.integers(-3, 2**70))
def test_any_number_of_epochs_use_a_document_as_often_as_its_weight_says(weight, documents, seed):
    times = np.zeros(documents, int)
    for epoch in range(8):
        now = _times(documents, [float(weight)] * documents, seed, epoch)
        assert abs(now.sum() - float(weight) * documents) <= 3, "epochs share them evenly"
        times += now
        due = weight * (epoch + 1)
        assert set(times) <= {math.floor(due), math.ceil(due)}


def test_the_documents_of_small_and_of_mixed_sources_are_shared_between_epochs():
    weights = np.repeat([0.5, 1.0, 2.5, 0.25], [100, 3, 40, 1])
    first, second, *others = (_times(144, weights, 7, epoch) for epoch in range(4))
    assert (first + second)[:100].tolist() == [1] * 100 and first[:100].sum() == 50
    assert first[100:103].tolist() == [1] * 3
    assert (first + second)[103:143].tolist() == [5] * 40 and 99 <= first[103:143].sum() <= 101
    assert sum(others, first + second)[143] == 1


def test_a_decimal_weight_stays_exact_after_a_million_epochs():
    """0.7 * 10 * epochs is a whole number; in binary, the 0.7 that is stored is less."""
    for start in (0, 10**6, 10**15):
        times = sum(visits(np.arange(50), 0.7, 3, start + epoch) for epoch in range(10))
        assert times.tolist() == [7] * 50


def test_whole_weights_give_the_recorded_order():
    """Recorded: a run that began before fractional weights had their own rule must resume."""
    assert rows_of(plan([5, 9, 3, 7], 12, 0, 1, [2.0, 1.0, 3.0, 1.0])) == (
        ((2, 0, 3), (2, 0, 3), (0, 0, 5)),
        ((3, 0, 7), (0, 0, 5)),
        ((1, 0, 9), (2, 0, 3)),
    )


def test_a_row_holds_at_least_one_token():
    with pytest.raises(ValueError, match="context_length 0 must be at least 1"):
        plan([1, 2], 0, 0, 0)
