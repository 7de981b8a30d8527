"""The best checkpoint is kept and can be selected, and early stopping ends a run; both work across
restarts."""

import contextlib
import itertools
import json
import signal

import numpy as np
import pytest
import transformers

import train
from data.errors import UserError
from tests import small_run
from trainer import loop
from trainer.best import BestCheckpoint
from trainer.checkpoint.readers import find_checkpoint, restore_model
from trainer.checkpoint.store import CheckpointStore
from trainer.config.load import load
from trainer.config.schema import CheckpointConfig, RunConfig, TrainConfig
from trainer.evaluation import HeldOutLoss
from trainer.model_source import open_model
from trainer.run.preemption import end_if_noticed

LOSS = "held_out_loss_nats_per_target"
# After step 2 the best so far, after 4 and 6 worse, after 8 the overall best, then never better.
LOSSES = {0: 9.0, 2: 3.0, 4: 3.5, 6: 3.0, 8: 2.5, 10: 2.9, 12: 2.6, 14: 2.5, 16: 1.0}


@pytest.fixture
def start(small_recipe, tmp_path, monkeypatch, capfd):
    """Starts the run with flags, with LOSSES as its held-out losses; returns (exit code,
    output)."""
    monkeypatch.setattr(HeldOutLoss, "run", lambda self, params, step: {LOSS: LOSSES[step]})

    def begin(*flags, steps=16):
        capfd.readouterr()
        command = small_run.command(
            small_recipe,
            tmp_path / "run",
            *("--train.steps", steps, "--train.evaluate_every", 2, "--checkpoint.every", 5),
            *("--checkpoint.keep", 1, "--checkpoint.best", LOSS),
            *("--optimizer.schedule", "constant", *small_run.DATA_PARALLEL, *flags),
        )
        return train.main(command), capfd.readouterr().err

    return begin


def saved(folder):
    return sorted(int(path.name) for path in (folder / "run" / "checkpoints").iterdir())


def test_a_run_stops_when_patience_runs_out_and_keeps_the_best(start, tmp_path):
    code, output = start("--checkpoint.patience", "3")
    assert code == 0 and saved(tmp_path) == [8, 14]
    assert f"stopped at step 14: {LOSS} was lowest at step 8 (2.5), 3 measurements ago" in output
    assert f"best: {tmp_path}/run/checkpoints/8 ({LOSS} 2.5)" in output
    assert len(small_run.rows(tmp_path / "run" / "metrics.jsonl")) == 14
    assert (
        find_checkpoint(tmp_path / "run").name == "14"
        and find_checkpoint(tmp_path / "run" / "best").name == "8"
    )
    assert open_model(str(tmp_path / "run" / "best")).folder.name == "8"
    code, output = start("--checkpoint.patience", "3")
    assert code == 0 and "already stopped at step 14" in output and saved(tmp_path) == [8, 14]
    code, output = start("--checkpoint.patience", "4")
    assert code == 0 and "continuing from step 14" in output and saved(tmp_path) == [16]
    assert find_checkpoint(tmp_path / "run" / "best").name == "16"


@pytest.mark.slow
def test_several_starts_give_the_same_run(start, tmp_path):
    for steps in (4, 10, 16):
        code, output = start("--checkpoint.patience", "3", steps=steps)
        assert code == 0
    assert "stopped at step 14" in output and saved(tmp_path) == [8, 14]
    twice = restore_model(tmp_path / "run" / "checkpoints" / "14")
    (tmp_path / "run").rename(tmp_path / "before")
    start("--checkpoint.patience", "3")
    at_once = restore_model(tmp_path / "run" / "checkpoints" / "14")
    assert all(np.array_equal(twice[name], x) for name, x in at_once.items())


def test_an_unmeasured_metric_is_refused(start):
    code, output = start("--checkpoint.best", "accuracy")
    assert (
        code == 2
        and (f"checkpoint.best: found 'accuracy', which no evaluation measures; available: {LOSS}")
        in output
    )


@pytest.mark.slow
def test_an_unmeasured_metric_is_refused_when_a_run_resumes_with_it(start, tmp_path):
    start(steps=2)
    code, output = start("--checkpoint.best", "accuracy", steps=4)
    assert code == 2 and "checkpoint.best: found 'accuracy', which no evaluation measures" in output
    code, output = start(steps=4)
    assert code == 0 and saved(tmp_path) == [2, 4] and "have changed" not in output
    assert [row["step"] for row in small_run.rows(tmp_path / "run/held_out.jsonl")] == [0, 2, 4]


