"""Ranges of step times against measured steps."""

import dataclasses
import json
import re

import pytest

from model.config import TransformerConfig
from planning.costs import HARDWARE, Sizes, TrainingStep, estimate, time_range
from planning.costs.measured import (
    compared_steps,
    full_rate,
    highest_mfu,
    kind,
    measured_steps,
    slowest,
    worst_over_upper_end,
)
from planning.plan import Job
from planning.search import candidates

# Steps on 64 v5p and 64 Ironwood: seconds -> MFU in percent as the recipes print it.
WIDE_HEADS = {
    10.25: 67.3,
    26.31: 68.1,
    90.30: 68.7,
    346.18: 69.9,
    1358.40: 70.3,
    8056.40: 36.7,
    15623.09: 37.1,
    5.31: 51.7,
    14.08: 50.7,
    48.54: 50.9,
    94.60: 51.0,
    186.48: 50.9,
    1124.12: 52.5,
    2361.05: 48.8,
    3082.71: 48.8,
}


def test_published_steps_have_their_published_mfu_and_are_within_their_ranges():
    """A wrong model, peak or number of devices would show in the MFU."""
    ours = {}
    for step in compared_steps():
        result, seconds = estimate(step.job), time_range(step.job)
        ours[step.seconds] = 100 * result.mfu * result.seconds / step.seconds
        assert seconds.low <= step.seconds * (1 + 1e-9) and step.seconds < seconds.high
    ours = {seconds: mfu for seconds, mfu in ours.items() if seconds in WIDE_HEADS}
    assert ours == pytest.approx(WIDE_HEADS, abs=0.2)


STEP = (
    r"training step, (?P<length>\d+K) tokens, 8 layers of LLaMA-3.1-8B, remat (?P<remat>\w+), "
    r"kernel auto: tokens/s, MFU "
    r"(?P<speed>[\d,]+), "
)


def test_our_measured_steps_match_the_result_file(repository):
    rows = json.loads((repository / "docs/results/gpu.json").read_text(encoding="utf-8"))["rows"]
    matches = [re.match(STEP, f"{row['what']} {row['found']}") for row in rows.values()]
    seconds = {
        (step["length"], step["remat"]): (int(step["length"][:-1]) << 10)
        / int(step["speed"].replace(",", ""))
        for step in matches
        if step
    }
    ours = {
        (f"{step.job.length >> 10}K", step.job.remat): step.seconds
        for step in measured_steps()
        if step.source == "docs/results/gpu.json"
    }
    assert seconds == {key: pytest.approx(value, abs=0.005) for key, value in ours.items()}


def test_the_slowest_measured_step_ends_its_range_and_none_exceeds_it():
    for machines in ("TPU", "GPU"):
        steps = [step for step in measured_steps() if kind(step.job.hardware) == machines]
        factor, step = slowest(machines)
        assert all(other.seconds <= time_range(other.job).high * (1 + 1e-9) for other in steps)
        assert step.seconds == pytest.approx(factor * full_rate(step.job).seconds)


def test_a_held_out_system_does_not_determine_its_range():
    """By hand: of the TPU steps MaxText's llama2 remains, whose slowest is the ring's 16.38 s."""
    llama3 = next(step for step in measured_steps() if step.system == "MaxText, llama3")
    _, slow = slowest("TPU", without="MaxText, llama3")
    assert slow.seconds == 16.38
    assert slowest("GPU", without="Longstripe")[1].system == "TRL"
    end = full_rate(llama3.job).seconds * 16.38 / full_rate(slow.job).seconds
    held_out = time_range(llama3.job, without="MaxText, llama3")
    assert held_out.high == pytest.approx(max(end, estimate(llama3.job).seconds))
    assert held_out.high < time_range(llama3.job).high


ONE_B = Sizes.of(TransformerConfig.preset("llama-3.2-1b"))
EIGHT_LAYERS = Sizes.of(
    dataclasses.replace(TransformerConfig.preset("llama-3.1-8b"), num_hidden_layers=8)
)


@pytest.mark.parametrize(
    ("sizes", "length", "rows", "remat", "seconds"),
    [
        (EIGHT_LAYERS, 32768, 1, "everything", 1.276),
        (EIGHT_LAYERS, 131072, 1, "save_attention", 11.87),
        (ONE_B, 32768, 1, "everything", 1.101),
        (ONE_B, 32768, 1, "save_attention", 1.258),
        (ONE_B, 8192, 1, "everything", 0.174),
        (ONE_B, 2048, 16, "everything", 0.518),  # measured as one row of 16 documents
    ],
)
def test_steps_of_one_h200_are_estimated_within_ten_percent(sizes, length, rows, remat, seconds):
    """The rates come from profiles of the first step and, for heads of 64, of the third."""
    job = TrainingStep(sizes, HARDWARE["h200-infiniband"], length, batch=rows, remat=remat)
    assert estimate(job).seconds == pytest.approx(seconds, rel=0.1)
    assert estimate(job).seconds <= time_range(job).high


