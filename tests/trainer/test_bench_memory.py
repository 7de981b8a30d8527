"""scripts/bench_memory.py: its line on points that are one and points that are none, and two lengths really measured."""
import json

import numpy as np
import pytest

from scripts.bench_memory import fit, main


def test_the_line_and_how_far_from_it():
    lengths = np.array([2048, 4096, 8192, 65536])
    line = fit(lengths, 3 + lengths * 512 / 2**20)
    assert line["bytes_per_token"] == pytest.approx(512) and line["mib_at_0"] == pytest.approx(3)
    assert line["worst_residual"] < 1e-9
    assert fit(lengths, (lengths / 2048.0) ** 2)["worst_residual"] > 0.05


def test_two_lengths(tmp_path, capsys):
    """Four times the tokens: the plan has room for 60 KiB more of each token than the model has parameters."""
    main(["--lengths", "2048", "8192", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "memory.json").read_text())
    short, long = found["rows"]
    for name in ("planned_mib", "measured_mib"):
        assert 1.5 < long[name] / short[name] < 4.5, f"{name} does not grow with the length"
    assert 0.5 < long["measured_mib"] / long["planned_mib"] < 2
    assert (tmp_path / "memory.png").stat().st_size > 5000 and "bytes a token" in capsys.readouterr().out
