"""Progress without a terminal: a line when one is due, and none before."""

import pytest

from data import progress
from data.progress import ProgressBar


@pytest.mark.parametrize(
    ("bar", "amount", "line"),
    [
        (ProgressBar("answering", 1200, "answers"), 3, "answering: 3 of 1,200 answers"),
        (ProgressBar("preparing data", 3_400_000, "B"), 1_200_000, "preparing data: 1.2 of 3.4 MB"),
        (ProgressBar("playing", 7), 7, "playing: 7 of 7"),
    ],
)
def test_a_line_shows_how_much_is_done(bar, amount, line):
    bar.advance(amount)
    assert bar.line() == line


def test_lines_are_printed_when_they_are_due(monkeypatch, capsys):
    seconds = iter([0.0, 1.0, 31.0, 31.0, 32.0, 100.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    with ProgressBar("answering", 4, "answers") as bar:
        for _ in range(3):
            bar.advance()
    assert capsys.readouterr().err == "answering: 2 of 4 answers\n"


def test_nothing_is_printed_with_show_false(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", -1)
    with ProgressBar("answering", 4, show=False) as bar:
        bar.advance(4)
    assert capsys.readouterr().err == ""