def test_patience_that_runs_out_in_the_evaluation_after_a_preemption_ends_the_run(
    start, tmp_path, monkeypatch
):
    with monkeypatch.context() as patched:
        steps = itertools.count(1)
        patched.setattr(
            loop,
            "notices",
            lambda no_time: contextlib.nullcontext(
                lambda: signal.SIGTERM if next(steps) == 14 else None
            ),
        )
        code, _ = start("--checkpoint.patience", "3")
    assert code == 128 + signal.SIGTERM and saved(tmp_path) == [8, 14]
    code, output = start("--checkpoint.patience", "3")
    assert (
        code == 0
        and f"stopped at step 14: {LOSS} was lowest at step 8 (2.5), 3 measurements ago" in output
    )
    assert len(small_run.rows(tmp_path / "run" / "metrics.jsonl")) == 14


def test_a_notice_ends_an_evaluation_which_the_next_start_repeats(start, tmp_path, monkeypatch):
    """The step is saved at once, since evaluations may take longer than a preemption allows."""
    measured = []

    class Slow:
        name, every = "slow", 2

        def prepare(self, objective, builder):
            pass

        def run(self, params, step):
            for part in range(3):
                measured.append((step, part))
                end_if_noticed()
            return {"part": 2}

    begin = loop.train
    monkeypatch.setattr(
        loop,
        "train",
        lambda config, make, evaluations, follows: begin(
            config, make, [*evaluations, Slow()], follows
        ),
    )
    with monkeypatch.context() as patched:
        notice = lambda: signal.SIGTERM if (4, 1) in measured else None  # noqa: E731
        patched.setattr(loop, "notices", lambda no_time: contextlib.nullcontext(notice))
        code, output = start(steps=6)
    assert code == 128 + signal.SIGTERM and saved(tmp_path) == [2, 4], output
    assert measured[-1] == (4, 1)
    code, output = start(steps=6)
    assert code == 0 and measured[-6:] == [(s, part) for s in (4, 6) for part in range(3)], measured
    assert "warning" not in output
    for log in ("held_out", "slow"):
        rows = small_run.rows(tmp_path / f"run/{log}.jsonl")
        assert [row["step"] for row in rows] == [0, 2, 4, 6]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_non_finite_held_out_loss_ends_the_run_before_it_is_saved(
    start, tmp_path, monkeypatch, loss
):
    monkeypatch.setattr(HeldOutLoss, "run", lambda self, params, step: {LOSS: loss})
    code, output = start("--checkpoint.patience", "2", steps=6)
    assert code == 2 and not (tmp_path / "run" / "checkpoints").exists(), output
    assert f"step 2: {LOSS} is {loss}, so nothing is saved" in output


def test_patience_needs_measurements_between_the_first_and_the_last_step(start):
    """transformers' EarlyStoppingCallback requires an eval_strategy, too."""
    code, output = start("--checkpoint.patience", "3", "--train.evaluate_every", "0")
    assert (
        code == 2
        and (
            f"checkpoint.patience: found 3, but {LOSS} is measured only before the first and after the "
            "last step; --train.evaluate_every 1 would work"
        )
        in output
    )


def test_a_best_that_is_always_the_last_step_is_a_warning():
    config = CheckpointConfig(best="accuracy", patience=2)
    assert BestCheckpoint(config).require({"accuracy": 5}, steps=6) is None
    assert BestCheckpoint(CheckpointConfig()).require({}, steps=6) is None
    warning = BestCheckpoint(config).require({"accuracy": 6}, steps=6)
    assert warning == (
        "checkpoint.best: accuracy is measured only before the first and after the last step, so "
        "the last step is the best and the run never ends early; `every: 1` in its entry would "
        "measure it more often"
    )
    best_only = BestCheckpoint(CheckpointConfig(best="accuracy"))
    assert "the last step is the best" in best_only.require({"accuracy": 0}, steps=6)
    with pytest.raises(UserError, match=r"patience: found 2, .*; `every: 1` in .* would work"):
        BestCheckpoint(config).require({"accuracy": 0}, steps=6)


def test_a_run_that_stops_early_makes_the_measurements_of_a_last_step(start, monkeypatch, tmp_path):
    """Samples and tests with `every: 0` compare the model before and after training, also if the
    first attempt to make them is interrupted."""
    measured = []

    class Last:
        name, every = "answers", 0

        def prepare(self, objective, builder):
            pass

        def run(self, params, step):
            measured.append(step)
            end_if_noticed()
            return {"accuracy": 0.5}

    begin = loop.train
    monkeypatch.setattr(
        loop,
        "train",
        lambda config, make, evaluations, follows: begin(
            config, make, [*evaluations, Last()], follows
        ),
    )
    with monkeypatch.context() as patched:
        notice = lambda: signal.SIGTERM if measured == [0, 14] else None  # noqa: E731
        patched.setattr(loop, "notices", lambda no_time: contextlib.nullcontext(notice))
        code, _ = start("--checkpoint.patience", "3")
    assert code == 128 + signal.SIGTERM and saved(tmp_path) == [8, 14]
    code, output = start("--checkpoint.patience", "3")
    assert code == 0 and "stopped at step 14" in output and measured == [0, 14, 14]
    rows = small_run.rows(tmp_path / "run/answers.jsonl")
    assert [row["step"] for row in rows] == [0, 14]
    rows = small_run.rows(tmp_path / "run/held_out.jsonl")
    assert [row["step"] for row in rows] == [*range(0, 15, 2)]
    assert f"export_hf {tmp_path}/run/best " in output, "as load_best_model_at_end"


