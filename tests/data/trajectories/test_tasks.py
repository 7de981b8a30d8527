"""The tasks: what their simulators return, and that rewards computed from stored states equal the
simulator's bit for bit."""

import numpy as np
import pytest

from data.errors import UserError
from data.trajectories.tasks import (
    TASKS,
    flatten_observation,
    get_task,
    make_environment,
    physics_state,
    relabel,
)


def played(task, steps, seed=3):
    """Returns the states, actions and rewards of random actions, each held for 5 steps."""
    environment, generator = make_environment(task, seed), np.random.default_rng(seed)
    time_step = environment.reset()
    assert flatten_observation(time_step.observation).shape == (task.observation_size,)
    physics = [physics_state(environment)]
    actions = [np.zeros(task.action_size, np.float32)]
    rewards = [0.0]
    for step in range(steps):
        if step % 5 == 0:
            action = generator.uniform(-1, 1, task.action_size).astype(np.float32)
        rewards.append(environment.step(action).reward)
        physics.append(physics_state(environment))
        actions.append(action)
    return np.stack(physics), np.stack(actions), np.array(rewards, np.float32)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_rewards_from_states_match_the_simulator(task):
    physics, actions, rewards = played(task, 40)
    np.testing.assert_array_equal(relabel(task, physics, actions), rewards)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_rewards_of_whole_episodes_match_the_simulator(task):
    physics, actions, rewards = played(task, task.episode_steps, seed=11)
    np.testing.assert_array_equal(relabel(task, physics, actions), rewards)


def test_rewards_can_be_recomputed_for_another_task_of_the_body():
    """Standing is rewarded in running episodes; neither reward depends on the control."""
    physics, actions, rewards = played(get_task("walker_run"), 20)
    standing = relabel(get_task("walker_stand"), physics, actions)
    assert (standing[1:] >= rewards[1:]).all() and (standing[1:] > rewards[1:]).any()


def test_cartpoles_reward_depends_on_the_control():
    physics, actions, rewards = played(get_task("cartpole_swingup"), 20)
    without = relabel(get_task("cartpole_swingup"), physics, np.zeros_like(actions))
    assert (without != rewards).any()


def test_an_unknown_task_is_refused_with_a_suggestion():
    with pytest.raises(UserError, match="found 'walker_wlak'; did you mean walker_walk"):
        get_task("walker_wlak")
