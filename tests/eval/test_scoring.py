"""Scoring of line retrieval: the last integer, Wilson's interval against scipy's, and the
groups."""

import numpy as np
import pytest
from scipy import stats

from eval.line_cases import LineCase
from eval.scoring import ENOUGH, bootstrap, last_integer, outcome, paired_interval, score, wilson


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The number is <42527>.", 42527),
        ("line 3: 17", 17),
        ("no", None),
        ("", None),
        ("12, no, 0013", 13),
        ("-5", 5),
        ("9" * 5000, None),
        ("9" * 101, None),
        ("9" * 100, int("9" * 100)),
        ("3.0", 0),
    ],
)
def test_last_integer(text, number):
    assert last_integer(text) == number


@pytest.mark.parametrize(
    ("right", "cases"), [(0, 1), (1, 1), (0, 50), (50, 50), (30, 50), (1, 200), (199, 200)]
)
def test_wilson_against_scipy(right, cases):
    expected = stats.binomtest(right, cases).proportion_ci(method="wilson")
    assert wilson(right, cases) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, cases)[0] == 0.0 and wilson(cases, cases)[1] == 1.0, "not 1e-17"


@pytest.mark.parametrize("right", [-1, 11])
def test_wilson_refuses_invalid_counts(right):
    with pytest.raises(ValueError, match=f"{right} right of 10 cases"):
        wilson(right, 10)


def test_bootstrap_matches_scipys_percentile_interval():
    values = np.random.default_rng(1).exponential(size=60)
    expected = stats.bootstrap(
        (values,), np.mean, n_resamples=10_000, method="percentile", rng=2
    ).confidence_interval
    assert bootstrap(values) == pytest.approx((expected.low, expected.high), abs=0.01)
    assert bootstrap(values) == bootstrap(values), "the same every time"


def answers(right, wrong):
    return np.array([1.0] * right + [0.0] * wrong)


def test_the_paired_interval_of_right_and_wrong_answers_is_bonett_and_prices():
    """Of 40 cases 8 become right and 2 wrong: p = 9/42 and 3/42, and the interval of their
    difference by hand; with few cases it is clipped to [-1, 1]; equal answers still have an
    interval."""
    before, after = answers(12, 28), np.concatenate([answers(10, 2), answers(8, 20)])
    assert paired_interval(before, after) == pytest.approx((-0.0129181, 0.2986324), abs=1e-6)
    low, high = paired_interval(answers(0, 3), answers(3, 0))
    assert (low, high) == (pytest.approx(-0.1012, abs=1e-4), 1.0)
    assert paired_interval(answers(3, 0), answers(0, 3)) == (-1.0, -low)
    low, high = paired_interval(answers(50, 0), answers(50, 0))
    assert -low == high == pytest.approx(1.959964 * (2 / 52 / 52) ** 0.5, abs=1e-6)


SHARES = {
    "two of three": [0.0, 0.5, 1.0],
    "four needles": [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0],
    "mostly 1": [0.75] + [1.0] * 8,
    "alike": [0.4, 0.5, 0.6],
}


@pytest.mark.parametrize("cases", [1, 3, 5, 20, 50])
@pytest.mark.parametrize("scores", SHARES.values(), ids=list(SHARES))
def test_intervals_of_shares_cover_the_true_mean(scores, cases):
    """In at least 90 of 100 samples, though there may be few; and none is a point."""
    drawn = np.random.default_rng(cases).choice(scores, (2, 1000, cases))
    true = np.mean(scores)
    intervals = [wilson(sample.sum(), cases) for sample in drawn[0]]
    assert np.mean([low <= true <= high for low, high in intervals]) >= 0.9
    assert min(high - low for low, high in intervals) > 0.1 / np.sqrt(cases)
    paired = [paired_interval(*pair) for pair in zip(*drawn, strict=True)]
    assert np.mean([low <= 0 <= high for low, high in paired]) >= 0.9
    assert min(high - low for low, high in paired) > 1 / (cases + 2)


def test_equal_shares_have_an_interval():
    """Of one case with half of its needles found, and of cases that all gain as much."""
    assert wilson(0.5, 1) == pytest.approx((0.0546, 0.9454), abs=1e-4)
    low, high = paired_interval(np.full(3, 0.25), np.full(3, 0.5))
    assert low < 0 < 0.25 < high


def test_grouped_by_lines_and_trained_length():
    def answered(lines, generated, tokens):
        return outcome(
            LineCase("", 7, lines, "", "file"), generated, tokens, trained_length=100, new_tokens=10
        )

    outcomes = [
        answered(20, "7", 80),
        answered(20, "8", 90),
        answered(20, "7", 91),
        answered(50, "it is 7", 300),
    ]
    within, beyond, long = score(outcomes)
    assert (within.num_lines, within.cases, within.right, within.beyond_trained_length) == (
        20,
        2,
        1,
        False,
    )
    assert within.mean_prompt_tokens == 85 and within.accuracy == 0.5
    assert (beyond.cases, beyond.beyond_trained_length) == (1, True), (
        "90 + 10 fit in 100, 91 + 10 do not"
    )
    assert (long.num_lines, long.accuracy, long.beyond_trained_length) == (50, 1.0, True)


def test_above_chance_needs_the_interval_and_a_hundred_cases():
    def scored(right, cases):
        answers = ["7"] * right + ["8"] * (cases - right)
        return score([outcome(LineCase("", 7, 4, ""), text, 1, 100, 1) for text in answers])[0]

    assert scored(40, 100).above_chance is True and scored(40, 100).above_chance_reason is None
    assert scored(30, 100).above_chance is False, "30 of 100 may be luck where chance is 1 in 4"
    assert scored(ENOUGH - 1, ENOUGH - 1).above_chance is None, "too few cases"
    assert scored(100, 100).chance == 0.25
    assert scored(50, 50).above_chance_reason == "50 cases; at least 100 are needed"
