"""Stopped at any moment, the same command resumes, and ends bitwise like an uninterrupted run."""

import contextlib
import json
import os
import re
import shutil
import signal
import time

import numpy as np
import pytest

import train
from data.errors import UserError
from tests import small_run
from tests.soak.digest import NOT_TRAINED
from trainer.checkpoint import readers as checkpoint
from trainer.checkpoint.saving import flatten
from trainer.checkpoint.store import CheckpointStore
from trainer.config import load as config
from trainer.finite import FiniteSteps
from trainer.loop import _Training
from trainer.mesh import make_mesh
from trainer.run.opening import open_run
from trainer.step import StepBuilder
from trainer.text import TextObjective


@pytest.fixture(scope="module")
def objective(whole_run):
    """The run's objective, made from the configuration that the run wrote."""
    run_config = config.load(["--config", str(whole_run / "config.yaml")])
    return TextObjective(run_config, make_mesh(run_config.mesh))


@pytest.fixture(scope="module")
def final_state(objective):
    """Returns a function that reads parameters, moments and data state of a run's last checkpoint,
    as host arrays by name."""
    run_config = objective.config
    builder = StepBuilder.of(
        run_config, objective.model, objective.loss, objective.abstract_batch()
    )

    def read(run):
        restored = CheckpointStore(run).restore(
            small_run.STEPS, builder.abstract_params, builder.abstract_optimizer
        )
        arrays = {
            **restored.model,
            **{f"optimizer {name}": x for name, x in flatten(restored.optimizer).items()},
        }
        return {name: np.asarray(x) for name, x in arrays.items()}, restored.data

    return read


def assert_same_run(run, whole, final_state):
    """Bitwise: parameters, moments, position in the data, and every logged figure that is not a
    timing."""
    (arrays, data), (expected, expected_data) = final_state(run), final_state(whole)
    assert arrays.keys() == expected.keys()
    assert any(name.startswith("optimizer ") and np.any(x) for name, x in expected.items())
    for name, x in expected.items():
        assert x.dtype == arrays[name].dtype and x.tobytes() == arrays[name].tobytes(), name
    assert data.keys() == expected_data.keys() and data["step"] == small_run.STEPS
    assert {key: x for key, x in data.items() if key not in NOT_TRAINED} == {
        key: x for key, x in expected_data.items() if key not in NOT_TRAINED
    }
    for name in ("metrics.jsonl", "held_out.jsonl"):
        rows, wanted = (
            list(map(small_run.without_measured, small_run.rows(r / name))) for r in (run, whole)
        )
        assert rows == wanted, name
    assert [row["step"] for row in small_run.rows(run / "metrics.jsonl")] == list(
        range(1, small_run.STEPS + 1)
    )
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["35", "40"]


def test_a_run_killed_twice_equals_the_uninterrupted_run(
    tmp_path, repository, small_recipe, whole_run, final_state
):
    for attempt in range(5):
        run = tmp_path / str(attempt)
        kills = [
            small_run.kill_when(
                small_run.start(repository, small_recipe, run),
                run,
                lambda r=run: small_run.steps_logged(r) >= 20,
            )
        ]
        if not kills[0]:  # the machine was too busy to kill in time: try again
            continue
        logged = small_run.steps_logged(run)
        assert 20 <= logged < small_run.STEPS
        # The second start cuts the log back to its checkpoint; wait for that, then for one of its
        # saves.
        saved = max(
            int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit()
        )
        before = {path.name for path in (run / "checkpoints").iterdir()}

        def saving(r=run, before=before, saved=saved):
            names = {path.name for path in (r / "checkpoints").iterdir()} - before
            return small_run.steps_logged(r) > saved and any(
                re.fullmatch(r"\d+\.tmp", name) for name in names
            )

        kills.append(
            small_run.kill_when(small_run.start(repository, small_recipe, run), run, saving)
        )
        small_run.finish(small_run.start(repository, small_recipe, run), run)
        assert_same_run(run, whole_run, final_state)
        if all(kills):
            return
    pytest.fail("no attempt was killed in time")


def test_sigterm_and_ctrl_c_save_the_running_step_and_the_next_start_resumes_it(
    tmp_path,
    monkeypatch,
    small_recipe,
    whole_run,
    final_state,
    capfd,
):
    """SIGTERM at a step whose evaluation is due but not its checkpoint; Ctrl-C at a step of the
    next start."""
    run = tmp_path / "run"
    command = small_run.command(small_recipe, run)
    arrived: list[float] = []
    stops = {
        2 * small_run.EVALUATE_EVERY: ("preempted (SIGTERM)", signal.SIGTERM, 143),
        small_run.STEPS - 7: ("stopped (Ctrl-C)", signal.SIGINT, 130),
    }
    assert all(step % small_run.SAVE_EVERY for step in stops)
    check = FiniteSteps._is_finite
    handlers = [signal.getsignal(number) for _, number, _ in stops.values()]

    def interrupt(steps, finished, metrics):  # while that step is counted
        is_finite = check(steps, finished, metrics)
        if finished + 1 == step and finished == small_run.steps_logged(run):
            with pytest.raises(
                UserError, match=f"{run}: process {os.getpid()} on .* is training there since "
            ):
                open_run(config.load(command), True, contextlib.ExitStack())
            arrived.append(time.monotonic())
            os.kill(os.getpid(), number)
        return is_finite

    monkeypatch.setattr(FiniteSteps, "_is_finite", interrupt)
    for step, (how, number, code) in stops.items():  # noqa: B007 - `interrupt` reads them
        assert train.main(command) == code
        assert time.monotonic() - arrived[-1] < 5, "as long as a step and its save take"
        assert (
            f"{how}: saved {run / 'checkpoints' / str(step)}; the same command resumes the run"
            in capfd.readouterr().err
        )
        assert small_run.steps_logged(run) == step
    assert [signal.getsignal(number) for _, number, _ in stops.values()] == handlers
    assert train.main(command) == 0
    assert (
        f"continuing from step {step} ({run / 'checkpoints' / str(step)})\n"
        in capfd.readouterr().err
    )
    assert_same_run(run, whole_run, final_state)


