"""bench_memory: its line on points that are one and points that are none, and two lengths really measured."""

import json

import numpy as np
import pytest

from scripts.benchmarks.bench_memory import fit, main


def test_the_line_and_how_far_from_it():
    lengths = np.array([2048, 4096, 8192, 16384, 32768, 65536])
    line = fit(lengths, 3 + lengths * 512 / 2**20)
    assert line["bytes_per_token"] == pytest.approx(512) and line["mib_at_0"] == pytest.approx(3)
    assert line["worst_residual"] < 1e-9
    assert fit(lengths, (lengths / 2048.0) ** 2)["worst_residual"] > 0.1, "a square is no line"


@pytest.mark.slow
def test_two_lengths(tmp_path, capsys):
    """What a further token costs, by the compiler's plan and as measured: within a factor of two, and some kilobytes."""
    main(["--lengths", "2048", "16384", "--output", str(tmp_path)])
    lines = json.loads((tmp_path / "memory.json").read_text())["lines"]
    planned, measured = (lines[name]["bytes_per_token"] for name in ("planned_mib", "measured_mib"))
    assert 2000 < planned < 10_000 and 0.5 < measured / planned < 2
    assert (
        tmp_path / "memory.png"
    ).stat().st_size > 5000 and "bytes a token" in capsys.readouterr().out
