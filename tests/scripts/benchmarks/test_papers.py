"""The papers' rows by the cost model: what must match exactly, and what is printed about
mismatches."""

import json
import math

import pytest

from model.attention.schedules import Balanced
from model.attention.schedules.plan import Block
from planning.costs import rounds
from scripts.benchmarks import summaries
from scripts.benchmarks.papers import __main__ as command
from scripts.benchmarks.papers import published
from scripts.benchmarks.papers.distflashattn import megatron_seconds
from scripts.benchmarks.papers.predictions import every_row
from scripts.benchmarks.papers.ring_attention import flops_ratio
from scripts.benchmarks.papers.striped_attention import busiest_share
from scripts.benchmarks.results import load


def _rows(source, table="", label=""):
    rows = [
        row
        for row in every_row()
        if row.source == source and table in row.table and label in row.label
    ]
    assert rows
    return rows


@pytest.mark.parametrize(("tiles", "speedup"), [(16, 1.44), (32, 1.47), (4096, 1.50)])
def test_attention_alone_on_two_ranks(tiles, speedup):
    """By hand: the busiest ranks compute n(n+1)/2 + n^2 tiles with the contiguous layout, twice
    n(n+1)/2 with the striped one."""
    contiguous, striped = (
        busiest_share(2, tiles, layout, (1, 1)) for layout in ("contiguous", "striped")
    )
    if tiles < 100:  # a tile of one token has no diagonal half; two tokens do
        contiguous, striped = (
            busiest_share(2, 2 * tiles, layout, (2, 2)) for layout in ("contiguous", "striped")
        )
    assert contiguous / striped == pytest.approx(
        (tiles * (tiles + 1) / 2 + tiles**2) / (tiles * (tiles + 1)), rel=1e-12
    )
    assert round(contiguous / striped, 2) == speedup


def test_no_gain_when_a_block_is_one_tile_wide():
    """Striped Attention, section 4.2: 'in our GPU experiments Striped Attention does not save
    computation at the smallest block size', on TPUs 25% of attention."""
    assert busiest_share(4, 4096, "striped", (2048, 4096)) == 1.0
    assert busiest_share(4, 4096, "striped", (2048, 2048)) == 0.75


@pytest.mark.parametrize("name", published.RING_FIGURE_5_HIDDEN)
@pytest.mark.parametrize("longer", [2, 25600])
def test_ring_attention_figure_5_matches_its_closed_form(name, longer):
    six = 6 * published.RING_FIGURE_5_HIDDEN[name]
    assert flops_ratio(name, longer) == pytest.approx(
        (six + 4096 * longer) / (six + 4096), rel=1e-12
    )


@pytest.mark.parametrize("ranks", range(2, 12))
def test_idle_share_of_the_balanced_schedule(ranks):
    """With an even number of ranks P, half of them idle in the last of P/2 + 1 rounds; with an odd
    number none does. With the split none idles either way."""

    def idle(split):
        forward, _ = rounds(Balanced(split), ranks, "contiguous", Block(1, 2, 1, 1, 2), (1, 1))
        return 1 - sum(r.tiles.sum() for r in forward) / (
            ranks * sum(r.tiles.max() for r in forward)
        )

    assert idle(False) == pytest.approx(1 / (ranks + 2) if ranks % 2 == 0 else 0)
    assert idle(True) == pytest.approx(0)


def test_distflashattn_communicates_3nd_and_megatron_14nd():
    for row in _rows("DistFlashAttn", "Appendix C", "received a worker"):
        ranks = int(row.label.split("P = ")[1].split(",")[0])
        if "helpers" in row.label:
            assert row.predicted < 3  # a helped block is smaller
        else:
            assert row.predicted == pytest.approx(row.paper * (ranks - 1) / ranks, rel=1e-12)


def test_megatron_pads_33_heads_to_48():
    """DistFlashAttn, section 4.3: 45.5% of computation is wasted on 16 GPUs; this fraction of
    attention and of its projections."""
    length = 1 << 19
    plain, padded = (megatron_seconds(model, 2, length) for model in ("llama-7b", "llama-33h"))
    assert 1.40 < padded / plain < 48 / 32


def test_claimed_rows_are_reproduced_and_missed_rows_have_a_reason():
    for row in every_row():
        assert math.isfinite(row.predicted), row
        assert row.reproduced is not False, row
        if row.error is not None and abs(row.error) > 0.05 and not row.reproduced:
            assert row.note, row


def test_the_command_prints_every_row_and_writes_them(tmp_path, capsys):
    assert command.main(["--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "papers.json").read_text(encoding="utf-8"))
    assert len(written["rows"]) == len(every_row())
    text = " ".join(printed.split())  # long rows take two lines
    for row in written["rows"]:
        assert " ".join(row["row"].split()) in text
    assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 100
    assert written["summary"]["Striped Attention"]["claimed and reproduced"] == 133
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers.json").rename(tmp_path / "papers" / "papers.json")
    assert summaries.papers(tmp_path) == load("papers").rows
    for lost in ("Ring Attention Table 4", "Ring Attention Figure 3", "DistFlashAttn Table 2"):
        assert lost in printed
