"""Saved values are finite, and a run that trained nothing fails."""

import contextlib
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import train
from data.errors import UserError
from tests import small_run
from trainer import finite
from trainer.config.schema import TrainConfig


def command(small_recipe, run, *flags):
    common = ("--train.evaluate_every", 0, *small_run.DATA_PARALLEL)
    return small_run.command(small_recipe, run, *common, *flags)


def test_an_update_that_overflows_is_not_saved(small_recipe, tmp_path, capfd):
    """With this learning rate the first loss is finite, and the updated parameters are infinite."""
    run = tmp_path / "run"
    flags = ("--optimizer.learning_rate", "3e38", "--optimizer.weight_decay", "1e10")
    flags += ("--optimizer.warmup_steps", 0, "--train.steps", 1)
    code = train.main(command(small_recipe, run, *flags))
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert (
        code == 2
        and len(lines) == 1
        and "is not finite after the update, so nothing is saved; no checkpoint is known"
        in lines[0]
    )
    assert not list(run.glob("checkpoints/[0-9]*"))


def test_a_run_that_skips_steps_to_the_end_fails(small_recipe, tmp_path, monkeypatch, capfd):
    """As after an update to finite parameters that give no finite loss; with held-out data the
    held-out loss reveals it (test_bad_input)."""
    verdicts = iter([True, False, False])
    monkeypatch.setattr(finite.FiniteSteps, "_is_finite", lambda *_: next(verdicts))
    flags = ("--train.steps", "3", "--data.held_out_path", "null", "--data.held_out_fraction", "0")
    for _ in range(2):  # and again when the same command finds it finished
        assert train.main(command(small_recipe, tmp_path / "run", *flags)) == 2
        stderr = capfd.readouterr().err
        assert (
            "the last 2 steps were skipped" in stderr and "no checkpoint is known to be" in stderr
        )


@pytest.mark.parametrize(
    ("skipped", "has_held_out", "words"),
    [
        (0, False, None),
        (1, True, None),
        (1, False, r"RUN/4: the last step was skipped, .*; RUN/2 is good: evaluate this one, or"),
        (2, False, "RUN/4: the last 2 steps were skipped"),
        (4, True, "RUN/4: all 4 steps were skipped"),
    ],
)
def test_a_run_that_skips_its_last_step_fails(skipped, has_held_out, words):
    """Only its loss could have shown whether the previous update was good. If it skipped all, it has
    trained nothing."""
    steps = finite.FiniteSteps(
        TrainConfig(),
        SimpleNamespace(has_held_out=has_held_out),
        SimpleNamespace(path=lambda step: f"RUN/{step}", steps=lambda: [2, 4]),
        {"step": 4, "updates": 4 - skipped, "skipped": skipped},
    )
    raised = pytest.raises(UserError, match=words) if words else contextlib.nullcontext()
    with raised:
        steps.require_trained(4)


@pytest.mark.parametrize(
    ("values", "is_finite"), [([1.0, 2], True), ([1, np.nan], False), ([np.inf, 1], False)]
)
def test_is_finite(values, is_finite):
    assert finite._is_finite(jnp.asarray(values, jnp.float32)) is is_finite
    assert finite._is_finite(jnp.asarray([1, 2], jnp.int32))
