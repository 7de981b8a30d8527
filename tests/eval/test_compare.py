"""Two checkpoints on the same cases: the interval against exact enumeration and scipy, the table,
and what is refused."""

import json

import numpy as np
import pytest
from scipy import optimize, stats

from eval import compare
from eval.scoring import Z95, paired_interval


def pairs(both, worse, better, neither):
    """Scores before and after, with this many cases of each kind."""
    before = [1.0] * (both + worse) + [0.0] * (better + neither)
    after = [1.0] * both + [0.0] * worse + [1.0] * better + [0.0] * neither
    return np.array(before), np.array(after)


@pytest.mark.parametrize(
    ("better", "worse"), [(0.1, 0.1), (0.3, 0.1), (0.05, 0.0), (0.5, 0.2), (0.02, 0.3)]
)
def test_the_interval_covers_the_true_difference_in_95_of_100_samples(better, worse):
    """Enumerates every outcome of 40 cases with its multinomial probability."""
    cases, covered, total = 40, 0.0, 0.0
    for b in range(cases + 1):
        for w in range(cases + 1 - b):
            probability = stats.multinomial.pmf(
                [b, w, cases - b - w], cases, [better, worse, 1 - better - worse]
            )
            low, high = paired_interval(*pairs(0, w, b, cases - b - w))
            total += probability
            covered += probability * (low <= better - worse <= high)
    assert total == pytest.approx(1) and 0.94 <= covered <= 1


@pytest.mark.parametrize("counts", [(20, 5, 15, 10), (80, 2, 12, 6), (10, 10, 10, 70)])
def test_the_interval_is_close_to_the_score_interval(counts):
    """Tango's interval (1998): the differences that the score test with restricted variance does
    not reject, by root finding.

    It is another method, close to ours where cases of both kinds differ; both are designed for the
    coverage tested above.
    """
    _, worse, better, _ = counts
    n = sum(counts)

    def statistic(difference):
        a = 2 * n
        b = -better - worse + (2 * n - better + worse) * difference
        c = -worse * difference * (1 - difference)
        p = (np.sqrt(b * b - 4 * a * c) - b) / (2 * a)
        return (better - worse - n * difference) / np.sqrt(
            n * (2 * p + difference * (1 - difference))
        )

    middle = (better - worse) / n
    expected = (
        optimize.brentq(lambda d: statistic(d) - Z95, -0.999, middle - 1e-9),
        optimize.brentq(lambda d: statistic(d) + Z95, middle + 1e-9, 0.999),
    )
    assert paired_interval(*pairs(*counts)) == pytest.approx(expected, abs=0.02)


def test_the_interval_of_fractional_scores_is_paired():
    """It contains scipy's bootstrap of the differences, which is a point if they are equal; for
    correlated scores it is narrower."""
    random = np.random.default_rng(3)
    before = random.uniform(0, 0.8, 60)
    after = before + random.uniform(0, 0.2, 60)
    low, high = paired_interval(before, after)
    scipys = stats.bootstrap(
        (after - before,), np.mean, method="percentile", n_resamples=9999, rng=7
    ).confidence_interval
    assert low < scipys.low < scipys.high < high
    uncorrelated = paired_interval(before, random.permutation(after))
    assert high - low < (uncorrelated[1] - uncorrelated[0]) / 1.5
    spread = random.permuted(np.tile([0.0, 0.25, 0.5, 0.75, 1.0], 200))
    assert paired_interval(np.zeros(1000), spread) == pytest.approx(
        stats.norm.interval(0.95, spread.mean(), spread.std() / 1000**0.5), abs=3e-3
    )


def line_case(number, lines, right):
    return {
        "source": "generated",
        "num_lines": lines,
        "correct_line": number,
        "depth": number / lines,
        "expected_number": 7,
        "answer": 7 if right else None,
        "right": right,
        "generated": "7" if right else "",
        "prompt_tokens": 90 + right,
        "beyond_trained_length": right,
    }


def write(folder, rows):
    folder.mkdir()
    (folder / "cases.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_table_pairs_cases_whatever_their_order(tmp_path, capsys):
    before = [line_case(n, 20, n < 5) for n in range(20)] + [line_case(3, 50, True)] * 2
    after = [line_case(n, 20, n % 2 == 0) for n in range(1, 20)] + [
        line_case(3, 50, False),
        line_case(3, 50, True),
    ]
    folders = write(tmp_path / "before", before), write(tmp_path / "after", after[::-1])
    assert (
        compare.main([*map(str, folders), "--output", str(tmp_path / "out" / "difference.json")])
        == 0
    )
    rows = json.loads((tmp_path / "out" / "difference.json").read_text())["differences"]
    # Of the cases 1 to 19, four were right before (1 to 4), nine after (the even ones), and two
    # both times (2 and 4).
    low, high = paired_interval(*pairs(2, 2, 7, 8))
    assert rows[0] == {
        "task": "generated",
        "size": 20,
        "unit": "lines",
        "cases": 19,
        "before": pytest.approx(4 / 19),
        "after": pytest.approx(9 / 19),
        "difference": pytest.approx(5 / 19),
        "low": pytest.approx(low),
        "high": pytest.approx(high),
        "better": 7,
        "worse": 2,
    }
    assert (rows[1]["size"], rows[1]["cases"], rows[1]["worse"], rows[1]["difference"]) == (
        50,
        2,
        1,
        -0.5,
    )
    printed = capsys.readouterr().out
    assert f"{5 / 19:+.3f}" in printed and f"left out: 1 cases only in {folders[0]}" in printed


@pytest.mark.parametrize("columns", ["80", "10"])
def test_no_number_is_cut_however_long(tmp_path, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    rows = [
        {"task": "needle", "tokens": tokens, "prompt": str(case), "score": case % 2}
        for tokens in (4096, 131072, 1048576)
        for case in range(20)
    ]
    folders = write(tmp_path / "before", rows), write(tmp_path / "after", rows[::-1])
    assert compare.main([*map(str, folders)]) == 0
    printed = capsys.readouterr().out
    assert "1,048,576 tokens     20   0.500  0.500      +0.000  " in printed
    assert "better  worse" in printed and "\u2026" not in printed


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "is empty"),
        ([{"episode": 1}], "not an evaluation's cases (KeyError"),
        ([line_case(1, 30, True) | {"right": 10**400}], "found the score 1000"),
        ([line_case(1, 30, True) | {"right": float("nan")}], "found the score nan, not 0 to 1"),
        ([line_case(1, 30, True) | {"num_lines": "x"}], "found 'generated', 'x', not a task"),
        ([line_case(1, 30, True) | {"source": 7}], "found 7, 30, not a task and its length"),
        ([line_case(1, 30, True)], "have no case in common"),
        ([line_case(1, 20, True) | {"prompt": "of another text"}], "have no case in common"),
        (None, "not an evaluation's cases (FileNotFoundError"),
    ],
)
def test_incomparable_folders_are_a_one_line_error(tmp_path, capsys, rows, words):
    first = write(tmp_path / "before", [line_case(1, 20, True)])
    second = tmp_path / "after" if rows is None else write(tmp_path / "after", rows)
    assert compare.main([str(first), str(second)]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error and "would work" in error and "\n" not in error
