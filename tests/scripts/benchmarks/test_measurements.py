"""`python -m scripts.benchmarks`: the results that commands' files give, what is stale, and
resuming after a failure."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from scripts import benchmarks
from scripts.benchmarks import __main__ as bench
from scripts.benchmarks import measurements, page, results, summaries
from scripts.benchmarks.measurements import MEASUREMENTS, Measurement
from scripts.benchmarks.results import load, load_all, row


@pytest.fixture
def workspace(monkeypatch, tmp_path):
    """A repository of two files with one measurement, `size`, of one of them; the folder of its
    results."""
    (tmp_path / "code.py").write_text("x = 1\n")
    (tmp_path / "other.py").write_text("y = 1\n")
    folder = tmp_path / "docs" / "results"
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "FOLDER", folder)
    monkeypatch.setattr(page, "write", lambda: None)
    folder.mkdir(parents=True)
    (folder / "size.json").write_text(
        json.dumps({"title": "Size of code.py", "depends_on": {"code.py": ""}, "facts": ["kept"]})
    )
    size = Measurement(
        lambda out: {"size": row("size", (out / "a.json").read_text(), "12", held=True)},
        (
            """-c "open('{out}/a.json', 'w').write('1')" """,
            """-c "import os, sys; open('{out}/a.json', 'a').write('2'); """
            """sys.exit(os.path.exists('fail'))" """,
        ),
    )
    for name in list(MEASUREMENTS):
        monkeypatch.delitem(MEASUREMENTS, name)
    monkeypatch.setitem(MEASUREMENTS, "size", size)
    monkeypatch.chdir(tmp_path)
    return folder


def test_the_commit_draws_the_figures_that_a_reviewer_remakes(monkeypatch, capfd):
    def drawn(commit, count=10):
        monkeypatch.setattr(bench, "commit", lambda: commit)
        assert bench.main(["--draw", str(count)]) == 0
        return capfd.readouterr().out.splitlines()

    lines = drawn("0123456")
    assert lines == drawn("0123456+changes") and lines != drawn("0123457")
    assert len(lines) == 20 and len(set(lines[::2])) == 10
    for figure, how in zip(lines[::2], lines[1::2], strict=True):
        name, row_id = figure.split(":")[0].split(".")
        result = load(name)
        assert figure.endswith(result.rows[row_id]["found"])
        assert how.strip() in (result.command, result.rows[row_id].get("command"))
    every = {
        f"{name}.{row_id}"
        for name, result in load_all().items()
        if name != "drawn"
        for row_id in result.rows
    }
    assert {line.split(":")[0] for line in drawn("0123456", 10_000)[::2]} == every


def test_only_measurements_of_changed_files_run_again(workspace, tmp_path, capfd):
    assert bench.main(["--output", "out"]) == 0
    first = load("size")
    assert first.rows["size"]["found"] == "12" and first.seconds is not None and not first.carried
    assert (first.title, first.facts) == ("Size of code.py", ["kept"]) and first.hardware["cores"]
    capfd.readouterr()
    (tmp_path / "other.py").write_text("y = 2\n")
    assert bench.main(["--output", "out"]) == 0 and capfd.readouterr().out == "size: fresh\n"
    assert bench.main(["--fresh", "size"]) == 0
    (tmp_path / "code.py").write_text("x = 2\n")
    assert bench.main(["--fresh", "size"]) == 1
    assert bench.main(["--fresh", "sise"]) == 2 and "found 'sise'" in capfd.readouterr().err
    assert bench.main(["--stale"]) == 0
    assert "--only size" in (stdout := capfd.readouterr().out) and "changed: code.py" in stdout
    assert bench.main(["--output", "out"]) == 0
    assert load("size").depends_on != first.depends_on
    assert bench.main(["--only", "size", "--output", "out"]) == 0, (
        "requested by name: measured although it is fresh"
    )
    assert "$ python -c" in capfd.readouterr().out


def test_a_failed_start_resumes_with_the_command_that_failed(workspace, tmp_path, capfd):
    (tmp_path / "fail").touch()
    assert bench.main(["--output", "out"]) == 1 and "size: failed with 1" in capfd.readouterr().err
    assert not load("size").rows
    (tmp_path / "fail").unlink()
    assert bench.main(["--output", "out"]) == 0
    assert load("size").rows["size"]["found"] == "122", "the first command was not run again"


