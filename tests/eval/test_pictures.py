"""Pictures of scores: every curve can be told apart, and no legend is cut off or hides points."""

import itertools
import random

import pytest
from matplotlib.figure import Figure

from eval import line_report, pictures, scoring, suite
from eval.line_cases import LineCase
from tests.pictures import overlaps

PATHS = [f"/a/folder/with/a/long/path/{'x' * 30}/{run}/checkpoints/{'9' * 7}" for run in "ab"]


def test_the_first_70_curves_differ():
    assert len({tuple(pictures.style(number).items()) for number in range(70)}) == 70


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["runs/a/checkpoints/30", "b/c/d"], ["a/30", "c/d"]),
        (["runs/a/results/30", "runs/b/results/30"], ["a/results/30", "b/results/30"]),
        (["a", "b/a"], ["a", "b/a"]),
        (["org/name", "/x/org/name"], ["org/name", "x/org/name"]),
        (["y" * 80], ["..." + "y" * 67]),
        ([], []),
    ],
)
def test_names_are_shortened_to_what_tells_them_apart(names, short):
    assert list(pictures.short_names(names).values()) == short


def outcomes():
    """Made-up answers to cases of eight lengths, two styles of keys and five depths."""
    draw = random.Random(0)
    cases = itertools.product((20, 50, 100, 200, 400, 680, 700, 1350), range(20))
    return [
        scoring.Outcome(
            LineCase("x" * 50 * part + "L" + "x" * (1000 - 50 * part), 5, lines, "L", "a.jsonl"),
            draw.choice("567"),
            25 * lines,
            lines > 400,
        )
        for lines, part in cases
    ]


def scores_picture():
    results = [
        suite.Result(f"task_number_{task}", tokens, depth, 3, 1.0, 0.44, 1.0, tokens, False)
        for task, tokens in itertools.product(range(11), (4096, 131072))
        for depth in ((None,) if task else (0.0, 1.0))
    ]
    return pictures.scores(results, PATHS[0])


def lines_picture():
    scores = scoring.score(outcomes())
    line_report.plot(dict.fromkeys(PATHS, scores), "", f"Line retrieval: {PATHS[0]}")


def depths_picture():
    line_report.plot_depths(line_report.by_depth(outcomes()), "", PATHS[0])


@pytest.mark.parametrize("draw", [scores_picture, lines_picture, depths_picture])
def test_legends_are_beside_the_curves(draw, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    figure = draw() or drawn[0]
    assert overlaps(figure) == []
    legends = [panel.get_legend() for panel in figure.axes if panel.get_legend()]
    for legend in (*figure.legends, *legends):
        box = legend.get_tightbbox()
        assert figure.bbox.containsx(box.x0) and figure.bbox.containsx(box.x1)
        assert figure.bbox.containsy(box.y0) and figure.bbox.containsy(box.y1)
        assert not any(box.overlaps(panel.get_window_extent()) for panel in figure.axes)
    assert legends or figure.legends
