"""Explores a body without a task: Stable-Baselines3's TD3 with only an intrinsic reward.

TD3 is what the unsupervised RL benchmark, whose agents collected ExoRL's data, calls DDPG: two
critics, smoothed targets, Gaussian noise on the actions. Rewards are recomputed for each batch by
the intrinsic reward learned so far.
"""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from jaxtyping import Float
from stable_baselines3 import TD3
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from torch import Tensor

from data.errors import UserError
from data.folders import replacing

from .episodes import DAMAGE
from .intrinsic import HIDDEN, REWARDS, IntrinsicReward, Transitions
from .play import Policy
from .rows import Decisions
from .tasks import Task

NOISE = 0.2
"""Standard deviation of the noise on actions."""
UNGUIDED = 10
"""Episodes of uniformly random actions before learning begins; they also normalize the states."""
LEARNING_RATE = 3e-4
BATCH = 256


class IntrinsicReplay(ReplayBuffer):
    """A replay buffer whose rewards are an intrinsic reward's, learned batch by batch.

    Attributes:
      mean, std: [O] of the states, which are stored raw and sampled normalized.
      mean_reward: of the last batch.
    """

    def __init__(self, *args: Any, intrinsic: IntrinsicReward, **more: Any) -> None:
        super().__init__(*args, **more)
        self.intrinsic = intrinsic
        learned = [weight for weight in intrinsic.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.Adam(learned, LEARNING_RATE)
        self.mean, self.std = torch.zeros(self.obs_shape), torch.ones(self.obs_shape)
        self.mean_reward = 0.0

    def normalize_by_contents(self) -> None:
        """Takes mean and deviation from the states in the buffer."""
        states = self.observations[: self.pos, 0].astype(np.float64)
        std = states.std(0)
        self.mean = torch.from_numpy(states.mean(0)).float()
        self.std = torch.from_numpy(np.where(std < 1e-6, 1.0, std)).float()

    def normalized(self, states: Tensor) -> Tensor:
        """Returns states as the networks take them."""
        return ((states - self.mean) / self.std).clamp(-10, 10)

    def sample(self, batch_size: int, env: Any = None) -> ReplayBufferSamples:
        """Returns a batch with intrinsic rewards, after a step of the intrinsic reward on it."""
        samples = super().sample(batch_size, env)
        before, after = map(self.normalized, (samples.observations, samples.next_observations))
        batch = Transitions(before, samples.actions, after)
        self.optimizer.zero_grad()
        self.intrinsic.loss(batch).backward()
        self.optimizer.step()
        self.intrinsic.after_step()
        with torch.no_grad():
            rewards = self.intrinsic.reward(batch)
        self.mean_reward = float(rewards.mean())
        return samples._replace(observations=before, next_observations=after, rewards=rewards)


class _Spaces(gymnasium.Env):
    """The sizes of a task's states and actions, in the learner's environment interface."""

    def __init__(self, task: Task) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (task.observation_size,))
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (task.action_size,))


class Explorer:
    """A learner that plays and learns an episode at a time.

    All its randomness is drawn from (seed, episode), so after an episode it saves only parameters
    and optimizer states; its replay is refilled from the stored episodes.

    Attributes:
      episodes: learned from so far; cpu_seconds: their CPU time, in all processes.
      replay: the episodes' decisions.
    """

    def __init__(self, reward: str, task: Task, seed: int, capacity: int, rate: int) -> None:
        """Draws the parameters.

        Args:
          reward: a name in REWARDS.
          capacity: the replay's size in decisions; rate: batches per decision.
        """
        torch.set_num_threads(1)  # one thread, for a fixed order of sums
        torch.manual_seed(seed)
        self.seed, self.rate = seed, rate
        self.episodes, self.cpu_seconds, self._since = 0, 0.0, time.process_time()
        self.intrinsic = REWARDS[reward](task.observation_size, task.action_size)
        self.learner = TD3(
            "MlpPolicy",
            _Spaces(task),
            learning_rate=LEARNING_RATE,
            buffer_size=capacity + 1,
            replay_buffer_class=IntrinsicReplay,
            replay_buffer_kwargs={"intrinsic": self.intrinsic, "handle_timeout_termination": False},
            policy_kwargs={"net_arch": [HIDDEN, HIDDEN]},
            seed=seed,
            device="cpu",
        )
        self.learner.set_logger(Logger(None, []))
        self.replay: Any = self.learner.replay_buffer

    def policy(self) -> Policy:
        """Returns the policy of the next episode."""
        generator = np.random.default_rng((self.seed, 1, self.episodes))
        size = self.learner.action_space.shape

        def unguided(state: Float[np.ndarray, " O"]) -> Float[np.ndarray, " A"]:
            return generator.uniform(-1, 1, size)

        def learned(state: Float[np.ndarray, " O"]) -> Float[np.ndarray, " A"]:
            with torch.no_grad():
                states = self.replay.normalized(torch.from_numpy(state).float()[None])
                action = self.learner.actor(states)[0].numpy()
            return action + generator.normal(0, NOISE, size)

        return unguided if self.episodes < UNGUIDED else learned

    def remember(self, decisions: Decisions, last_state: Float[np.ndarray, " O"]) -> None:
        """Adds an episode to the replay.

        Args:
          last_state: the state after the last decision.
        """
        after = np.concatenate([decisions.state[1:], last_state[None]])
        for step, action in enumerate(decisions.action):
            # Episodes only end by time, so the state after the last decision has a value too.
            self.replay.add(decisions.state[step], after[step], action, 0.0, False, [{}])

    def learn(self, decisions: int) -> None:
        """Takes the optimizer steps that follow an episode of this many decisions."""
        self.episodes += 1
        if self.episodes == UNGUIDED:
            self.replay.normalize_by_contents()
        if self.episodes >= UNGUIDED:
            seeds = np.random.SeedSequence((self.seed, 2, self.episodes)).generate_state(2)
            np.random.seed(int(seeds[0]))  # the library's source of randomness for batches
            torch.manual_seed(int(seeds[1]))
            self.learner.train(decisions * self.rate, BATCH)
            self.learner.policy.set_training_mode(False)
        now = time.process_time()
        self.cpu_seconds, self._since = self.cpu_seconds + now - self._since, now

    def save(self, path: Path) -> None:
        """Writes the state of the learner, durably."""
        state = {
            "episodes": self.episodes,
            "cpu_seconds": self.cpu_seconds,
            "updates": self.learner._n_updates,
            "learner": self.learner.get_parameters(),
            "intrinsic": self.intrinsic.state_dict(),
            "optimizer": self.replay.optimizer.state_dict(),
            "mean": self.replay.mean,
            "std": self.replay.std,
        }
        with replacing(path) as scratch:
            torch.save(state, scratch)

    def load(self, path: Path) -> None:
        """Reads what `save` wrote; the replay stays as it is.

        Raises:
          UserError: the file is damaged.
        """
        try:
            state = torch.load(path, weights_only=True)
            self.learner.set_parameters(state["learner"], device="cpu")
            self.intrinsic.load_state_dict(state["intrinsic"])
            self.replay.optimizer.load_state_dict(state["optimizer"])
        except (KeyError, RuntimeError, pickle.UnpicklingError, *DAMAGE):
            raise UserError(
                f"{path}: damaged; remove it, and the same command explores from the beginning"
            ) from None
        self.learner._n_updates = state["updates"]
        self.replay.mean, self.replay.std = state["mean"], state["std"]
        self.episodes, self.cpu_seconds = state["episodes"], state["cpu_seconds"]
