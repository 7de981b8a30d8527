"""The benchmark of engines: identical data every time, counted repetitions, and the scaling
rule."""

import json
import subprocess
import sys

import pytest

from scripts.benchmarks import bench_engines
from scripts.benchmarks.bench_engines import (
    main,
    memory_rows,
    predicted,
    result_rows,
    write_conversations,
)


def test_conversations_depend_on_the_size_alone_and_one_in_fifty_repeats(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_engines, "FILE_BYTES", 1 << 18)
    written = [write_conversations(tmp_path / name, 1 << 20) for name in ("a", "b")]
    files = [sorted((tmp_path / name).iterdir()) for name in ("a", "b")]
    contents = [[path.read_bytes() for path in paths] for paths in files]
    assert contents[0] == contents[1] and len(contents[0]) == 4
    size = sum(map(len, contents[0]))
    assert written[0] == written[1] and 1 << 20 <= size < (1 << 20) + (1 << 19)
    records = [json.loads(line) for content in contents[0] for line in content.splitlines()]
    conversations = [json.dumps(record["conversations"]) for record in records]
    assert (
        len(conversations) == written[0]
        and len(conversations) - len(set(conversations)) == written[0] // 50
    )


def _row(engine, cores, size, seconds, sha256="a"):
    return {
        **{"engine": engine, "cores": cores, "bytes": size, "seconds": seconds, "sha256": sha256},
        **{"cpu_seconds": seconds, "peak_mib": 300.0, "worker_peak_mib": []},
    }


def test_the_rule_has_a_fixed_time_and_a_constant_speed_per_core():
    rows = [_row("beam", 1, 10**8, 15.0), _row("beam", 1, 2 * 10**8, 25.0)]
    assert predicted(rows, "beam", 4 * 10**8, 1) == pytest.approx(45.0)  # 5 s, plus 10 per 0.1 GB
    assert predicted(rows, "beam", 4 * 10**8, 2) == pytest.approx(25.0)
    assert predicted(rows, "processes", 10**8, 1) is None
    rows += [_row("beam", 2, 4 * 10**8, 40.0, "b"), _row("beam", 1, 4 * 10**8, 46.0, "a")]
    made = result_rows(rows)
    assert made["beam_1_400mb_rule"]["verdict"] == "held"
    assert made["beam_2_400mb_rule"]["verdict"] == "short" and "-38%" in str(
        made["beam_2_400mb_rule"]
    )
    assert made["beam_largest"]["found"] == "0.4 GB" and made["beam_largest"]["verdict"] == "short"
    assert made["same"]["verdict"] == "short" and "beam_1_100mb_rule" not in made


def test_peak_memory_of_the_command_and_of_its_workers_is_compared_between_sizes():
    rows = [
        _row("beam", 2, 10**8, 15.0),
        _row("beam", 2, 10**9, 99.0),
        _row("beam", 1, 10**9, 99.0),
    ]
    rows[0]["worker_peak_mib"], rows[1]["worker_peak_mib"] = [200.0, 180.0], [150.0, 219.0]
    assert memory_rows(rows)["beam_memory"]["verdict"] == "held"
    rows[1]["peak_mib"] = 331.0
    row = memory_rows(rows)["beam_memory"]
    assert row["verdict"] == "short" and row["found"] == "300 -> 331; 200 -> 219"
    assert row["what"].startswith("preparing 0.1 and 1 GB with beam on 2 cores")
    assert not memory_rows(rows[1:])


def test_a_row_is_measured_in_a_separate_process(tmp_path, capsys, monkeypatch):
    words = ["--rows=processes:1", "--gigabytes=0.0002", f"--scratch={tmp_path}"]
    assert main([*words, f"--output={tmp_path / 'out'}"]) == 0
    [row] = json.loads((tmp_path / "out/engines.json").read_text())
    assert row["records"] > 20 and row["documents"] >= row["records"] - row["duplicates"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "the data are removed"
    capsys.readouterr()
    monkeypatch.setattr(bench_engines, "write_conversations", None)  # refused before the work
    assert main(["--rows=fast:1", "--gigabytes=0.0002", f"--output={tmp_path / 'out'}"]) != 0
    assert (
        "--rows: found fast:1; expected ENGINE:CORES, such as processes:2"
        in capsys.readouterr().err
    )


def test_peak_memory_does_not_include_that_of_the_parent_process():
    """Linux gives a process that a large one starts the large one's `ru_maxrss`."""
    large = b"x" * (1 << 29)  # written, so that it is resident
    program = "from scripts.benchmarks.bench_data import peak_mib; print(peak_mib())"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert 10 < float(result.stdout) < len(large) / 2**20
