"""Tests of eval/report.py: the files it writes, and that unlike cases never become one curve."""

import io
import json

from eval.line_cases import LineCase
from eval.report import curves, print_table, write
from eval.scoring import outcome, score


def outcomes():
    """200 and 680 lines of one form, 700 of another; 680 and more do not fit."""
    return [
        outcome(LineCase("", 7, lines, "line", f"{lines}.jsonl"), answer, lines * 24, 8192, new_tokens=100)
        for lines in (200, 680, 700)
        for answer in ("7", "it is 7", "8")
    ]


def test_files(tmp_path, capsys):
    scores = write(outcomes(), tmp_path / "out", {"checkpoint": "run/checkpoints/3", "trained_length": 8192})
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["num_lines"] for row in results["within_trained_length"]] == [200]
    assert [row["num_lines"] for row in results["beyond_trained_length"]] == [680, 700]
    assert results["about"]["trained_length"] == 8192 and len(scores) == 3
    row = results["within_trained_length"][0]
    assert row["right"] == 2 and row["low"] < row["accuracy"] < row["high"]
    cases = [json.loads(line) for line in (tmp_path / "out" / "cases.jsonl").read_text().splitlines()]
    assert len(cases) == 9 and cases[2]["answer"] == 8 and not cases[2]["right"]
    assert (tmp_path / "out" / "line_retrieval.png").read_bytes().startswith(b"\x89PNG")
    assert "Line retrieval" in capsys.readouterr().out


def test_unlike_cases_are_not_joined():
    found = curves(score(outcomes()))
    assert [[one.num_lines for one in group] for group in found.values()] == [[200], [680], [700]]
    assert len({family for family, _ in found}) == 2


def test_table_tells_what_is_beyond():
    from rich.console import Console

    text = io.StringIO()
    print_table(score(outcomes()), Console(file=text, width=160))
    assert text.getvalue().count("beyond trained length") == 2 and "2/3" in text.getvalue()


def test_no_cases(tmp_path):
    assert write([], tmp_path, {}) == []
