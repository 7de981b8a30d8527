"""The benchmark of packing plans every document of its index, in blocks where there are many."""

import numpy as np

from data import blocks
from scripts.benchmarks.bench_packing import plan_index, write_index


def test_every_document_is_planned(tmp_path, monkeypatch):
    write_index(tmp_path / "index.npz", 3000)
    with np.load(tmp_path / "index.npz") as index:
        tokens = int(index["length"].sum())
    padding = []
    for most in (4000, 2000):
        monkeypatch.setattr(blocks, "MOST_DOCUMENTS", most)
        plan = plan_index(tmp_path / "index.npz", 32768)
        assert plan["documents"] == 3000
        padding.append(plan["padding_share"])
        assert round(tokens / (1 - padding[-1]) / 32768) == plan["rows"]
    assert padding[0] <= padding[1] < 0.05
