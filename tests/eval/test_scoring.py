"""Scoring of line retrieval: the last integer, Wilson's interval compared with scipy's, and the
groups."""

import pytest
from scipy.stats import binomtest

from eval.line_cases import LineCase
from eval.scoring import last_integer, outcome, score, wilson


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
        ("3.0", 0),
    ],
)
def test_last_integer(text, number):
    assert last_integer(text) == number


@pytest.mark.parametrize(
    ("right", "cases"), [(0, 1), (1, 1), (0, 50), (50, 50), (30, 50), (1, 200), (199, 200)]
)
def test_wilson_against_scipy(right, cases):
    expected = binomtest(right, cases).proportion_ci(method="wilson")
    assert wilson(right, cases) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert wilson(0, 0) == (0.0, 1.0)


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
    assert scored(50, 50).above_chance is None, "too few to say"
    assert scored(50, 50).above_chance_reason == "50 cases; at least 100 are needed"
