"""Rows of tokens, against explicitly written sums and orders."""

import numpy as np
import pytest

from data.trajectories.options import TrajectoryConfig
from data.trajectories.rows import (
    ACTION,
    RETURN_TO_GO,
    REWARD,
    STATE,
    Scales,
    cut,
    decisions,
    held_steps,
    relabelled,
    row,
)
from model.agentic import Kind

from .made import episode

SCALES = Scales(np.zeros(5), np.full(5, 2.0), 10.0)


def test_kinds_match_the_model():
    assert (RETURN_TO_GO, STATE, ACTION, REWARD) == (
        Kind.RETURN_TO_GO,
        Kind.STATE,
        Kind.ACTION,
        Kind.REWARD,
    )


def test_a_decision_is_its_first_state_and_action_and_the_sum_of_its_rewards():
    whole = episode(3, steps=23)
    whole.reward[1:] = np.arange(23)
    trajectory = decisions(whole, action_repeat=5)
    assert len(trajectory.reward) == 4, "three steps remain"
    np.testing.assert_array_equal(trajectory.state, whole.observation[[0, 5, 10, 15]])
    np.testing.assert_array_equal(trajectory.action, whole.action[[1, 6, 11, 16]])
    np.testing.assert_array_equal(
        trajectory.reward, [sum(range(first, first + 5)) for first in (0, 5, 10, 15)]
    )


def test_how_long_actions_are_held():
    """Actions of one, two and four steps, read in decisions of up to eight."""
    whole = episode(3, steps=16)
    for held in (1, 2, 4):
        action = np.concatenate([whole.action[:1], np.repeat(whole.action[1:], held, 0)[:16]])
        made = whole._replace(action=action)
        for action_repeat in (1, 2, 3, 4, 6, 8):
            expected = max(
                steps
                for steps in range(1, action_repeat + 1)
                if action_repeat % steps == 0 and held % steps == 0
            )
            assert held_steps(made, action_repeat) == expected, (held, action_repeat)


def test_trajectories_ascend_and_share_the_best_return():
    ordered = relabelled([decisions(episode(number)) for number in (4, 2, 3)])
    np.testing.assert_allclose(
        [trajectory.reward.sum() for trajectory in ordered], [4, 6, 8], rtol=1e-6
    )
    assert {round(trajectory.target, 4) for trajectory in ordered} == {8}
    assert [trajectory.reached for trajectory in ordered] == [False, False, True]


@pytest.mark.parametrize("loss_on", ["all", "last"])
def test_the_tokens_of_a_row(loss_on):
    steps = 3
    episodes = [episode(number, steps) for number in (1, 2)]
    options = TrajectoryConfig(in_context=2, loss_on=loss_on)
    batch = row(relabelled([decisions(whole) for whole in episodes]), SCALES, 32, options)
    assert batch["segment_ids"].tolist() == [1] * 24 + [0] * 8
    assert batch["kinds"][:24].tolist() == [0, 1, 2, 3] * 6
    target = steps * 0.2
    for number, whole in enumerate(episodes):
        for step in range(steps):
            to_go, state, action, reward = batch["values"][4 * (number * steps + step) :][:4]
            assert to_go[0] == pytest.approx((target - step * whole.reward[1]) / 10, rel=1e-5)
            np.testing.assert_allclose(state[:5], whole.observation[step] / 2, rtol=1e-6)
            assert action[0] == whole.action[step + 1, 0] and reward[0] == whole.reward[step + 1]
            # The flag is on the last reward of the trajectory that reaches the target, the best.
            assert reward[1] == (number == 1 and step == steps - 1)
            index = 4 * (number * steps + step) + 1
            assert batch["targets"][index] == whole.action[step + 1]
            assert batch["loss_weights"][index] == (loss_on == "all" or number == 1)
    assert batch["loss_weights"].sum() == (6 if loss_on == "all" else 3)


def test_unseen_actions_are_only_targets():
    trajectory = decisions(episode(1, 3))
    seen, unseen = (
        row([trajectory], SCALES, 12, TrajectoryConfig(see_actions=see)) for see in (True, False)
    )
    actions = seen["kinds"] == ACTION
    assert not unseen["values"][actions].any() and seen["values"][actions].any()
    np.testing.assert_array_equal(seen["values"][~actions], unseen["values"][~actions])
    np.testing.assert_array_equal(seen["targets"], unseen["targets"])


def test_behaviour_cloning_has_only_states_and_actions():
    batch = row([decisions(episode(1, 3))], SCALES, 8, TrajectoryConfig(conditioning="none"))
    assert batch["kinds"][:6].tolist() == [STATE, ACTION] * 3 and batch[
        "loss_weights"
    ].tolist() == [1, 0] * 3 + [0, 0]


def test_a_cut_keeps_the_return_to_go():
    trajectory = relabelled([decisions(episode(1, 10))])[0]
    whole = row([trajectory], SCALES, 40, TrajectoryConfig())
    part = row([cut(trajectory, 4, 3)], SCALES, 12, TrajectoryConfig())
    np.testing.assert_allclose(part["values"][:, 0], whole["values"][16:28, 0], rtol=1e-5)
    assert not part["values"][:, 1][part["kinds"] == REWARD].any(), "the cut is marked as the end"


def test_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match="1 trajectories are 80 tokens, and the row has 64"):
        row([decisions(episode(1))], SCALES, 64, TrajectoryConfig())