def test_patience_needs_a_metric(small_recipe):
    with pytest.raises(
        Exception, match=r"checkpoint\.patience: found 2, needs 0, or checkpoint\.best"
    ):
        load(["--config", str(small_recipe), "--checkpoint.patience", "2"])


def test_a_run_without_a_best_checkpoint_says_so(whole_run):
    with pytest.raises(
        ValueError,
        match=r"best: this run has no best checkpoint; checkpoint\.best names the metric",
    ):
        find_checkpoint(whole_run / "best")


def test_the_highest_value_may_be_the_best_and_another_metric_starts_over():
    best = BestCheckpoint(CheckpointConfig(best="accuracy", patience=2))
    assert [
        best.update(step, {"accuracy": value}) for step, value in enumerate((0.5, 0.4, 0.6, 0.6), 1)
    ] == [True, False, True, False]
    assert (best.step, best.waited, best.exhausted) == (3, 1, False)
    config = RunConfig(checkpoint=best.config)
    again = BestCheckpoint.of(config, best.data)
    assert again == best and not again.update(5, {"loss": 1.0}) and again == best
    assert not again.update(5, {"accuracy": 0.1}) and again.exhausted
    lowest = RunConfig(checkpoint=CheckpointConfig(best="accuracy", best_is="lowest"))
    assert BestCheckpoint.of(lowest, best.data).step is None


@pytest.mark.parametrize(
    "metric", ["held_out_preference_loss", "held_out_rewards/accuracies", "lines/lines/64"]
)
def test_the_best_value_is_that_of_transformers(metric, tmp_path):
    """The lowest loss, and the highest other metric, such as an accuracy."""
    theirs = transformers.TrainingArguments(str(tmp_path), metric_for_best_model=metric)
    best = BestCheckpoint(CheckpointConfig(best=metric))
    updates = [best.update(step, {metric: value}) for step, value in enumerate((0.5, 0.4, 0.6))]
    assert updates == [True, not theirs.greater_is_better, theirs.greater_is_better]


@pytest.mark.parametrize(
    ("metric", "best"),
    [
        (LOSS, "lowest"),
        ("held_out_loss_by_source/books", "lowest"),
        ("held_out_nats_per_action", "lowest"),
        ("held_out_squared_error_per_action", "lowest"),
        ("long_lossless/lines/64", "highest"),
    ],
)
def test_a_loss_need_not_be_called_so(metric, best):
    assert CheckpointConfig(best=metric).best_value == best


def test_the_direction_that_earlier_versions_recorded_without_a_metric_is_read(small_recipe):
    """Their default was a word, which a recipe may repeat."""
    words = ["--config", str(small_recipe)]
    assert load([*words, "--checkpoint.best_is", "lowest"]).checkpoint == load(words).checkpoint


LINES = {"test": "lines", "every": 2, "tokens": (64,), "count": 2, "name": ""}


def config_with(*evaluations, evaluate_every=2, best="lines/lines/64", patience=0):
    return RunConfig(
        checkpoint=CheckpointConfig(best=best, patience=patience),
        evaluations=evaluations,
        train=TrainConfig(steps=10, evaluate_every=evaluate_every),
    )


def measured_once(config):
    """What a checkpoint of step 2 says of the best, after one measurement of 0.5."""
    best = BestCheckpoint.of(config, {})
    best.update(2, {config.checkpoint.best: 0.5})
    return json.loads(json.dumps(best.data))


