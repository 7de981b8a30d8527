"""The rows of a short GPU session: each command accepts its options, and rows for which time is
short are named."""

import json

import pytest

from scripts.benchmarks import gpu_call
from tests.scripts.test_help import module_of_command
from trainer.options import parse

ROWS = [row for rows in gpu_call.CALLS.values() for row in rows]


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_rows_command_accepts_its_options(row, tiny):
    _, name, *words = gpu_call.module(row.words)
    options = module_of_command(name).Options
    parsed = parse(options, [*words, *(row.tiny.split() if tiny else [])])
    assert str(parsed.output).startswith("runs/")


def test_rows_are_written_as_they_come_and_rows_without_time_are_named(
    tmp_path, monkeypatch, capsys
):
    """The first row ends, the second is stopped, and no time is left for the third."""
    rows = [
        gpu_call.Row("ends", 1, "", ""),
        gpu_call.Row("hangs", 1, "", ""),
        gpu_call.Row("late", 60, "", ""),
    ]
    monkeypatch.setitem(gpu_call.CALLS, "steps", rows)
    programs = iter(["print('seen')", "import time; time.sleep(60)"])
    monkeypatch.setattr(gpu_call, "module", lambda words: ["-c", next(programs)])
    assert gpu_call.main(["--seconds", "4", "--output", str(tmp_path)]) == 1
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["row"], row["status"]) for row in written] == [
        ("ends", "exit 0"),
        ("hangs", "out of time"),
        ("late", "skipped for lack of time"),
    ]
    assert (tmp_path / "ends" / "log.txt").read_text() == "seen\n"
    assert len(capsys.readouterr().out.splitlines()) == 3
