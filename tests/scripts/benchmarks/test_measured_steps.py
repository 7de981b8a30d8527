"""Measured steps against the cost model: its errors and its table."""

import json

import pytest

from planning.costs import measured
from scripts.benchmarks import measured_steps, summaries


def test_errors_match_the_rows_and_other_projects_steps_are_shown_with_our_range(tmp_path, capsys):
    assert measured_steps.main(["--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "measured_steps.json").read_text())
    stdout = capsys.readouterr().out
    for row in result["measured"]:
        assert row["error"] == pytest.approx(row["estimated"] / row["measured"] - 1)
        assert row["label"] in stdout and 0 < row["low"] < row["high"]
    # Steps that are only compared set no range, so none is held out.
    assert sum(row["steps"] for row in result["held_out"]) == len(measured.measured_steps())
    assert len(result["measured"]) == len(measured.measured_steps() + measured.compared_steps())
    # Each also has a row of its own in the result file.
    found = [row["found"] for row in summaries.measured_steps(tmp_path).values()]
    assert sum("%)" in text for text in found) == len(result["measured"])
    # TRL's Qwen3-8B at 1M on 8 H100: 364 s, and 380 with released versions.
    (million,) = (
        row
        for row in result["ours"]
        if row["machine"] == "8 x H100" and row["length"] == 1024 * 1024
    )
    assert million["peers"] == ["TRL: 364 to 380"]
