"""The report of line retrieval: its files, and that different families of cases give separate
curves."""

import io
import json

import pytest

from data.outputs import PICTURE
from eval.line_cases import LineCase
from eval.line_report import by_depth, curves, plot, plot_depths, print_table, write
from eval.scoring import outcome, score


def outcomes():
    """Returns outcomes with 200 and 680 lines of one family and 700 of another; 680 and more exceed
    the trained length."""
    return [
        outcome(
            LineCase("", 7, lines, "line", f"{lines}.jsonl"),
            answer,
            lines * 24,
            8192,
            new_tokens=100,
        )
        for lines in (200, 680, 700)
        for answer in ("7", "it is 7", "8")
    ]


def test_files(tmp_path, capsys):
    scores = write(
        outcomes(), tmp_path / "out", {"checkpoint": "run/checkpoints/3", "trained_length": 8192}
    )
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["num_lines"] for row in results["within_trained_length"]] == [200]
    assert [row["num_lines"] for row in results["beyond_trained_length"]] == [680, 700]
    assert results["about"]["trained_length"] == 8192 and len(scores) == 3
    row = results["within_trained_length"][0]
    assert row["right"] == 2 and row["low"] < row["accuracy"] < row["high"]
    cases = [
        json.loads(line) for line in (tmp_path / "out" / "cases.jsonl").read_text().splitlines()
    ]
    assert len(cases) == 9 and cases[2]["answer"] == 8 and not cases[2]["right"]
    for name in ("line_retrieval.png", "line_depth.png"):
        assert PICTURE in (tmp_path / "out" / name).read_bytes()[:1000]
    assert "Line retrieval" in capsys.readouterr().out


def test_depths_are_kept_apart_as_scores_are(tmp_path, saved_figures):
    """By the side of the trained length and by source; a report shows them apart too."""
    answered = [
        outcome(LineCase("", 7, 20, "line", source), answer, tokens, 8192, new_tokens=100)
        for source, answer, tokens in (
            ("a.jsonl", "7", 400),
            ("a.jsonl", "8", 9000),
            ("b.jsonl", "7", 400),
            ("b.jsonl", "8", 400),
        )
    ]
    rows = by_depth(answered)
    found = [(row["source"], row["beyond_trained_length"], row["accuracy"]) for row in rows]
    assert found == [("a.jsonl", False, 1), ("a.jsonl", True, 0), ("b.jsonl", False, 0.5)]
    keys = ("family", "num_lines", "source", "beyond_trained_length", "cases", "right")
    assert [[row[key] for key in keys] for row in rows] == [
        [getattr(item, key) for key in keys] for item in score(answered)
    ]
    plot_depths(rows, tmp_path / "plot.png")
    (axes,) = saved_figures[0].axes
    assert [container.get_label() for container in axes.containers] == [
        "adjective-noun keys, 20 lines, a.jsonl",
        "adjective-noun keys, 20 lines, a.jsonl, beyond trained length",
        "adjective-noun keys, 20 lines, b.jsonl",
    ]


def test_different_families_are_not_joined():
    groups = curves(score(outcomes()))
    assert [[item.num_lines for item in group] for group in groups.values()] == [
        [200],
        [680],
        [700],
    ]
    assert len({family for family, _ in groups}) == 2


def test_sources_of_equal_numbers_of_lines_are_not_joined():
    """Files of different lengths, such as LongChat's, are one curve."""

    def named(*sources):
        items = [
            outcome(LineCase("", 7, lines, "line", source), "7", 400, 8192, new_tokens=100)
            for source, lines in sources
        ]
        return {name: len(group) for (name, _), group in curves(score(items)).items()}

    family = "adjective-noun keys"
    assert named(("a.jsonl", 20), ("b.jsonl", 40)) == {family: 2}
    assert named(("a.jsonl", 20), ("a.jsonl", 40), ("b.jsonl", 20)) == {
        f"{family}, a.jsonl": 2,
        f"{family}, b.jsonl": 1,
    }


@pytest.mark.parametrize(
    "name", ["200_lines.jsonl", "a_file_whose_name_alone_would_fill_half_of_a_line.jsonl"]
)
def test_table_fits_80_columns(name):
    """Each score is on one line at the default width of a pipe."""
    from rich.console import Console

    long = [
        outcome(
            LineCase("", 7, 1000, "line", name, "noun_noun"), "7", 120_000, 8192, new_tokens=100
        )
    ] * 1000
    text = io.StringIO()
    print_table(score(outcomes() + long), Console(file=text, width=80))
    lines = [line.split() for line in text.getvalue().splitlines()]
    assert [
        "cases",
        "from",
        "length",
        "lines",
        "tokens",
        "right",
        "accuracy",
        "interval",
        "chance",
    ] in lines
    assert ["680.jsonl", "beyond", "680", "16,320", "2/3", "0.67", "0.21-0.94", "0.001"] in lines
    assert ["beyond", "1000", "120,000", "1000/1000", "1.00", "1.00-1.00", "0.001"] in [
        line[1:] for line in lines
    ]


@pytest.mark.parametrize("name", ["[red]680.jsonl", "a[/b].jsonl"])
def test_a_files_name_is_not_read_as_markup(name, capsys):
    print_table(
        score(
            [
                outcome(
                    LineCase("", 7, 20, "line", name, "noun_noun"), "7", 480, 8192, new_tokens=100
                )
            ]
        )
    )
    assert name in capsys.readouterr().out


@pytest.mark.parametrize("lengths", [(20,), (20, 40)])
def test_plot_shows_scores_chance_and_tokens(tmp_path, saved_figures, lengths):
    scores = score(outcome(LineCase("", 7, n, "line"), "7", n * 24, 8192, 100) for n in lengths)
    plot({"before": scores, "after": scores}, tmp_path / "plot.png")
    (axes,) = saved_figures[0].axes
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["chance"].get_ydata()) == [1 / n for n in lengths]
    assert lines["chance"].get_marker() != "None"  # one point alone is visible
    curves = [container.lines[0] for container in axes.containers]
    assert [list(curve.get_ydata()) for curve in curves] == [[1.0] * len(lengths)] * 2
    assert len({curve.get_color() for curve in curves}) == 2
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == [f"{n}\n{n * 24}" for n in lengths]


def test_no_cases(tmp_path):
    assert write([], tmp_path, {}) == []