def test_an_h200s_rates_match_its_profile():
    """Products and attention of the profiled steps, in milliseconds by kernel: not fitted to step
    times."""
    hardware, tokens = HARDWARE["h200-infiniband"], 32768
    pairs = tokens * (tokens + 1) / 2
    forward = 2 * 2 * 32 * 128 * 8 * pairs  # the same for 1B: half the head size, twice the layers
    products = 6 * tokens * (8 * EIGHT_LAYERS.weights + EIGHT_LAYERS.head_weights)
    for rate, flops, ms in (
        (hardware.matmul, products, 588),
        (hardware.attention_rates(128)[0], forward, 128.07),
        (hardware.attention_rates(128)[1], 3.5 * forward, 263.37 + 151.37),
        (hardware.attention_rates(64)[0], forward, 177.63),
        (hardware.attention_rates(64)[1], 3.5 * forward, 284.47 + 207.80),
    ):
        assert rate == pytest.approx(flops / (ms * 1e-3) / hardware.peak, rel=0.01)
    optimizer = 28 * EIGHT_LAYERS.parameters / 4.8e12
    between = (1.2751 - 0.588 - 0.5428 - optimizer) * 4.8e12 / (3 * 8 * tokens * 4096)
    assert hardware.between_products == pytest.approx(between, rel=0.01)


def test_no_range_begins_above_the_highest_mfu_measured_on_the_chip():
    """The highest per chip, as the recipes print it, and as derived from our steps on one H200."""
    highest = {"v5p": 0.703, "tpu7x": 0.525, "h200-infiniband": 0.521, "h100-infiniband": 0.521}
    for name, mfu in highest.items():
        assert highest_mfu(HARDWARE[name]) == pytest.approx(mfu, abs=0.002)
    # v4 has no row and uses the highest TPU's.
    assert highest_mfu(HARDWARE["v4"]) == highest_mfu(HARDWARE["v5p"])
    for step in (*measured_steps(), *compared_steps()):
        seconds, result = time_range(step.job), estimate(step.job)
        reached = result.mfu * result.seconds / seconds.low
        assert reached <= highest_mfu(step.job.hardware) * (1 + 1e-9)
        assert seconds.low <= step.seconds * (1 + 1e-9) and result.seconds <= seconds.high


def test_at_full_rate_only_matrix_products_take_time():
    """Attention has 2 products forward and 5 backward per visible pair of queries and keys."""
    sizes = Sizes(
        layers=1, weights=1000, head_weights=0, query_heads=8, kv_heads=8, head_dim=128, hidden=1024
    )
    job = TrainingStep(sizes, HARDWARE["v5p"], 1 << 16, remat="everything", causal=False)
    flops = 3 * 2 * 1000 * job.length + (2 + 5) * 2 * job.length**2 * 8 * 128
    update = full_rate(job).step.compute - flops / job.hardware.peak
    assert 0 < update < 0.01 * time_range(job).low


def test_the_search_orders_by_the_upper_end():
    job = Job.of(TransformerConfig.preset("llama-3.2-1b"), "v5e:2x4", 1 << 17)
    highs = [float(f"{candidate.time_range().high:.2g}") for candidate in candidates(job)]
    assert highs == sorted(highs) and len(set(highs)) > 2


@pytest.mark.parametrize("machines", ["TPU", "GPU"])
def test_how_far_an_upper_end_was_off_is_the_published_figure(repository, machines):
    """For systems that did not set it, by the result of an earlier measurement."""
    systems = {step.system for step in measured_steps() if kind(step.job.hardware) == machines}
    rows = json.loads((repository / "docs/results/measured_steps.json").read_text())[
        "rows"
    ].values()
    published = [
        float(row["found"].partition("; ")[2].removesuffix("x"))
        for row in rows
        if row["what"].partition(": measured steps inside")[0] in systems
        and "inside ranges" in row["what"]
    ]
    assert len(published) == len(systems) > 1
    assert worst_over_upper_end(machines) == pytest.approx(max(published), abs=0.005)
