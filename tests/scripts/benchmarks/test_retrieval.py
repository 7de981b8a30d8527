"""The benchmark of practised retrieval: its rows from scores, losses and answers."""

import json

import pytest

from eval.scoring import Score
from scripts.benchmarks import retrieval


def score(right, low, high, source="LINES", lines=20):
    return Score(source, "", lines, False, 48, right, right / 48, low, high, 568.0)


@pytest.mark.parametrize(
    ("before", "after", "held"),
    [
        (score(2, 0.01, 0.14), score(44, 0.80, 0.97), True),
        (score(2, 0.01, 0.14), score(16, 0.22, 0.48), False),  # 14 of 48 is not 0.3 more
        (score(20, 0.29, 0.56), score(36, 0.55, 0.85), False),  # their intervals overlap
        (score(40, 0.70, 0.92), score(46, 0.93, 0.99), True),  # 0.95 is enough
    ],
)
def test_the_goal_is_a_gain_with_disjoint_intervals(before, after, held):
    assert retrieval.apart(before, after) is held


def test_rows_compare_scores_books_and_tasks(monkeypatch):
    rows = {}
    monkeypatch.setattr(retrieval, "renew", lambda name, new_rows, seconds: rows.update(new_rows))
    short = [
        {
            task: {"score": share, "low": 0.37, "high": 0.50, "cases": 200}
            for task, share in zip(retrieval.SHORT_TASKS, shares, strict=True)
        }
        for shares in ((0.43, 0.43), (0.44, 0.36))
    ]
    retrieval.save_result(
        [score(2, 0.01, 0.14)], [score(44, 0.80, 0.97)], [3.80, 3.851], short, 60.0
    )
    assert rows["lines_20"]["found"] == "2 -> 44 of 48"
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "lines_20": "held",
        "book": "short",  # 0.051 nats more
        "book_next_sentence": "held",
        "book_last_word": "short",  # below the interval before
    }


def test_a_books_loss_is_the_mean_over_its_tokens(tmp_path):
    """(2 nats x 3 targets + 4 nats x 1) / 4 = 2.5, and 1 nat after."""
    curves = {
        name: [
            {"loss_nats_per_target": loss, "targets": targets}
            for loss, targets in zip(losses, (3, 1), strict=True)
        ]
        for name, losses in (("before", (2.0, 4.0)), ("after", (1.0, 1.0)))
    }
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "loss_by_position.json").write_text(json.dumps({"curves": curves}))
    assert retrieval.book_losses(tmp_path, "m", "b", tmp_path) == [2.5, 1.0]


def test_cases_from_the_file_are_distinguished_from_generated_ones():
    scores = [score(1, 0, 1, "200_lines.jsonl", 200), score(1, 0, 1, "synthetic", 20)]
    families = [score_.family for score_ in retrieval.named(scores, "data/200_lines.jsonl")]
    assert families == ["generated", "LongChat's own"]