def test_a_best_of_the_same_test_is_kept_when_a_run_resumes():
    data = measured_once(config_with(LINES))
    again = config_with({**LINES, "every": 3, "rows": 4, "chunk": 64, "tokens": [64]})
    best = BestCheckpoint.of(again, data)
    assert (best.step, best.to_be_checked, best.warning_on_resuming(again)) == (2, False, None)
    earlier_release = {"best": {x: y for x, y in data["best"].items() if x != "measured_by"}}
    assert BestCheckpoint.of(again, earlier_release).step == 2


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (config_with({**LINES, "count": 20}), "evaluations: what measures lines/lines/64 has"),
        (config_with(), "evaluations: what measures lines/lines/64 has changed"),
        (config_with(LINES, best=None), "checkpoint.best is not given now"),
        (config_with(LINES, best=LOSS), f"checkpoint.best is {LOSS} (lowest) now"),
    ],
)
def test_a_best_of_something_else_is_forgotten_and_named_when_a_run_resumes(now, why):
    """The values of two tests were compared, or a test that was gone never gave a new best."""
    best = BestCheckpoint.of(now, measured_once(config_with(LINES)))
    warning = best.warning_on_resuming(now)
    assert best.step is None and best.to_be_checked == (now.checkpoint.best is not None)
    assert f"the best by lines/lines/64 so far, step 2, is no longer kept: {why}" in warning


def test_patience_given_when_a_run_resumes_needs_measurements_too():
    data = measured_once(config_with(best=LOSS))
    now = config_with(best=LOSS, evaluate_every=0, patience=3)
    with pytest.raises(UserError, match=r"checkpoint\.patience: found 3, but .*only before"):
        BestCheckpoint.of(now, data).warning_on_resuming(now)


def test_a_best_checkpoint_that_is_no_longer_named_is_not_removed_in_silence(start, tmp_path):
    start(steps=8)
    code, output = start("--checkpoint.best", "null", steps=10)
    assert code == 0 and saved(tmp_path) == [10]
    assert f"checkpoints/8: the best by {LOSS} so far, step 8, is no longer kept" in output


class _Killed(Exception):
    pass


@pytest.fixture
def start_and_kill(start, tmp_path, monkeypatch):
    """Starts the run with local checkpoints, killed after a step once the hosts have it; returns
    the flags."""

    def begin(killed):
        flags = ("--checkpoint.local", str(tmp_path / "local"), "--checkpoint.local_every", "1")

        def kill(self, notice):
            evaluate_and_save(self, notice)
            if self.state.step == killed:
                self.local.wait()
                raise _Killed

        evaluate_and_save = loop._Training._evaluate_and_save
        with monkeypatch.context() as patch, pytest.raises(_Killed):
            patch.setattr(loop._Training, "_evaluate_and_save", kill)
            start(*flags)
        return flags

    return begin


@pytest.mark.parametrize("killed", [2, 3], ids=["before its save", "during its save"])
def test_a_best_step_that_only_the_hosts_have_is_saved(
    start, start_and_kill, tmp_path, monkeypatch, killed
):
    """A run was killed when the best step was on the hosts, but not in the run's folder yet: the
    next start went on from the hosts, and the best checkpoint did not exist."""
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "save", lambda *_, **__: None)
        local = start_and_kill(killed)
    monkeypatch.setattr(HeldOutLoss, "run", lambda self, params, step: {LOSS: 9.0 + (step != 2)})
    code, output = start(*local, steps=6)
    assert code == 0 and saved(tmp_path) == [2, 6], output
    assert ("local checkpoint of step 3 is not used" in output) == (killed == 3)
    assert ("continuing from step 2" in output) == (killed == 2)


@pytest.mark.parametrize(
    ("killed", "steps"), [(3, 3), (4, 16)], ids=["by its evaluation", "by a lower patience"]
)
def test_a_step_that_only_the_hosts_have_is_saved_if_the_run_ends_there(
    start, start_and_kill, tmp_path, monkeypatch, killed, steps
):
    """The next start of a killed run found its patience exhausted: it named a checkpoint of that
    step, which the run's folder did not have."""
    local = start_and_kill(killed)
    assert saved(tmp_path) == [2]
    monkeypatch.setattr(HeldOutLoss, "run", lambda self, params, step: {LOSS: 9.5})
    code, output = start(*local, "--checkpoint.patience", "1", steps=steps)
    assert code == 0 and f"\nstopped at step {killed}: {LOSS} was lowest at step 2" in output
    assert saved(tmp_path) == [2, killed], output


def test_a_best_that_only_a_shorter_runs_last_evaluation_finds_is_recorded(
    start, start_and_kill, tmp_path, monkeypatch
):
    """RUN/best once led to an earlier step that was worse, since the checkpoint had been saved
    before the run became shorter."""
    start_and_kill(5)
    assert saved(tmp_path) == [2, 5]
    monkeypatch.setattr(HeldOutLoss, "run", lambda self, params, step: {LOSS: 1.0})
    code, output = start(steps=5)
    assert code == 0 and find_checkpoint(tmp_path / "run/best").name == "5", output
    code, output = start(steps=5)
    assert code == 0 and "already trained to step 5" in output
