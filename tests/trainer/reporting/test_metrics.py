"""Tests of trainer/reporting/metrics.py: counts against brute force, timing with a fake clock,
files line by line."""

import hashlib
import json
from concurrent.futures import Future

import jax
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from model.config import TransformerConfig
from trainer.flops import flops_per_step
from trainer.reporting.metrics import (
    MEASURED,
    NAMES,
    Meter,
    MetricsLog,
    ProgressBar,
    peak_host_gib,
)
from trainer.run.directory import RunDirectory


class Clock:
    """A clock that moves only in `tick`."""

    now = 100.0

    def __call__(self):
        return self.now

    def tick(self, seconds):
        self.now += seconds


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


def test_mfu_on_unknown_hardware_is_null():
    _, row, _ = run_meter(jax.devices(), Clock())
    assert row["mfu"] is None and row["peak_device_gib"] is None
    assert (
        row["peak_host_gib"] == pytest.approx(peak_host_gib(), rel=0.1)
        and row["peak_host_gib"] > 0.01
    )
    json.loads(json.dumps(row, allow_nan=False))


def test_logs_are_flushed_per_line_and_truncated_on_resume(tmp_path):
    run = RunDirectory(tmp_path)
    log = MetricsLog(run, steps=4, console=False)
    for step in (1, 2, 3):
        log.train({"step": step, "loss_nats_per_target": np.float32(1 / step), "mfu": None})
        assert len(run.metrics.read_text().splitlines()) == step, "flushed: a kill loses nothing"
    log.evaluation("held_out", {"step": 3, "held_out_loss_nats_per_target": float("nan")})
    assert json.loads(run.held_out.read_text()) == {
        "step": 3,
        "held_out_loss_nats_per_target": None,
    }
    log.close()
    assert {name: data["lines"] for name, data in log.logged.items()} == {
        "metrics.jsonl": 3,
        "held_out.jsonl": 1,
    }
    with MetricsLog(run, steps=4, start_step=2, console=False) as log:
        log.train({"step": 3, "loss_nats_per_target": 0.5, "mfu": None})
    metrics = {"lines": 3, "sha256": hashlib.sha256(run.metrics.read_bytes()).hexdigest()}
    assert log.logged == {
        "metrics.jsonl": metrics,
        "held_out.jsonl": {"lines": 0, "sha256": hashlib.sha256().hexdigest()},
    }
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[2]["loss_nats_per_target"] == 0.5
    assert rows[1]["loss_nats_per_target"] == 0.5 and run.held_out.read_text() == ""
    assert any(run.tensorboard.iterdir())


def test_answers_are_printed_on_one_line_and_logged_to_tensorboard_as_text(tmp_path, capsys):
    """The event file holds the whole answers, each under its prompt."""
    answer = "Longstripe.\n\n" + "very " * 60 + "long"
    run = RunDirectory(tmp_path)
    with MetricsLog(run, steps=4, evaluations=["samples"]) as log:
        log.evaluation("samples", {"step": 2, "Who are\nyou?": answer, "Again?": "a\x1b[2Jb"})
    assert json.loads((tmp_path / "samples.jsonl").read_text()) == {
        "step": 2,
        "Who are\nyou?": answer,
        "Again?": "a\x1b[2Jb",
    }
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("step 2: Who are you? -> Longstripe. very very")
    assert lines[0].endswith(" ...") and len(lines[0]) < 250
    assert lines[1] == "step 2: Again? -> a\ufffd[2Jb"
    [file] = run.tensorboard.iterdir()
    content = file.read_bytes()
    events, start = [], 0
    # a record is its length, a checksum, the event and another checksum
    while start < len(content):
        length = int.from_bytes(content[start : start + 8], "little")
        events.append(Event.FromString(content[start + 12 : start + 12 + length]))
        start += length + 16
    texts = {
        value.tag: value.tensor.string_val[0].decode()
        for event in events
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == "text"
    }
    assert texts == {
        "samples/Who are\nyou?/text_summary": answer,
        "samples/Again?/text_summary": "a\x1b[2Jb",
    }


def test_other_processes_write_nothing(tmp_path):
    with MetricsLog(RunDirectory(tmp_path / "run"), steps=1, write=False) as log:
        log.train({"step": 1})
        log.say("nothing")
    assert not (tmp_path / "run").exists()


def test_progress_shows_loss_rate_and_time_left(tmp_path, capsys):
    with MetricsLog(RunDirectory(tmp_path), steps=10, tensorboard=False) as log:
        log.train(
            {"step": 10, "loss_nats_per_target": 1.25, "tokens_per_second": 1234.5},
            seconds_left=3723,
        )
    assert "step 10/10  loss 1.2500  1,234 tokens/s  1:02:03 left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.01, [8, 18, 28, 38, 40]),  # 5% of the run: ten steps
        (7, [8, 13, 18, 23, 28, 33, 38, 40]),  # 30 seconds: five steps
        (300, [*range(8, 41)]),
    ],
)
def test_a_log_file_gets_the_first_step_and_then_one_line_per_interval(seconds, shown, capsys):
    """The run has 200 steps and resumes after step 7; the step numbered 200 follows step 39."""
    clock = Clock()
    bar = ProgressBar(200, 7, clock)
    for step in range(8, 41):
        clock.tick(seconds)
        bar.update({"step": step if step < 40 else 200}, None)
    bar.close()
    steps = [int(line.split()[1].split("/")[0]) for line in capsys.readouterr().err.splitlines()]
    assert steps == [*shown[:-1], 200]
