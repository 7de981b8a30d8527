"""The held-out loss is the mean over all targets, and the device does not wait for the host between
batches."""

import math
import signal
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from model.loss import LossSums, SourceSums
from trainer.evaluation import HeldOutLoss, held_out_names
from trainer.run.preemption import Interrupted, interruptible

# Two batches, whose weights are 1 and 3; the third source has no target.
BATCHES = (
    LossSums(
        jnp.float32(8.0),
        jnp.float32(1.0),
        SourceSums(jnp.array([8.0, 0.0, 0.0]), jnp.array([1.0, 0.0, 0.0])),
        {"router_balance": jnp.float32(2.0)},
        {"margin": jnp.float32(4.0), "nothing": jnp.float32(math.nan)},
    ),
    LossSums(
        jnp.float32(6.0),
        jnp.float32(3.0),
        SourceSums(jnp.array([2.0, 4.0, 0.0]), jnp.array([1.0, 2.0, 0.0])),
        {"router_balance": jnp.float32(1.0)},
        {"margin": jnp.float32(2.0), "nothing": jnp.float32(0.0)},
    ),
)


def held_out(batches, sums=lambda params, batch: batch):
    """Returns the measurement of an objective with these batches, and the objective."""
    loss = HeldOutLoss()
    objective = SimpleNamespace(
        loss_name="nats",
        weight_name="targets",
        sources=("a", "b", "c"),
        has_held_out=True,
        held_out=lambda: iter(batches),
        to_device=lambda batch: batch,
    )
    compiled = SimpleNamespace(compile=lambda: sums)
    loss.prepare(objective, SimpleNamespace(lower_evaluate=lambda: compiled))
    return loss, objective


def test_every_target_counts_equally_whatever_its_batch():
    loss, objective = held_out(BATCHES)
    measured = loss.run({}, 0)
    assert measured == {
        "held_out_nats": (8 + 6) / (1 + 3),
        "held_out_targets": 1 + 3,
        "held_out_loss_by_source/a": (8 + 2) / (1 + 1),
        "held_out_loss_by_source/b": 4 / 2,
        "held_out_auxiliary_loss/router_balance": (2 + 1) / 4,
        "held_out_margin": (4 + 2) / 4,
    }
    left_out = {"held_out_loss_by_source/c", "held_out_nothing"}
    assert set(held_out_names(objective, BATCHES[0])) == measured.keys() | left_out


@pytest.mark.parametrize(("weight", "expected"), [(1.0, 8.0), (0.0, None)])
def test_a_single_batch_with_and_without_targets(weight, expected):
    loss, _ = held_out([BATCHES[0]._replace(weight=jnp.float32(weight))])
    assert loss.run({}, 0).get("held_out_nats") == expected


def test_a_notice_ends_the_measurement_between_batches():
    taken = []
    loss, _ = held_out([BATCHES[0]] * 9, lambda params, batch: taken.append(batch) or batch)
    with (
        interruptible(lambda: signal.SIGTERM if len(taken) == 4 else None),
        pytest.raises(Interrupted) as interrupted,
    ):
        loss.run({}, 0)
    assert interrupted.value.notice == signal.SIGTERM and len(taken) == 4
    assert loss.run({}, 0)["held_out_targets"] == 9, "elsewhere it is not interrupted"


def test_without_held_out_data_nothing_is_measured():
    loss, objective = held_out(())
    objective.has_held_out = False
    loss.prepare(objective, SimpleNamespace())
    assert loss.run({}, 0) == {} and held_out_names(objective, BATCHES[0]) == []


def test_the_next_batch_is_computed_before_a_result_is_read():
    events = []

    class Result:
        def __init__(self, number):
            self.number = number

        def __array__(self, dtype=None, copy=None):
            events.append(f"read {self.number}")
            return np.array(self.number, dtype)

    def sums(params, number):
        events.append(f"compute {number}")
        return BATCHES[0]._replace(total=Result(number))

    held_out((1, 2, 3), sums)[0].run({}, 0)
    assert events == ["compute 1", "compute 2", "read 1", "compute 3", "read 2", "read 3"]
