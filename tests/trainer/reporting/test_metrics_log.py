"""A run's log: files line by line, boards, and what is printed."""

import hashlib
import json

import numpy as np
from tensorboardX.proto.event_pb2 import Event

from trainer.config.schema import LoggingConfig, RunConfig, TrainConfig
from trainer.reporting.metrics_log import MetricsLog
from trainer.run.directory import RunDirectory


def config_of(steps, **logging):
    return RunConfig(train=TrainConfig(steps=steps), logging=LoggingConfig(**logging))


def test_logs_are_flushed_per_line_and_truncated_on_resume(tmp_path):
    run = RunDirectory(tmp_path)
    log = MetricsLog(run, config_of(4, console=False))
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
    with MetricsLog(run, config_of(4, console=False), step=2) as log:
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
    with MetricsLog(run, config_of(4), evaluations=["samples"]) as log:
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
    with MetricsLog(RunDirectory(tmp_path / "run"), config_of(1), write=False) as log:
        log.train({"step": 1})
        log.say("nothing")
    assert not (tmp_path / "run").exists()


def test_progress_shows_loss_rate_and_time_left(tmp_path, capsys):
    with MetricsLog(RunDirectory(tmp_path), config_of(10, tensorboard=False)) as log:
        log.train(
            {"step": 10, "loss_nats_per_target": 1.25, "tokens_per_second": 1234.5},
            seconds_left=3723,
        )
    assert "step 10/10  loss 1.2500  1,234 tokens/s  1:02:03 left" in capsys.readouterr().err
