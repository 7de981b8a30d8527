"""Pairs of key and value are split between training and evaluation, and keys are different."""
import numpy as np
import pytest

from data.synthetic.split import EVALUATION_SHARE, draw_values, is_evaluation
from data.synthetic.words import KINDS, keys


def test_an_eighth_of_the_pairs_is_for_evaluation_and_none_for_both():
    names = keys("noun_noun", 400)[:400]
    share = np.mean([is_evaluation(key, number) for key in names for number in range(50)])
    assert share == pytest.approx(EVALUATION_SHARE, abs=0.01)
    pairs = {}
    for evaluation in (False, True):
        numbers = draw_values(np.random.default_rng(0), names, 1, 1000, evaluation)
        assert len(set(numbers)) == len(names) and all(1 <= number < 1000 for number in numbers)
        pairs[evaluation] = set(zip(names, numbers, strict=True))
        assert all(is_evaluation(*pair) == evaluation for pair in pairs[evaluation])
    assert not pairs[False] & pairs[True]


def test_the_split_is_that_of_earlier_versions():
    """Models were trained on it: it must not change."""
    assert [number for number in range(60) if is_evaluation("amber-falcon", number)] == [0, 4, 5, 7, 20, 33, 47, 52, 57]


def test_too_many_keys_are_refused():
    with pytest.raises(ValueError, match="too few for 91 keys; 90 keys would work"):
        draw_values(np.random.default_rng(0), ["key"] * 91, 0, 100, True)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_different_and_without_end(kind):
    for count in (10, 60_000):
        names = keys(kind, count)
        assert len(set(names)) == len(names) >= count
