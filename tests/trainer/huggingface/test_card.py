"""The model card of an export: its lines of evaluation results."""

import pytest

from trainer.huggingface.card import _result_lines

ROW = {"task": "acc", "tokens": 0, "score": 0.25, "low": 0.2, "high": 0.3, "cases": 80}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "acc: 0.250, 95% interval 0.20 to 0.30, 80 cases"),
        ({"tokens": 4096}, "acc, 4,096 tokens: 0.250, 95% interval 0.20 to 0.30, 80 cases"),
        ({"score": 20.1, "low": None, "high": None}, "acc: 20.100, 80 cases"),
        ({"cases": 0}, "acc: 0.250, 95% interval 0.20 to 0.30"),
    ],
)
def test_results_are_written_with_what_they_have(changes, line):
    """lm-eval's tasks have no length, a perplexity no interval."""
    content = {"evaluation": "lm-eval", "results": [ROW | changes, ROW]}
    assert _result_lines(content)[0] == f"- lm-eval, {line}"
