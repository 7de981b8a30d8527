"""Tasks of the papers' in-context reinforcement learning: simulators, and rewards from states.

dm_control is imported where needed: learning from prepared trajectories works without it.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64

from data.errors import UserError, nearest

REACH_CORNER = (-0.09, 0.09, 0.001)
"""Position of jaco_reach_top_left's brick in metres, from the middle of the table; fixed."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A task of a simulated body.

    Attributes:
      name: {domain}_{task}; domain: the body; its tasks share states and actions.
      observation_size, action_size: numbers in a state and in an action; actions are in -1 .. 1.
      physics_size: numbers in the simulator's state.
      episode_steps: simulator steps of an episode.
    """

    name: str
    domain: str
    observation_size: int
    action_size: int
    physics_size: int
    episode_steps: int

    @property
    def task(self) -> str:
        """The task's name without the domain."""
        return self.name.removeprefix(f"{self.domain}_")


TASKS = {
    task.name: task
    for task in (
        Task("walker_stand", "walker", 24, 6, 18, 1000),
        Task("walker_walk", "walker", 24, 6, 18, 1000),
        Task("walker_run", "walker", 24, 6, 18, 1000),
        Task("cheetah_run", "cheetah", 17, 6, 18, 1000),
        Task("cartpole_swingup", "cartpole", 5, 1, 4, 1000),
        Task("jaco_reach_top_left", "jaco", 55, 9, 31, 250),
    )
}


def get_task(name: str) -> Task:
    """Returns a task by its name.

    Raises:
      UserError: there is none of this name.
    """
    if name not in TASKS:
        raise UserError(
            f"trajectories.task: found {name!r}; {nearest(name, TASKS)}the tasks are "
            f"{', '.join(TASKS)}"
        )
    return TASKS[name]


def make_environment(task: Task, seed: int) -> Any:
    """Returns the dm_control environment of a task, whose actions are in -1 .. 1.

    Raises:
      UserError: dm_control is not installed.
    """
    os.environ.setdefault("MUJOCO_GL", "disabled")  # render only if the user chooses a backend
    try:
        from dm_control import suite
    except ImportError:
        raise UserError(
            "the simulator is missing: make install EXTRAS=rl installs dm_control"
        ) from None
    if task.domain == "jaco":
        return _reach_environment(task, seed)
    return suite.load(task.domain, task.task, task_kwargs={"random": seed})


def _reach_environment(task: Task, seed: int) -> Any:
    """Returns the Jaco arm, rewarded for a hand at the brick, which is always at REACH_CORNER.

    dm_control's reach_duplo_features redraws the brick's position in each episode; ExoRL's tasks,
    which are not in dm_control's suite, fix it at a corner.
    """
    import types

    from dm_control import composer
    from dm_control.entities import props
    from dm_control.manipulation import reach
    from dm_control.manipulation.shared import arenas, constants, observations, robots, workspaces
    from dm_control.suite.wrappers import action_scale

    features = observations.PERFECT_FEATURES
    workspace = types.SimpleNamespace(
        target_bbox=workspaces.BoundingBox(REACH_CORNER, REACH_CORNER),
        tcp_bbox=workspaces.BoundingBox((-0.1, -0.1, 0.2), (0.1, 0.1, 0.4)),
        arm_offset=robots.ARM_OFFSET,
    )
    arena, arm, hand = arenas.Standard(), robots.make_arm(features), robots.make_hand(features)
    brick = props.Duplo(
        observable_options=observations.make_options(features, observations.FREEPROP_OBSERVABLES)
    )
    reaching = reach.Reach(
        arena=arena,
        arm=arm,
        hand=hand,
        prop=brick,
        obs_settings=features,
        workspace=workspace,
        control_timestep=constants.CONTROL_TIMESTEP,
    )
    environment = composer.Environment(
        reaching,
        time_limit=task.episode_steps * constants.CONTROL_TIMESTEP - 1e-6,
        random_state=seed,
    )
    return action_scale.Wrapper(environment, minimum=-1.0, maximum=1.0)


def flatten_observation(observation: Mapping[str, Any]) -> Float32[np.ndarray, " O"]:
    """Returns the numbers of an observation as one vector, in the environment's order."""
    return np.concatenate([np.ravel(value) for value in observation.values()]).astype(np.float32)


def physics_state(environment: Any) -> Float64[np.ndarray, " P"]:
    """Returns the restorable state: positions, velocities and activations."""
    return np.array(environment.physics.get_state(), np.float64)


def relabel(
    task: Task, physics: Float64[np.ndarray, "T+1 P"], action: Float32[np.ndarray, "T+1 A"]
) -> Float32[np.ndarray, " T+1"]:
    """Returns a task's rewards for an episode of any task of its domain; row 0, the reset, has 0.

    The control is set as well as the state: cartpole's reward depends on it. A step's control is
    the action before it.

    Args:
      physics, action: of an `Episode`.
    """
    environment = _relabelling_environment(task)
    simulator, rewards = environment.physics, np.zeros(len(physics), np.float32)
    for row in range(1, len(physics)):
        with simulator.reset_context():
            simulator.set_state(physics[row])
            simulator.set_control(_control(environment, action[row]))
        rewards[row] = environment.task.get_reward(simulator)
    return rewards


@functools.cache
def _relabelling_environment(task: Task) -> Any:
    """Returns a simulator whose states can be set; cached, since making one is slow."""
    environment = make_environment(task, seed=0)
    environment.reset()
    return environment


def _control(environment: Any, action: Float32[np.ndarray, " A"]) -> np.ndarray:
    """Returns an action in the simulator's bounds, which may differ from -1 .. 1."""
    bounds = getattr(environment, "_env", environment).action_spec()
    middle, half = (bounds.maximum + bounds.minimum) / 2, (bounds.maximum - bounds.minimum) / 2
    return middle + half * np.asarray(action, np.float64)
