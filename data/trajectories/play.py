"""Plays episodes with dm_control; an episode is a function of its task, its seed and its policy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from .episodes import Episode
from .tasks import Task, flatten_observation, get_task, make_environment, physics_state

Policy = Callable[[Float[np.ndarray, " O"]], Float[np.ndarray, " A"]]
"""Takes a state in float64 and returns an action, which is clipped to -1 .. 1."""


def play_episode(task: Task, seed: int, action_repeat: int, policy: Policy) -> Episode:
    """Returns one episode, in which an action is held for `action_repeat` simulator steps."""
    environment = _environment(task.name)
    _reseed(environment, seed)
    time_step = environment.reset()
    state = flatten_observation(time_step.observation)
    no_action = np.zeros(task.action_size, np.float32)
    rows = [(state, no_action, 0.0, 1.0, physics_state(environment))]
    for step in range(task.episode_steps):
        if step % action_repeat == 0:
            action = np.clip(policy(state.astype(np.float64)), -1, 1).astype(np.float32)
        time_step = environment.step(action)
        state = flatten_observation(time_step.observation)
        reward = time_step.reward or 0.0
        discount = 1.0 if time_step.discount is None else time_step.discount
        rows.append((state, action, reward, discount, physics_state(environment)))
    observation, actions, rewards, discounts, physics = zip(*rows, strict=True)
    return Episode(
        np.stack(observation),
        np.stack(actions),
        np.array(rewards, np.float32),
        np.array(discounts, np.float32),
        np.stack(physics),
    )


@functools.cache
def _environment(task: str) -> Any:
    return make_environment(get_task(task), seed=0)


def _reseed(environment: Any, seed: int) -> None:
    """Makes the environment's next reset depend only on the seed."""
    random = (
        environment.task.random if hasattr(environment.task, "random") else environment.random_state
    )
    random.seed(seed)
