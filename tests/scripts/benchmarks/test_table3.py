"""Ring Attention's table: the search agrees with trying every context, and stores the answers."""

import json

import pytest

import planning.plan
from scripts.benchmarks.table3 import __main__ as table3
from scripts.benchmarks.table3.__main__ import LEAST, MOST, longest
from scripts.benchmarks.table3.cells import COLUMNS, LIKE_FOR_LIKE, Cell, cells

CONTEXTS = [LEAST << power for power in range(21)]


@pytest.mark.parametrize("start", (LEAST, 1 << 16, MOST))
@pytest.mark.parametrize("most", (0, LEAST, 5 << 17, MOST))
def test_the_search_agrees_with_trying_every_context(most, start):
    tried = []

    def fits(context):
        tried.append(context)
        return context <= most

    result = longest(fits, start)
    assert result == max((context for context in CONTEXTS if context <= most), default=0)
    assert not result or result in tried
    assert result == MOST or (2 * result or LEAST) in tried
    assert len(tried) == len(set(tried))


@pytest.fixture
def small(monkeypatch):
    """A table of one small machine with 100 MiB per device."""
    monkeypatch.setattr(
        "scripts.benchmarks.table3.cells.PAPER", {"v5e:2x2": {"tiny": (1, 2, 4, 16)}}
    )
    monkeypatch.setattr(planning.plan, "memory_gib", lambda topology: 100 / 1024)


@pytest.mark.slow
def test_a_compiled_cell_agrees_with_trying_every_context(small, tmp_path):
    """The ring of a tiny model on four chips, with the TPU compiler: from 32K to the first context
    that does not fit."""
    cell = Cell("v5e:2x2", "tiny", "ring", "device")
    [options] = cell.memory_options()
    fitting = []
    for context in CONTEXTS[5:]:
        if not table3.compiled(cell.job(context, options))["fits"]:
            break
        fitting.append(context)
    filled = table3.search(cell, table3.Compilations(tmp_path / "compilations.json"))
    assert (filled["longest"], filled["next"]) == (fitting[-1], 2 * fitting[-1])
    assert filled["plan"]["peak_gib"] <= 100 / 1024 and "needs" in filled["next_refused"][0]
    assert filled["plan"]["mesh"]["sequence"] == 4 and filled["paper"] == 16 << 10


def test_columns_differ_only_in_their_configuration(small):
    jobs = {
        column: Cell("v5e:2x2", "tiny", column, "device").job(4096, {"remat": "nothing"})
        for column in COLUMNS
    }
    assert {
        column: (job.batch, job.run.attention.kernel, bool(job.run.memory.loss_chunk))
        for column, job in jobs.items()
    } == {
        "vanilla": (4, "reference", False),
        "memory-efficient": (4, "auto", False),
        "blockwise feed-forward": (4, "auto", True),
        "ring": (1, "auto", True),
    }
    assert {column: (job.run.mesh.fsdp, job.run.mesh.sequence) for column, job in jobs.items()} == {
        column: (1, 4) if column == "ring" else (4, 1) for column in jobs
    }


def test_host_memory_is_bounded_and_a_second_start_compiles_nothing(
    small, monkeypatch, tmp_path, capsys
):
    """A compiler with fixed answers for 4K tokens: (GiB of the device's 0.1, GiB on a host that has
    48)."""
    says = {"every_k": (0.05, 0), "offload": (0.001, 12), "offload_every_k": (0.01, 6)}
    compilations = []

    def compiled(job):
        compilations.append(job.context)
        device, host = (gib * job.context / 4096 for gib in says[job.run.memory.remat])
        if device > 0.1:
            return {"fits": False, "needs_gib": device, "has_gib": 0.1, "compile_seconds": 0.0}
        return {
            "fits": True,
            "peak_gib": device,
            "device_gib": 0.1,
            "host_gib": host,
            "compile_seconds": 0.0,
        }

    monkeypatch.setattr(table3, "compiled", compiled)
    path = tmp_path / "table.json"
    command = f"--only ring --output {path} --compilations {tmp_path / 'compilations.json'}".split()
    assert table3.main(command) == 0
    line = (
        "| v5e:2x2 | tiny | none / none (1K) | none / none (2K) | none / none (4K) | 8K / 32K "
        "(16K) |"
    )
    assert line in capsys.readouterr().out
    stored = {cell["memory"]: cell for cell in json.loads(path.read_text())}
    assert stored["device"]["next_refused"] == ["compiled: needs 0.20 GiB of 0.10"]
    assert stored["ours"]["way"]["remat"] == "offload_every_k"
    assert stored["ours"]["next_refused"] == [
        "compiled: needs 192.00 GiB of the host's 48",
        "compiled: needs 0.16 GiB of 0.10",
    ]
    # Two layers, hidden size 64, width 128, 4 heads and 2 key heads of 32, 512 tokens: 6 FLOPs per
    # weight and token, 12 per head dimension and visible pair.
    weights = 2 * 64 * (2 * 4 * 32 + 2 * 2 * 32 + 3 * 128) + 64 * 512
    flops = 6 * weights * 32768 + 12 * 2 * 4 * 32 * 32768 * 32769 / 2
    assert stored["ours"]["flops"] == pytest.approx(flops)
    compilations.clear()
    (tmp_path / "compilations.json").unlink()  # the stored cells are enough
    assert table3.main(command) == 0
    assert not compilations


def test_like_for_like_cells_have_one_row_and_the_papers_mesh(monkeypatch):
    monkeypatch.setattr(
        "scripts.benchmarks.table3.cells.PAPER",
        {"v5e:2x2": {"tiny": (1, 2, 4, 16)}, "a100:8": {"llama-13b": (1, 2, 4, 16)}},
    )
    like_for_like = [cell for cell in cells() if cell.memory == LIKE_FOR_LIKE]
    assert [(cell.topology, cell.column) for cell in like_for_like] == [
        ("a100:8", column) for column in COLUMNS
    ]
    for cell in like_for_like:
        [options] = cell.memory_options()
        job = cell.job(4096, options)
        assert (job.batch, job.run.model.compute_dtype, job.run.memory.remat) == (
            1,
            "float32",
            "nothing",
        )
        mesh = job.run.mesh
        assert (mesh.tensor, mesh.sequence, mesh.fsdp) == (
            (1, 8, 1) if cell.column == "ring" else (8, 1, 1)
        )