def test_a_start_after_a_change_begins_from_scratch(workspace, tmp_path):
    (tmp_path / "fail").touch()
    assert bench.main(["--output", "out"]) == 1
    (tmp_path / "fail").unlink()
    (tmp_path / "code.py").write_text("x = 2\n")
    assert bench.main(["--output", "out"]) == 0
    assert load("size").rows["size"]["found"] == "12"


def test_table_3_matches_its_record():
    assert MEASUREMENTS["table3"].summarize(None) == load("table3").rows


def test_the_packages_map_names_every_module():
    folder = Path(benchmarks.__file__).parent
    modules = {path.stem for path in folder.glob("[a-z]*.py")}
    modules |= {path.parent.name for path in folder.glob("*/__init__.py")}
    assert modules - set(re.findall(r"\w+", benchmarks.__doc__)) == set()


def test_every_measurement_has_its_result_and_files():
    assert set(MEASUREMENTS) <= set(load_all())
    for name in MEASUREMENTS:
        assert load(name).depends_on, name


DIRECTIONS = {
    "forward": {
        "imbalance": 1.25,
        "max_bytes": 3.0,
        "mean_bytes": 2.0,
        "planned_max_bytes": 3.0,
        "planned_mean_bytes": 2.0,
    }
}
DIRECTIONS["backward"] = DIRECTIONS["forward"] | {"planned_max_bytes": 2.0}
RAW = {  # a measurement's files -> row, figure, verdict
    "step": (
        {
            "step.json": [
                {
                    "side": side,
                    "length": length,
                    "tokens_per_second": speed,
                    "step_seconds": 1.0,
                    "peak_gib": peak,
                    "share_of_matmul": 0.4,
                    "matmul_gflops": 430.0,
                }
                for length in (2048, 4096)
                for side, speed, peak in (("theirs", 100.0, 7.0), ("ours", 120.0, 3.5))
            ]
        },
        {
            "speed_2048": ("1.200x", "held"),
            "speed_4096": ("1.200x", "short"),
            "memory_2048": ("3.50", "held"),
            "least_2048": ("0.82x", "short"),
        },
    ),
    "kernels": (
        {
            "kernels/bench_kernels.json": {
                "rows": [
                    {
                        "length": length,
                        "pass": name,
                        "peer": peer,
                        "seconds": seconds,
                        "peak_mib": peak,
                    }
                    for length in (8192, 16384)
                    for name in ("forward", "forward+backward")
                    for peer, seconds, peak in (("ours", 1.0, 200.0), ("torch-sdpa", 0.8, 100.0))
                ]
            }
        },
        {"both_8192": ("0.80x", "short"), "memory_8192": ("200", "short")},
    ),
    "balance": (
        {
            "balance.json": [
                {"schedule": "ring", "layout": layout, "ranks": 4, **DIRECTIONS}
                for layout in ("contiguous", "striped")
            ]
        },
        {"ring_contiguous": ("1.2500", "held"), "ring_striped": ("1.2500", "short")},
    ),
    "balance_time": (
        {
            file: [
                {"case": case, "length": 16384, "tiles": tiles, "speedup": 1.4, "bound": 1.45}
                for case in ("striped ring", "zigzag ring", "balanced, split")
            ]
            for file, tiles in (("time.json", 16), ("time_32.json", 32))
        },
        {
            "striped_16384": ("96.6%", "held"),
            "balanced_32_tiles": ("1.400", "held"),
        },
    ),
    "bytes": (
        {"bytes.json": [{"schedule": "usp 4", "ranks": 4, **DIRECTIONS}]},
        {"usp_4": ("50.0%", "short")},
    ),
    "overlap": (
        {
            "overlap.json": [
                {
                    "schedule": "balanced split",
                    "kind": "collective-permute",
                    "backward": backward,
                    "times": 2.0,
                    "nbytes": 8,
                    "kernels": ["attention"] * (not backward),
                    "products": [],
                }
                for backward in (False, True)
            ]
        },
        {"balanced_split": ("0 of 2; 2 of 2", "short")},
    ),
    "data": (
        {
            "data/bench_data.json": {
                "complete_records": 17_671,
                "every_record_accounted_for": True,
                "first_turn_is_not_human": 6_258,
                "peak_mib_at_each_tenth": [44.1, 50.0],
                "megabytes_per_cpu_second": 62.0,
                "packing": [{"padding_percent": 0.07}],
            }
        },
        {
            "records": ("17,671", "held"),
            "memory": ("44.1 and 50.0", "short"),
            "padding": ("0.07%", "held"),
        },
    ),
    "preparation": (
        {
            "baseline.json": {
                "baseline": "67afd98",
                "seconds": {
                    "dump": [{"this": 3.0, "baseline": 2.0}, {"this": 3.2, "baseline": 2.0}],
                    "fixtures": [{"this": 4.2, "baseline": 4.0}, {"this": 4.0, "baseline": 4.0}],
                    "import": [{"this": 0.1, "baseline": 0.1}],
                    "help": [{"this": 3.3, "baseline": 3.0}],
                },
            }
        },
        {
            "dump": ("1.55x (1.50 to 1.60), 3.10 s", "short"),
            "fixtures": ("1.02x (1.00 to 1.05), 4.10 s", "held"),
            "help": ("1.10x (1.10 to 1.10), 3.30 s", "short"),
        },
    ),
    "identity": (
        {"before.json": {"named": 0}}
        | {
            path: content
            for name, named in (("full", 32), ("lora", 33), ("qlora", 31))
            for path, content in (
                (f"{name}.json", {"named": named}),
                (f"{name}/metrics.jsonl", {"step": 120, "step_seconds": 2.0, "peak_host_gib": 3.0}),
                (f"{name}/held_out.jsonl", {"held_out_loss_nats_per_target": 0.5}),
                (f"{name}/checkpoints/120/manifest.json", {"shapes": {"a": [2, 3], "b": [4]}}),
            )
        },
        {
            "before": ("0 of 40", "held"),
            "lora": ("33 of 40", "held"),
            "qlora": ("31 of 40", "short"),
        },
    ),
}


