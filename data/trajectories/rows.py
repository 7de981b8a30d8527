"""Turns episodes into rows of tokens: return to go, state, action and reward of each decision.

The order and the relabelling are Agentic Transformer's (Liu and Abbeel, Emergent Agentic
Transformer from Chain of Hindsight Experience, section 3): several trajectories of a task in a row,
by ascending return, each with the best one's return as its target, and a flag on the last reward of
trajectories that reach it. With a single trajectory this is Decision Transformer.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int

from .episodes import Episode
from .options import TrajectoryConfig

RETURN_TO_GO, STATE, ACTION, REWARD = range(4)
"""The kinds of tokens, as `model.agentic.Kind` numbers them."""


class Decisions(NamedTuple):
    """A trajectory as its T decisions.

    Attributes:
      state: observed before each decision; action: taken; reward: the sum over the decision's
        simulator steps.
      target: the return it is relabelled with; reached: whether its return is at least that.
      earned: in a cut, rewards before the first decision.
      ends: whether the trajectory ends with the last decision.
    """

    state: Float32[np.ndarray, "T O"]
    action: Float32[np.ndarray, "T A"]
    reward: Float32[np.ndarray, " T"]
    target: float = 0.0
    reached: bool = False
    earned: float = 0.0
    ends: bool = True


class Scales(NamedTuple):
    """The divisors of inputs, so that all kinds have about the same scale.

    Attributes:
      mean, std: of each number of a state, over the data; return_scale: of returns to go.
    """

    mean: Float[np.ndarray, " O"]
    std: Float[np.ndarray, " O"]
    return_scale: float

    def state(self, observation: Float32[np.ndarray, "*n O"]) -> Float32[np.ndarray, "*n O"]:
        """Returns normalized states."""
        return ((observation - self.mean) / self.std).astype(np.float32)

    @classmethod
    def of(cls, states: Float32[np.ndarray, "n O"], largest_return: float) -> "Scales":
        """Returns the scales of some states, and of returns up to a largest one."""
        values = states.astype(np.float64)
        # A constant number is only centred.
        std = values.std(0)
        return cls(values.mean(0), np.where(std < 1e-6, 1.0, std), max(abs(largest_return), 1e-6))


def decisions(episode: Episode, action_repeat: int = 1) -> Decisions:
    """Returns an episode as decisions of `action_repeat` steps, without a remainder."""
    count = (len(episode.reward) - 1) // action_repeat
    steps = count * action_repeat
    reward = episode.reward[1 : steps + 1].astype(np.float64).reshape(count, action_repeat).sum(1)
    return Decisions(
        episode.observation[:steps:action_repeat].astype(np.float32),
        episode.action[1 : steps + 1 : action_repeat].astype(np.float32),
        reward.astype(np.float32),
    )


def held_steps(episode: Episode, action_repeat: int) -> int:
    """Returns for how many steps the episode's actions are held: the largest such divisor of
    `action_repeat`, which decisions may have without losing actions."""
    for steps in range(action_repeat, 1, -1):
        count = (len(episode.reward) - 1) // steps
        actions = episode.action[1 : count * steps + 1].reshape(count, steps, -1)
        if action_repeat % steps == 0 and (actions == actions[:, :1]).all():
            return steps
    return 1


def cut(trajectory: Decisions, first: int, count: int) -> Decisions:
    """Returns `count` successive decisions of a trajectory, from number `first` on."""
    stop = first + count
    return trajectory._replace(
        state=trajectory.state[first:stop],
        action=trajectory.action[first:stop],
        reward=trajectory.reward[first:stop],
        earned=float(trajectory.reward[:first].sum(dtype=np.float64)),
        ends=stop >= len(trajectory.reward),
    )


def tokens(
    trajectory: Decisions, scales: Scales, width: int, config: TrajectoryConfig
) -> tuple[Float32[np.ndarray, "n W"], Int[np.ndarray, " n"]]:
    """Returns the numbers and the kinds of a trajectory's tokens, in their order."""
    count = len(trajectory.reward)
    conditioned = config.conditioning == "return"
    kinds = (RETURN_TO_GO, STATE, ACTION, REWARD) if conditioned else (STATE, ACTION)
    values = np.zeros((count, len(kinds), width), np.float32)
    state = kinds.index(STATE)
    values[:, state, : trajectory.state.shape[1]] = scales.state(trajectory.state)
    if config.see_actions:
        values[:, state + 1, : trajectory.action.shape[1]] = trajectory.action
    if conditioned:
        earned = trajectory.earned + np.concatenate(
            [[0], np.cumsum(trajectory.reward, dtype=np.float64)[:-1]]
        )
        values[:, 0, 0] = (trajectory.target - earned) / scales.return_scale
        values[:, 3, 0] = trajectory.reward
        values[-1, 3, 1] = float(trajectory.ends and trajectory.reached)
    return values.reshape(-1, width), np.tile(np.array(kinds, np.int32), count)


def row(
    trajectories: Sequence[Decisions], scales: Scales, length: int, config: TrajectoryConfig
) -> dict[str, np.ndarray]:
    """Returns one row [L, ...] of a batch: the tokens of its trajectories, then padding.

    Raises:
      ValueError: the tokens are more than `length`.
    """
    observation, action = trajectories[0].state.shape[1], trajectories[0].action.shape[1]
    parts = [
        tokens(trajectory, scales, max(observation, action, 2), config)
        for trajectory in trajectories
    ]
    values, kinds = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    count = len(kinds)
    if count > length:
        raise ValueError(
            f"{len(trajectories)} trajectories are {count} tokens, and the row has {length}"
        )
    actions = np.concatenate([trajectory.action for trajectory in trajectories])
    trained = [
        config.loss_on == "all" or trajectory is trajectories[-1] for trajectory in trajectories
    ]
    weight = np.repeat(
        np.array(trained, np.float32), [len(trajectory.reward) for trajectory in trajectories]
    )
    index = np.arange(length, dtype=np.int32)
    batch = {
        "values": np.zeros((length, values.shape[1]), np.float32),
        "kinds": np.zeros(length, np.int32),
        "targets": np.zeros((length, action), np.float32),
        "loss_weights": np.zeros(length, np.float32),
        "positions": np.where(index < count, index, 0).astype(np.int32),
        "index": index,
        "segment_ids": (index < count).astype(np.int32),
    }
    batch["values"][:count], batch["kinds"][:count] = values, kinds
    states = np.flatnonzero(kinds == STATE)
    batch["targets"][states], batch["loss_weights"][states] = actions, weight
    return batch


def relabelled(trajectories: Sequence[Decisions]) -> list[Decisions]:
    """Returns trajectories by ascending return, each with the best one's return as its target."""
    returns = [float(trajectory.reward.sum(dtype=np.float64)) for trajectory in trajectories]
    target = max(returns)
    return [
        trajectories[i]._replace(target=target, reached=returns[i] >= target)
        for i in sorted(range(len(returns)), key=returns.__getitem__)
    ]
