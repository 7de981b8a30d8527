"""The table of bytes: the compiler sends what the plan says, and the file agrees with the
screen."""

import json

from scripts.benchmarks.bench_schedules.__main__ import main


def test_a_ring_receives_what_its_plan_says(tmp_path, capsys):
    file = tmp_path / "bytes.json"
    command = "bytes --ranks 4 --schedules ring --tokens 128 --kernel reference --output"
    assert main([*command.split(), str(file)]) == 0
    (row,) = json.loads(file.read_text(encoding="utf-8"))
    own_queries = 128 * 32 * 128 * 2
    keys_and_values = 3 * own_queries // 2  # from three other ranks; 8 of 32 heads, K and V
    assert keys_and_values <= row["forward"]["max_bytes"] <= 1.02 * keys_and_values
    assert f"{row['forward']['max_bytes'] / own_queries:8.3f}" in capsys.readouterr().out
