"""What a run saves, and whether it has time to finish its step and save it."""

from types import SimpleNamespace

import pytest

from data.errors import UserError
from trainer.config.schema import CheckpointConfig
from trainer.saves import Saves


@pytest.fixture
def saves(tmp_path):
    """Saves of a run at step 7, with checkpoints at steps 3 and 6, whose step needs 20 s more."""
    waited = []
    store = SimpleNamespace(
        save_seconds=4.0,
        steps=lambda: [3, 6],
        path=lambda step: tmp_path / str(step),
        wait_at_most=waited.append,
        waited=waited,
    )
    state = SimpleNamespace(
        config=SimpleNamespace(checkpoint=CheckpointConfig(grace_seconds=25)), step=7
    )
    return Saves(state, store, None, SimpleNamespace(step_seconds_left=lambda: 20.0), tmp_path)


def test_a_step_and_its_save_fit_into_the_grace_period(saves):
    assert saves.no_time_to_finish() is None


def test_a_save_that_takes_too_long_ends_the_run_within_its_step(saves, tmp_path):
    saves.store.save_seconds = 6.0
    message = saves.no_time_to_finish()
    assert (
        message.startswith("preempted (SIGTERM): step 8 was not finished")
        and "about 26 s" in message
    )
    assert message.endswith(f"the same command resumes the run from {tmp_path / '6'}")
    [seconds] = saves.store.waited
    assert 24 < seconds <= 25, "a save that is under way may still count"
    saves.local = SimpleNamespace(newest=7)
    assert saves.no_time_to_finish().endswith("from the local checkpoint of step 7")


def test_the_first_step_has_no_estimate(saves):
    saves.store.save_seconds, saves.watchdog.step_seconds_left = 6.0, lambda: None
    assert saves.no_time_to_finish() is None


def test_without_a_grace_period_the_step_is_finished(saves):
    saves.watchdog.step_seconds_left = lambda: 9e9
    saves.config = CheckpointConfig(grace_seconds=0)
    assert saves.no_time_to_finish() is None


@pytest.mark.parametrize("save", [Saves.save, Saves.save_locally])
def test_non_finite_parameters_are_not_saved(saves, save):
    """Neither store has a `save` method: calling it would fail."""

    def require_finite():
        raise UserError("w is not finite")

    saves.state.require_finite, saves.state.finished = require_finite, False
    saves.local = SimpleNamespace(wait=lambda: None)
    saves.config = CheckpointConfig(local="/dev/shm/run", local_every=7)
    with pytest.raises(UserError, match="w is not finite"):
        save(saves, SimpleNamespace())