def test_ctrl_c_before_the_first_step_ends_at_once(tmp_path, monkeypatch, small_recipe, capfd):
    """While the held-out loss of the initial model is measured, which may take an hour; there is
    nothing to save."""

    def evaluate(training, *_):
        arrived.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)

    arrived: list[float] = []
    monkeypatch.setattr(_Training, "_evaluate", evaluate)
    run = tmp_path / "run"
    assert train.main(small_run.command(small_recipe, run)) == 130
    assert time.monotonic() - arrived[-1] < 5
    assert small_run.steps_logged(run) == 0 and not list(run.glob("checkpoints/[0-9]*"))
    assert "the running step" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "words",
    [pytest.param("already trained to step 40", marks=pytest.mark.slow), "continuing from step 35"],
)
def test_a_start_that_was_overtaken_resumes_from_what_the_other_saved(
    tmp_path,
    monkeypatch,
    repository,
    small_recipe,
    whole_run,
    final_state,
    capfd,
    words,
):
    """While this start compiles, another one begins in the same folder, and ends or is killed after
    its checkpoint at 35 before this one has the lock."""
    run, compile = tmp_path / "run", _Training.compile

    def overtaken(training):
        compile(training)
        if run.exists():
            return
        if "40" in words:
            small_run.finish(small_run.start(repository, small_recipe, run), run)
        else:
            shutil.copytree(whole_run, run)
            shutil.rmtree(run / "checkpoints/40")

    monkeypatch.setattr(_Training, "compile", overtaken)
    assert train.main(small_run.command(small_recipe, run)) == 0
    assert words in capfd.readouterr().err
    assert_same_run(run, whole_run, final_state)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        ("--optimizer.schedule", "constant"),
        ("--optimizer.schedule", "wsd", "--optimizer.decay_fraction", "0.25"),
    ],
    ids=" ".join,
)
def test_a_lengthened_run_equals_the_long_run(small_recipe, tmp_path, schedule):
    """8 steps, then 12 of the same run: bitwise equal to 12 steps at once, since it resumes from a
    checkpoint before any decay."""

    def finish(run, steps):
        flags = ("--train.steps", steps, "--train.evaluate_every", 0, "--checkpoint.every", 6)
        flags += (*schedule, "--optimizer.average_decay", 0.9)
        assert train.main(small_run.command(small_recipe, run, *flags)) == 0

    finish(tmp_path / "at once", 12)
    finish(tmp_path / "longer", 8)
    if "wsd" in schedule:  # the last 2 of 8 steps decayed: back to step 6
        shutil.rmtree(tmp_path / "longer" / "checkpoints" / "8")
    finish(tmp_path / "longer", 12)
    for item in ("model", "optimizer"):
        arrays, expected = (
            checkpoint.stored_arrays(tmp_path / run / "checkpoints" / "12", item)
            for run in ("longer", "at once")
        )
        assert arrays.keys() == expected.keys()
        for name, x in expected.items():
            assert np.asarray(arrays[name]).tobytes() == np.asarray(x).tobytes(), name
    rows, at_once = (
        list(map(small_run.without_measured, small_run.rows(tmp_path / run / "metrics.jsonl")))
        for run in ("longer", "at once")
    )
    assert rows == at_once


def test_batches_resume_in_order(objective):
    """A resumed start continues the row order of the first start, also across the end of an
    epoch."""
    whole, steps = objective.batches(0), len(objective.loader) + 3
    batches = [next(whole) for _ in range(steps + 2)]
    for start in (1, 20, steps):
        resumed = objective.batches(start)
        for expected in batches[start : start + 2]:
            batch = next(resumed)
            assert all(np.array_equal(batch[name], expected[name]) for name in expected)


def test_a_finished_run_is_left_alone(whole_run, small_recipe, capfd):
    def contents():
        return {path: path.stat().st_mtime_ns for path in (whole_run / "checkpoints").rglob("*")}

    before, metrics = contents(), (whole_run / "metrics.jsonl").read_bytes()
    command = small_run.command(small_recipe, whole_run, "--logging.tensorboard", "true")
    assert train.main(command) == 0
    assert (
        "already trained to step 40" in capfd.readouterr().err
        and not (whole_run / "tensorboard").exists()
    )
    assert contents() == before and (whole_run / "metrics.jsonl").read_bytes() == metrics


def test_a_damaged_newest_checkpoint_is_reported_and_the_previous_one_used(
    tmp_path, whole_run, small_recipe, final_state, capfd
):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    name = small_run.spoil(run / "checkpoints/40")
    assert train.main(small_run.command(small_recipe, run)) == 0
    stderr = capfd.readouterr().err
    warning = next(line for line in stderr.splitlines() if line.startswith("warning: "))
    assert (
        "checkpoints/40" in warning
        and name in warning
        and "using the previous checkpoint" in warning
    )
    assert f"\ncontinuing from step 35 ({run / 'checkpoints/35'})\n" in stderr
    assert_same_run(run, whole_run, final_state)
    assert json.loads((run / "checkpoints/40/manifest.json").read_text())["items"]
