"""What a run saves, and whether it has time to finish its step and save it."""

import contextlib
from types import SimpleNamespace

import pytest

from data.errors import UserError
from trainer.best import BestCheckpoint
from trainer.checkpoint.saving import SaveError
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
        config=SimpleNamespace(checkpoint=CheckpointConfig(grace_seconds=25)),
        step=7,
        store=store,
        local=None,
    )
    watchdog = SimpleNamespace(step_seconds_left=lambda: 20.0)
    lines = []
    log = SimpleNamespace(say=lines.append, logged={}, lines=lines)
    return Saves(state, watchdog, log, tmp_path)


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


class Outage:
    """A store whose saves fail as its list `failures` says: None, or whether the reason may
    pass."""

    def __init__(self, failures):
        self.failures, self.saved = iter(failures), []

    def wait(self):
        if (may_pass := next(self.failures)) is not None:
            raise SaveError("saving checkpoint 6 failed: Input/output error", may_pass)

    def save(self, step, **_):
        self.saved.append(step)


@pytest.fixture
def outage(saves):
    """Sets a store that fails in this way, and returns a function that saves a step."""

    def failing(*failures):
        saves.store = Outage([None, *failures])
        saves.watchdog.phase = lambda *_: contextlib.nullcontext()
        saves.state.config.distributed = SimpleNamespace(save_minutes=1)
        saves.state.best = BestCheckpoint(CheckpointConfig(best="held_out_loss"))
        saves.state.require_finite = lambda: None
        saves.state.saved_data = lambda _: {}
        saves.state.saved_params = saves.state.optimizer_state = {}
        saves.state.objective = SimpleNamespace(model=SimpleNamespace(unpadded_shapes={}))

        def save(step, **options):
            saves.state.step = step
            saves.save(**options)

        return save

    return failing


def test_a_save_that_failed_for_a_moment_is_made_up_for_by_the_next(saves, outage):
    """The run was once ended instead, without the steps since, also after a SIGTERM."""
    save = outage(True, None, True)
    for step in (6, 9, 12, 15):
        save(step)
    assert saves.store.saved == [6, 9, 12, 15]
    failed = "saving checkpoint 6 failed: Input/output error; saving this step instead"
    assert saves.log.lines == [f"step 9: {failed}", f"step 15: {failed}"]


@pytest.mark.parametrize("failures", [[False], [True, True]])
def test_a_lasting_failure_of_saves_ends_the_run(saves, outage, failures):
    save = outage(*failures)
    for step in range(len(failures)):
        save(step)
    with pytest.raises(SaveError):
        save(9)


def test_the_last_save_is_tried_whatever_failed_before(saves, outage):
    save = outage(True, True)
    save(6)
    save(9)
    save(10, is_last=True)
    assert saves.store.saved == [6, 9, 10]


@pytest.mark.parametrize(("loss", "expected"), [(2.5, (3, 2.0)), (1.5, (9, 1.5))])
def test_a_best_checkpoint_that_was_not_saved_is_not_the_best(saves, outage, loss, expected):
    """The one saved instead may be better than the best before."""
    save, best = outage(None, True), saves.state.best
    for step, value in ((3, 2.0), (6, 1.0)):
        assert best.update(step, {"held_out_loss": value})
        save(step)
    assert not best.update(9, {"held_out_loss": loss})
    save(9)
    assert (best.step, best.value) == expected and saves.store.protected == expected[0]


@pytest.mark.parametrize("save", [Saves.save, Saves.save_locally])
def test_non_finite_parameters_are_not_saved(saves, save):
    """Neither store has a `save` method: calling it would fail."""

    def require_finite():
        raise UserError("w is not finite")

    saves.state.require_finite, saves.state.finished = require_finite, False
    saves.local = SimpleNamespace(wait=lambda: None)
    saves.config = CheckpointConfig(local="/dev/shm/run", local_every=7)
    with pytest.raises(UserError, match="w is not finite"):
        save(saves)
