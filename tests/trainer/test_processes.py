"""Several real processes on this machine train as one does; one that is lost ends the others, and the next start goes on."""

import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from data.errors import UserError
from data.loader import Loader
from scripts import launch_local
from tests.trainer import small_run
from trainer import cluster
from trainer.mesh import simulate
from trainer.metrics import MEASURED
from trainer.schema import DistributedConfig


def test_two_processes_train_as_one_does_and_what_they_saved_one_goes_on_with(whole_run, small_recipe, repository):
    """8 devices in 2 processes, fsdp 2 x tensor 2 x sequence 2; process 1 is killed after the first checkpoint."""
    run = small_recipe.parent / "two processes"
    running = launch_local.start(2, ["--config", str(small_recipe), "--run_dir", str(run)])
    try:
        while not list(run.glob("checkpoints/[0-9]*/manifest.json")):
            assert running[0].poll() is None and running[1].poll() is None
            time.sleep(0.02)
        running[1].kill()
        killed = time.monotonic()
        assert launch_local.wait(running) == 128 + 9
        assert time.monotonic() - killed < 60
    finally:
        launch_local.end(running)
    alone, logged = small_run.rows(whole_run / "metrics.jsonl"), small_run.steps_logged(run)
    assert logged >= small_run.SAVE_EVERY
    agree(small_run.rows(run / "metrics.jsonl"), alone[:logged])
    small_run.finish(small_run.start(repository, small_recipe, run), run)
    agree(small_run.rows(run / "metrics.jsonl"), alone)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_process_ends_the_other_within_a_minute_without_the_launcher(small_recipe, tmp_path, victim, capfd):
    running = launch_local.start(2, ["--config", str(small_recipe), "--run_dir", str(tmp_path / "run")])
    try:
        while not small_run.steps_logged(tmp_path / "run"):
            assert running[0].poll() is None and running[1].poll() is None
            time.sleep(0.02)
        running[victim].kill()
        assert running[1 - victim].wait(60) != 0
        assert "another task died" in capfd.readouterr().err
    finally:
        launch_local.end(running)


def agree(rows, expected):
    """The same steps, tokens and padding, and losses equal to 1e-6 of their size."""
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, wanted in zip(rows, expected, strict=True):
        for name in wanted.keys() - set(MEASURED):
            np.testing.assert_allclose(row[name], wanted[name], rtol=2e-6 if name == "grad_norm" else 1e-6, err_msg=name)


def test_the_launcher_ends_all_with_the_first_that_fails(capsys):
    def processes(*codes):
        return [subprocess.Popen([sys.executable, "-c", code]) for code in codes]

    slow = "import time; time.sleep(100)"
    assert launch_local.wait(processes("pass", "pass")) == 0
    start = time.monotonic()
    assert launch_local.wait(processes(slow, "raise SystemExit(3)", slow)) == 3
    assert "process 1 ended with 3" in capsys.readouterr().err
    assert launch_local.wait(processes("import os; os.kill(os.getpid(), 9)", slow)) == 137
    assert "process 0 was lost (signal 9)" in capsys.readouterr().err and time.monotonic() - start < 20


@pytest.mark.parametrize(("given", "words"), [
    ({"coordinator": "here:1", "process_id": 0}, ["distributed.num_processes", "together"]),
    ({"coordinator": "here:1", "process_id": 2, "num_processes": 2}, ["distributed.process_id", "found 2", "0 .. 1"]),
    ({"coordinator": "here", "process_id": 0, "num_processes": 2}, ["distributed.coordinator", "HOST:PORT"]),
])
def test_flags_that_do_not_fit_are_told(given, words):
    with pytest.raises(UserError) as error:
        cluster.join(DistributedConfig(**given), simulated=True)
    assert all(word in str(error.value) for word in words)


def test_simulated_devices_are_divided_among_the_processes():
    with pytest.raises(UserError, match=r"mesh\.simulate: found 8, which 3 processes do not divide; 9 would work"):
        simulate(8, 3)


def test_a_row_of_another_process_is_counted_and_not_read(tmp_path, repository):
    from data.prepare import prepare
    from data.sources import Source
    from data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(repository / "data/fixtures/tiny_tokenizer")
    prepared = prepare([Source(str(repository / "data/fixtures/dirty.json"))], tokenizer, 64, tmp_path, progress=False)
    loader = Loader(prepared, 64, 4, 0)
    whole, part = loader.batch(1), loader.batch(1, rows=frozenset({0, 3}))
    for name in whole:
        np.testing.assert_array_equal(part[name][[0, 3]], whole[name][[0, 3]])
    np.testing.assert_array_equal(part["segment_ids"], whole["segment_ids"])
    assert not part["tokens"][[1, 2]].any() and whole["tokens"][[1, 2]].any()
    assert jax.process_count() == 1