@pytest.mark.parametrize("name", RAW)
def test_rows_follow_from_the_files_of_commands(name, tmp_path):
    files, expected = RAW[name]
    for file, content in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(json.dumps(content))
    rows = MEASUREMENTS[name].summarize(tmp_path)
    for row_id, (figure, verdict) in expected.items():
        assert (rows[row_id]["found"], rows[row_id]["verdict"]) == (figure, verdict)


def test_a_rows_figure_is_the_largest_error_that_its_tests_saw(monkeypatch, tmp_path):
    """Each command runs once; the figure is the largest error of the row's kind, or the number of
    tests; a failing command falls short."""
    error = {"largest": 2.51e-7, "limit": 1e-5, "cases": 1200}
    wrote = {
        "a": {"passed": 3, "errors": {"loss": error, "gradients": {**error, "largest": 4e-6}}},
        "b": {"passed": 1, "errors": {"loss": error}},
        "c": {"passed": 4, "errors": {}},
        "d": {"passed": 0, "errors": {}},
    }
    started = []

    def run(command, check):
        name = command[-3]
        started.append(name)
        Path(command[-1]).write_text(json.dumps(wrote[name]), encoding="utf-8")
        return subprocess.CompletedProcess(command, int(name == "b"))

    def exactness_row(name, goal="1e-5", **more):
        return row(name, "1e-6", goal, held=True, command=f"pytest {name}", **more)

    rows = {
        "all": exactness_row("a", date="2026-01-01"),
        "loss": exactness_row("a", error="loss"),
        "failed": exactness_row("b"),
        "equal": exactness_row("c", "same bytes"),
        "none": exactness_row("d"),
    }
    stored = results.Result("t", rows, "", "", "", {}, {}, {})
    monkeypatch.setattr(summaries, "load", lambda name: stored)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(summaries, "commit", lambda: "abc")
    result = measurements.MEASUREMENTS["exactness"].summarize(tmp_path)
    assert {name: (cells["found"], cells["verdict"]) for name, cells in result.items()} == {
        "all": ("4.0e-6, 2,400 comparisons", "held"),
        "loss": ("2.5e-7, 1,200 comparisons", "held"),
        "failed": ("fails", "short"),
        "equal": ("holds, 4 tests", "held"),
        "none": ("fails", "short"),
    }
    assert started == ["a", "b", "c", "d"] and "date" not in result["all"]
