"""Covering sets hold every combination of values that their cases have, in far fewer cases."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.covering import covering

CASES = st.lists(st.tuples(*[st.integers(0, 3)] * 5), unique=True, max_size=60)


def combinations(cases, together):
    return {
        (places, tuple(case[place] for place in places))
        for case in cases
        for places in itertools.combinations(range(5), together)
    }


@given(CASES, st.integers(1, 5))
def test_every_combination_of_values_occurs(cases, together):
    chosen = covering(cases, together)
    assert set(chosen) <= set(cases) and len(set(chosen)) == len(chosen)
    assert combinations(chosen, together) == combinations(cases, together)


def test_pairs_need_few_cases():
    """Of 1,024 cases; at least 16 are needed."""
    assert len(covering(itertools.product(range(4), repeat=5), 2)) <= 28
