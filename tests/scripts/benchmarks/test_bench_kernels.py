"""The kernels' benchmark: every peer computes the same attention, work is counted as the mask has it, files are written."""
import json

import numpy as np
import pytest

from scripts.benchmarks.bench_kernels import main
from scripts.benchmarks.kernel_peers import BLOCKS, ON_DEVICE, PEERS, Case, LeftOut, make_block, splash

LENGTH = 128


@pytest.mark.parametrize("kind", BLOCKS)
def test_work_is_the_number_of_pairs_that_see_each_other(kind):
    case = Case("ours", kind, LENGTH, False)
    assert case.visible_pairs() == make_block(case).mask().sum()
    forward, both = case.flops(), Case("ours", kind, LENGTH, True).flops()
    assert (forward, both) == (4 * 8 * 64 * case.visible_pairs(), 14 * 8 * 64 * case.visible_pairs())


def dense(block):
    """out and gradients by the definition, in float64; rows that see nothing give zeros."""
    q, k, v, dout = (np.asarray(x, np.float64).swapaxes(1, 2) for x in block[:4])
    scores = np.where(block.mask(), q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e30))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    dweights = dout @ v.swapaxes(-1, -2)
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True)) * q.shape[-1] ** -0.5
    results = weights @ v, dscores @ k, dscores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ dout
    return [x.swapaxes(1, 2) for x in results]


@pytest.mark.parametrize("kind", ["diagonal", "strict", "full", "packed"])
@pytest.mark.parametrize("peer", [*ON_DEVICE["cpu"], "splash"])
def test_every_peer_computes_the_same(peer, kind):
    case = Case(peer, kind, LENGTH, backward=True, heads=2, kv_heads=2, head_dim=16)
    block = make_block(case)
    # A row that sees nothing is each peer's own affair: it gets no cotangent, and is not compared.
    sees = block.mask().any(-1)
    block = block._replace(dout=block.dout * sees[:, None, None])
    try:
        run = splash(case, block, interpret=True) if peer == "splash" else PEERS[peer](case, block)
    except LeftOut as why:
        assert "imported" in str(why) or "causal or full" in str(why)
        return
    out, gradients = run()
    for got, expected in zip((out, *gradients), dense(block), strict=True):
        rows = sees if got is out else slice(None)
        np.testing.assert_allclose(np.asarray(got)[:, rows], expected[:, rows], atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_the_table_the_figures_and_the_plot(tmp_path, capsys):
    arguments = ["--lengths", "64", "--blocks", "diagonal", "--peers", "ours", "jax-cudnn", "--heads", "2", "--head_dim", "8",
                 "--rounds", "1", "--repeats", "1", "--output", str(tmp_path)]  # fmt: skip
    assert main(arguments) == 0
    result = json.loads((tmp_path / "bench_kernels.json").read_text())
    ours = [row for row in result["rows"] if row["peer"] == "ours"]
    assert [row["pass"] for row in ours] == ["forward", "forward+backward"]
    for row in ours:
        work = (4 if row["pass"] == "forward" else 14) * 64 * 65 // 2 * 2 * 8
        assert row["tflops"] == pytest.approx(work / row["seconds"] / 1e12)
        assert row["share_of_matmul"] == pytest.approx(work / row["seconds"] / result["device"]["matmul_flops"])
        assert row["peak_mib"] >= 0
    assert all("left_out" in row for row in result["rows"] if row["peer"] == "jax-cudnn"), "cuDNN needs a GPU"
    table = (tmp_path / "bench_kernels.txt").read_text()
    assert table.strip() == capsys.readouterr().out.strip()
    assert (tmp_path / "bench_kernels.png").read_bytes().startswith(b"\x89PNG")


def test_the_mosaic_kernel_is_left_out_where_there_is_no_hopper_gpu():
    case = Case("ours-mosaic", "diagonal", 256, backward=False)
    with pytest.raises(LeftOut, match="needs a Hopper GPU, found cpu"):
        PEERS["ours-mosaic"](case, make_block(case))
