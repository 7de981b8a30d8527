"""A run in a bucket equals a run on disk: trained, killed, resumed elsewhere, locked against a
second start, exported."""

import json
import os
import re
import signal
import time

import pytest
from safetensors.numpy import load_file

from scripts import export_hf, run_status
from tests import small_run
from trainer.run.bucket import Bucket
from trainer.run.mirror import logs_and_others

FOLDER = "runs/mine"
FLAGS = ("--mesh.fsdp", "1", "--mesh.tensor", "1", "--mesh.simulate", "2")


def logs(run, name):
    contents, _ = logs_and_others(Bucket(run).read_all(apart=("checkpoints/",)))
    return [json.loads(line) for line in contents[name][1].splitlines()]


def repeats(row):
    """The part of a row that does not depend on the clock."""
    return {
        name: row[name] for name in ("step", "loss_nats_per_target", "grad_norm", "tokens_seen")
    }


@pytest.mark.slow
def test_a_bucket_run_is_trained_killed_resumed_and_exported_as_on_disk(
    store_and_url, small_recipe, repository, tmp_path
):
    server, url = store_and_url
    run_in_bucket = f"{url}/{FOLDER}"

    def start(run, log):
        return small_run.start(repository, small_recipe, run, *FLAGS, log=tmp_path / log)

    def finished(process, log):
        assert process.wait(300) == 0, (tmp_path / log).read_text()
        return (tmp_path / log).read_text()

    finished(start(tmp_path / "disk", "disk.log"), "disk.log")
    first = start(run_in_bucket, "first.log")
    patience = time.monotonic() + 200
    while f"{FOLDER}/checkpoints/14/manifest.json" not in server.store.names():
        assert first.poll() is None and time.monotonic() < patience, (
            tmp_path / "first.log"
        ).read_text()
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    # Two starts at once: the slower one finds that the lock has been renewed.
    both = {log: start(run_in_bucket, log) for log in ("second.log", "third.log")}
    codes = {log: process.wait(400) for log, process in both.items()}
    outputs = {log: (tmp_path / log).read_text() for log in both}
    assert sorted(codes.values()) in ([0, os.EX_TEMPFAIL], [0, 0]), outputs
    assert any(f"({run_in_bucket}/checkpoints/" in text for text in outputs.values()), outputs
    winner = next(
        log for log in both if codes[log] == 0 and f"({run_in_bucket}/checkpoints/" in outputs[log]
    )
    assert "from step" in outputs[winner]
    for log in both:
        assert codes[log] == 0 or "is training there since" in outputs[log]
    disk = small_run.rows(tmp_path / "disk/metrics.jsonl")
    assert [repeats(row) for row in logs(run_in_bucket, "metrics.jsonl")] == [
        repeats(row) for row in disk
    ]
    assert logs(run_in_bucket, "held_out.jsonl") == small_run.rows(tmp_path / "disk/held_out.jsonl")
    assert Bucket(run_in_bucket).read("lock") == b""
    for run, output in ((run_in_bucket, "of_bucket"), (tmp_path / "disk", "of_disk")):
        assert export_hf.main([str(run), str(tmp_path / output)]) == 0
    in_bucket, on_disk = (
        load_file(tmp_path / output / "model.safetensors") for output in ("of_bucket", "of_disk")
    )
    assert in_bucket.keys() == on_disk.keys()
    assert all((in_bucket[name] == on_disk[name]).all() for name in on_disk)
    status = run_status.read_status(run_in_bucket)
    assert status.checkpoint == small_run.STEPS and status.metrics["step"] == small_run.STEPS


@pytest.mark.slow
def test_a_curriculum_killed_in_its_second_stage_resumes_there_as_on_disk(
    gcs, small_recipe, repository, tmp_path
):
    stages = '[{"context_length": 64, "steps": 6}, {"context_length": 128, "steps": 9}]'
    flags = ("--stages", stages, "--checkpoint.every", "3", "--train.evaluate_every", "0", *FLAGS)

    def start(run, log):
        return small_run.start(repository, small_recipe, run, *flags, log=tmp_path / log)

    assert start(tmp_path / "disk", "disk.log").wait(300) == 0, (tmp_path / "disk.log").read_text()
    run, first = f"gs://bucket/{FOLDER}", start(f"gs://bucket/{FOLDER}", "first.log")
    patience = time.monotonic() + 300
    while f"{FOLDER}/checkpoints/3/manifest.json" not in gcs.store.names():
        output = (tmp_path / "first.log").read_text()
        assert first.poll() is None and time.monotonic() < patience, output
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    status = run_status.read_status(run)
    assert (status.stage, status.earlier) == (2, 6) and status.reached >= 9
    assert start(run, "again.log").wait(300) == 0, (tmp_path / "again.log").read_text()
    output = (tmp_path / "again.log").read_text()
    assert "stage 1 of 2" not in output and f"({run}/checkpoints/" in output
    for number in ("stages/1/", ""):
        disk = small_run.rows(tmp_path / f"disk/{number}metrics.jsonl")
        stored = logs(f"{run}/{number}".rstrip("/"), "metrics.jsonl")
        assert [repeats(row) for row in stored] == [repeats(row) for row in disk]


@pytest.mark.slow
def test_a_bucket_run_resumes_from_a_later_checkpoint_on_its_host(
    gcs, small_recipe, repository, tmp_path
):
    flags = ("--checkpoint.every", "20", "--checkpoint.local_every", "1", *FLAGS)

    def start(location, log):
        local = ("--checkpoint.local", str(tmp_path / f"host of {log}"))
        run = f"gs://bucket/{location}"
        return small_run.start(repository, small_recipe, run, *flags, *local, log=tmp_path / log)

    def newest_local():
        parts = (tmp_path / "host of killed").glob("*/*/step_*.part_0")
        return max((int(re.findall(r"step_(\d+)", part.name)[0]) for part in parts), default=0)

    killed, patience = start("killed", "killed"), time.monotonic() + 300
    while newest_local() < 23:
        output = (tmp_path / "killed").read_text()
        assert killed.poll() is None and time.monotonic() < patience, output
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    step = newest_local()
    assert start("killed", "killed").wait(300) == 0, (tmp_path / "killed").read_text()
    output = (tmp_path / "killed").read_text()
    assert f"continuing from step {step} (local checkpoint," in output
    assert start("whole", "whole").wait(300) == 0, (tmp_path / "whole").read_text()
    whole, found = (logs(f"gs://bucket/{run}", "metrics.jsonl") for run in ("whole", "killed"))
    assert [repeats(row) for row in found] == [repeats(row) for row in whole]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--run_dir", "az://bucket/run"], "run_dir: found 'az://bucket/run'"),
        (["--run_dir", "gs://bucket/a*b"], "without *, ?"),
        (["--run_dir", "gs://bucket/foreign"], "holds files but no config.yaml"),
    ],
)
def test_a_folder_that_cannot_hold_the_run_is_a_one_line_error(
    gcs, small_recipe, capfd, tmp_path, monkeypatch, flags, words
):
    import train

    monkeypatch.chdir(tmp_path)
    gcs.store.objects["bucket", "foreign/notes.txt"] = b"another's", 1
    assert train.main(["--config", str(small_recipe), *flags]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:] and words in lines[
        -1
    ]
