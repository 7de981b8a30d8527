"""Collects an explorer's episodes into a folder, and resumes after an interruption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from .collected import claim, describe, record, stored_episodes
from .episodes import Episode, episode_return, read_episode, write_episode
from .explorer import Explorer
from .play import play_episode
from .rows import decisions
from .tasks import Task

REPORTED = 50  # episodes between two printed lines


class Exploration:
    """A folder of an explorer's episodes, {domain}/{explorer}, and the explorer.

    Attributes:
      buffer: the folder of the files; state: the file of the explorer's state.
    """

    def __init__(
        self,
        name: str,
        task: Task,
        output: Path,
        *,
        episodes: int,
        action_repeat: int,
        updates: int,
        seed: int,
    ) -> None:
        """Makes the folder, or reads its contents.

        Args:
          name: the explorer's; task: gives the files' rewards, which the explorer never sees.
          updates: optimizer steps per decision.

        Raises:
          UserError: the folder was begun with other options, the state is damaged, or an episode is
            missing.
        """
        self.task, self.episodes, self.action_repeat = task, episodes, action_repeat
        self.buffer = output / task.domain / name / "buffer"
        self.buffer.mkdir(parents=True, exist_ok=True)
        self.about = self.buffer.parent / "collected.json"
        self.state = self.buffer.parent / "explorer.pt"
        learner = {"learner": "TD3", "updates_per_decision": updates}
        description = describe(task, seed, action_repeat, ("stable_baselines3", "torch"))
        claim(self.about, description | learner | {"episodes": {name: episodes}})
        self.decisions = task.episode_steps // action_repeat
        self.explorer = Explorer(name, task, seed, episodes * self.decisions, updates)
        if self.state.exists():
            self.explorer.load(self.state)
        for file in stored_episodes(self.buffer, self.explorer.episodes, self.state):
            self._remember(read_episode(file, task))

    def run(
        self,
        seed_of: Callable[[int], int],
        on_episodes: Callable[[int], object],
        on_report: Callable[[str], object],
    ) -> None:
        """Plays and learns the missing episodes.

        Args:
          seed_of: an episode's number to its seed.
          on_episodes: called with the number of new episodes; on_report: with a line, every
            REPORTED episodes and at the end.
        """
        explorer, returns = self.explorer, []
        on_episodes(explorer.episodes)
        while explorer.episodes < self.episodes:
            number = explorer.episodes
            policy = explorer.policy()
            episode = play_episode(self.task, seed_of(number), self.action_repeat, policy)
            write_episode(self.buffer, "collected", number, episode)
            self._remember(episode)
            explorer.learn(self.decisions)
            explorer.save(self.state)
            returns.append(episode_return(episode.reward))
            on_episodes(1)
            if explorer.episodes % REPORTED == 0 or explorer.episodes == self.episodes:
                on_report(self._report(returns))
                returns.clear()
        hours = explorer.cpu_seconds / 3600
        record(self.about, cpu_hours=round(hours, 3))
        on_report(
            f"{self.task.domain}: {explorer.episodes} episodes below {self.buffer.parent}, "
            f"{hours:.2f} CPU hours"
        )

    def _remember(self, episode: Episode) -> None:
        made = decisions(episode, self.action_repeat)
        self.explorer.remember(made, episode.observation[len(made.reward) * self.action_repeat])

    def _report(self, returns: list[float]) -> str:
        """Returns the line on the last episodes, of these returns."""
        explorer = self.explorer
        return (
            f"episode {explorer.episodes}: returns of {self.task.name} {min(returns):.1f} to "
            f"{max(returns):.1f}, mean {np.mean(returns):.1f}; intrinsic reward "
            f"{explorer.replay.mean_reward:.3f}; {explorer.cpu_seconds / 3600:.2f} CPU hours"
        )
