"""Metrics of a run: counts against brute force, timing with a fake clock."""

import json
from concurrent.futures import Future

import jax
import numpy as np
import pytest

from model.config import TransformerConfig
from model.parameter_declarations import declare
from tests.small_run import MEASURED
from tests.trainer.reporting.clock import Clock
from trainer import flops
from trainer.flops import flops_per_step, frozen_weights
from trainer.reporting.meter import NAMES, Meter, peak_host_gib


class Chip:
    """The part of a device that Meter uses."""

    device_kind, process_index = "TPU v4", 0

    def memory_stats(self):
        return {"peak_bytes_in_use": 3 * 2**30}


def run_meter(devices, clock):
    """Two steps of 2 s, one of which waits 0.5 s for data, with a compilation of 10 s before them
    and a save of 5 s between them."""
    config = TransformerConfig.preset("llama-7b")
    meter = Meter(config, devices, clock)
    with meter.compiling():
        clock.tick(10)
    meter.start()
    batch = np.array([6]), 8
    with meter.waiting_for_data():
        clock.tick(0.5)
    clock.tick(1.5)
    meter.count(*batch)
    with meter.paused():
        clock.tick(5)
    clock.tick(2)
    meter.count(*batch)
    values = {
        "loss_nats_per_target": np.float32(1.5),
        "target_tokens": np.int32(4),
        "grad_norm": 2.0,
    }
    row = meter.read(2, **values, learning_rate=0.1)
    return meter, row, flops_per_step(config, 12, 42)


def test_meter_counts_only_steps():
    meter, row, flops = run_meter([Chip(), Chip()], Clock())
    assert tuple(row) == ("step", *NAMES)
    expected = {
        "step": 2,
        "loss_nats_per_target": 1.5,
        "target_tokens": 4,
        "tokens_per_second": 3.0,
        "tokens_per_second_per_device": 1.5,
        "grad_norm": 2.0,
        "learning_rate": 0.1,
        "data_wait_seconds": 0.25,
        "step_seconds": 2.0,
        "compile_seconds": 10.0,
        "peak_device_gib": 3.0,
        "padding_share": 0.25,
    }
    assert {name: row[name] for name in expected} == expected
    assert row["mfu"] == pytest.approx(flops / 4 / (2 * 275e12))
    assert meter.seconds_left(2, 7) == 10
    assert set(MEASURED) - {"wall_seconds"} < set(NAMES)  # measured by the loop, over all starts


@pytest.mark.parametrize(("computed", "waited"), [(99.0, 2.0), (100.5, 1.5), (103.0, 0.0)])
def test_only_data_that_arrive_after_the_step_count_as_wait(computed, waited):
    """The data are fetched from 100 to 102 seconds, during a step that began earlier and ended at
    `computed`."""
    clock, ended = Clock(), Future()
    meter = Meter(TransformerConfig.preset("llama-7b"), [Chip()], clock)
    with meter.waiting_for_data(ended):
        clock.tick(2)
    ended.set_result(computed)
    assert meter.read(1)["data_wait_seconds"] == waited
    assert meter.read(2)["data_wait_seconds"] == 0, "for the steps since the previous line"


def test_a_step_ends_when_its_arrays_are_ready():
    meter = Meter(TransformerConfig.preset("llama-7b"), [Chip()], Clock())
    assert meter.when_computed({"loss": jax.numpy.ones(3) + 1}).result(60) == 100.0


def test_a_reading_does_not_declare_the_model_again(monkeypatch):
    """That takes milliseconds, while the devices wait for the next step."""
    config, clock = TransformerConfig.preset("smollm2-135m"), Clock()
    names = set(declare(config)) - {"embed_tokens.weight"}
    flops_of_a_token = flops_per_step(config, 1, 1, frozen_weights(config, names))
    meter = Meter(config, [Chip()], clock, frozen=names)
    monkeypatch.setattr(flops, "declare", None)
    meter.count(np.array([1]), 1)
    clock.tick(1)
    assert meter.read(1)["mfu"] == pytest.approx(flops_of_a_token / 275e12)


def test_mfu_on_unknown_hardware_is_null():
    _, row, _ = run_meter(jax.devices(), Clock())
    assert row["mfu"] is None and row["peak_device_gib"] is None
    assert (
        row["peak_host_gib"] == pytest.approx(peak_host_gib(), rel=0.1)
        and row["peak_host_gib"] > 0.01
    )
    json.loads(json.dumps(row, allow_nan=False))
