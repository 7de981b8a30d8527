"""The curriculum's benchmark: its commands, and its rows from the scores."""

import json

import pytest

from eval.scoring import Score
from scripts.benchmarks import curriculum


def score(lines, right, low, tokens, cases=96):
    return Score("", "own", lines, False, cases, right, right / cases, low, 1.0, tokens)


@pytest.fixture
def saved(monkeypatch):
    """The rows passed to `renew`."""
    rows = {}
    monkeypatch.setattr(curriculum, "renew", lambda name, new_rows, seconds: rows.update(new_rows))
    return rows


def test_only_rows_up_to_the_trained_length_have_a_verdict(saved):
    """The recipe's last stage has 16,384 tokens, of which an answer may take 16."""
    grown = [score(20, 95, 0.943, 183), score(2700, 92, 0.897, 16_368), score(3400, 9, 0, 16_369)]
    alone = [score(20, 3, 0, 183), score(2700, 2, 0, 16_368), score(3400, 1, 0, 16_369)]
    curriculum.save_result(grown, alone, 600.0)
    assert [row["verdict"] for row in saved.values()] == ["held", "short", "no goal"]
    assert saved["lines_2700"]["what"] == "one line of 2,700 found, 16,368 tokens"
    assert saved["lines_2700"]["found"] == "92 of 96 (trained only at 16,384 tokens: 2)"


def test_the_comparison_trains_as_long_as_all_stages_together(monkeypatch, tmp_path):
    """Stages of 30, 50 and 40 s, the last of which made 80 steps: 0.5 s per step, hence 240
    steps."""
    commands = []
    monkeypatch.setattr(curriculum, "python", lambda text, **values: commands.append(text))
    stages = {"stages": [{"steps": 9}, {"steps": 9}, {"steps": 80, "context_length": 64}]}
    monkeypatch.setattr(curriculum, "recipe", lambda: stages)
    for folder, seconds in (("stages/0", 30), ("stages/1", 50), (".", 40)):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"wall_seconds": x}) + "\n" for x in (1, seconds)]
        (tmp_path / folder / "metrics.jsonl").write_text("".join(lines))
    curriculum.train_alone(tmp_path / "alone", tmp_path)
    assert commands[0].split()[-4:] == ["--data.context_length", "64", "--train.steps", "240"]
