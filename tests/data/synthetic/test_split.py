"""Key-value pairs are split between training and evaluation, and keys are distinct."""

import numpy as np
import pytest

from data.synthetic.split import (
    EVALUATION_SHARE,
    draw_keys,
    draw_values,
    is_evaluation,
    is_reserved,
)
from data.synthetic.words import KINDS, keys


def test_an_eighth_of_the_pairs_is_for_evaluation_and_none_is_for_both():
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


def test_the_split_matches_earlier_versions():
    """Models were trained on it, so it must not change."""
    assert [number for number in range(60) if is_evaluation("amber-falcon", number)] == [
        0,
        4,
        5,
        7,
        20,
        33,
        47,
        52,
        57,
    ]


def test_too_many_keys_are_refused():
    with pytest.raises(ValueError, match="too few for 91 keys; 90 keys would work"):
        draw_values(np.random.default_rng(0), ["key"] * 91, 0, 100, True)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_distinct_and_unlimited(kind):
    for count in (10, 60_000):
        names = keys(kind, count)
        assert len(set(names)) == len(names) >= count


def test_no_training_text_has_a_reserved_key_or_number():
    reserved = draw_keys(np.random.default_rng(0), "adjective_noun", 3000, reserved=True)
    trained = draw_keys(np.random.default_rng(0), "adjective_noun", 30_000, reserved=False)
    assert len(set(reserved)) == 3000 and len(set(trained)) == 30_000
    assert all(map(is_reserved, reserved)) and not any(map(is_reserved, trained))
    numbers = draw_values(np.random.default_rng(1), reserved, 1, 50_000, True, reserved=True)
    assert all(map(is_reserved, numbers)) and len(set(numbers)) == 3000
    assert not any(
        map(is_reserved, draw_values(np.random.default_rng(1), trained, 1, 50_000, False))
    )
    with pytest.raises(ValueError, match="adjective_noun has"):
        draw_keys(np.random.default_rng(0), "adjective_noun", 9000, reserved=True)
    with pytest.raises(ValueError, match="are too few"):
        draw_values(np.random.default_rng(0), reserved, 0, 20_000, True, reserved=True)
