"""The tables of bench_schedules that need no device: communication volume beside DistFlashAttn's Appendix C."""

import json

import pytest

from scripts.benchmarks.bench_schedules import main


def test_volume_is_below_the_papers_where_helpers_send_less(tmp_path, capsys):
    assert (
        main(["distflashattn", "--ranks", "4", "16", "--output", str(tmp_path / "volume.json")])
        == 0
    )
    rows = json.loads((tmp_path / "volume.json").read_text())
    assert [row["ranks"] for row in rows] == [4, 16] and "P   16" in capsys.readouterr().out
    for row in rows:
        assert row["forward"] + row["backward"] == pytest.approx(row["together"])
        assert 0.95 < row["together"] / (3 * (row["ranks"] - 1) / row["ranks"]) < 1


def test_a_command_line_without_a_table_is_an_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "command" in capsys.readouterr().err
