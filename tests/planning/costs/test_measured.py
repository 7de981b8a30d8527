"""The ranges of step times, against the steps that were measured."""

import json
import re

import pytest

from model.config import TransformerConfig
from planning.costs import HARDWARE, Sizes, TrainingStep, estimate, time_range
from planning.costs.measured import full_rate, kind, measured_steps, slowest
from planning.plan import Job
from planning.search import candidates

# The published figures, written a second time, and those of one H200.
SECONDS = [
    1.09,
    2.98,
    9.71,
    1.42,
    3.71,
    10.78,
    1.04,
    2.88,
    9.50,
    1.20,
    2.93,
    9.34,
    8.90,
    8.83,
    16.38,
    137,
    364,
    696,
    1346,
    1295,
    2135,
    380,
    1.495,
    1.293,
    13.13,
]


def test_the_measured_steps_are_the_published_ones():
    assert [step.seconds for step in measured_steps()] == SECONDS
    assert {step.source.split("#")[0] for step in measured_steps()} == {
        "AI-Hypercomputer/maxtext",
        "huggingface/trl",
        "docs/results/gpu.json",
    }


STEP = (
    r"step, (?P<length>\d+K), 8 layers of 8B, (?P<remat>\w+), kernel auto: tokens/s, MFU "
    r"(?P<speed>[\d,]+), "
)


def test_our_own_are_those_of_the_result(repository):
    rows = json.loads((repository / "docs/results/gpu.json").read_text(encoding="utf-8"))["rows"]
    found = [re.match(STEP, f"{row['what']} {row['found']}") for row in rows.values()]
    seconds = {
        (step["length"], step["remat"]): (int(step["length"][:-1]) << 10)
        / int(step["speed"].replace(",", ""))
        for step in found
        if step
    }
    ours = {
        (f"{step.job.length >> 10}K", step.job.remat): step.seconds
        for step in measured_steps()
        if step.source == "docs/results/gpu.json"
    }
    assert seconds == {key: pytest.approx(value, abs=0.005) for key, value in ours.items()}


def test_no_measured_step_is_above_its_range_and_the_slowest_is_at_its_end():
    for machines in ("TPU", "GPU"):
        steps = [step for step in measured_steps() if kind(step.job.hardware) == machines]
        factor, step = slowest(machines)
        assert all(other.seconds <= time_range(other.job).high * (1 + 1e-9) for other in steps)
        assert step.seconds == pytest.approx(factor * full_rate(step.job).seconds)


def test_a_system_left_out_does_not_set_its_own_range():
    """By hand: of TPUs MaxText's llama2 remains, whose slowest step is the ring's 16.38 s."""
    llama3 = next(step for step in measured_steps() if step.system == "MaxText, llama3")
    _, slow = slowest("TPU", without="MaxText, llama3")
    assert slow.seconds == 16.38
    assert slowest("GPU", without="Longstripe")[1].system == "TRL"
    end = full_rate(llama3.job).seconds * 16.38 / full_rate(slow.job).seconds
    held_out = time_range(llama3.job, without="MaxText, llama3")
    assert held_out.high == pytest.approx(max(end, estimate(llama3.job).seconds))
    assert held_out.high < time_range(llama3.job).high


def test_a_range_begins_below_the_estimate_and_below_what_was_measured():
    for step in measured_steps():
        seconds = time_range(step.job)
        assert (
            seconds.low < min(step.seconds, estimate(step.job).seconds)
            and estimate(step.job).seconds <= seconds.high
        )


def test_at_full_rate_nothing_but_the_matrix_products_is_left():
    """Of attention forward 2 and backward 7 products a visible pair of queries and keys, one tile a
    token apart."""
    sizes = Sizes(1, 1000, 0, 8, 8, 128, 1024)
    job = TrainingStep(sizes, HARDWARE["v5p"], 1 << 16, remat="everything", causal=False)
    flops = 3 * 2 * 1000 * job.length + (2 + 5) * 2 * job.length**2 * 8 * 128
    update = full_rate(job).step.compute - flops / job.hardware.peak
    assert 0 < update < 0.01 * time_range(job).low


def test_the_search_orders_by_the_high_end():
    job = Job.of(TransformerConfig.preset("llama-3.2-1b"), "v5e:2x4", 1 << 17)
    highs = [float(f"{candidate.time_range().high:.2g}") for candidate in candidates(job)]
    assert highs == sorted(highs) and len(set(highs)) > 2
