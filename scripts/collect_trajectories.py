"""Collects episodes with dm_control, from random actions to an improving policy, in the form of ExoRL's files.

    python -m scripts.collect_trajectories --task walker_walk --output trajectories/collected [--episodes 400]

A tenth of the episodes acts at random, a tenth by Ornstein-Uhlenbeck noise, and the others are those of an augmented random
search (Mania et al., Simple random search of static linear policies is competitive for reinforcement learning, Algorithm 2),
every one of them kept, so that returns spread from nothing to what a linear policy reaches. Stopped at any moment, the same
command goes on and ends with the same files.
"""
from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from rich.progress import Progress

from data.errors import UserError
from data.trajectories.episodes import Episode, episode_return, write_episode
from data.trajectories.tasks import TASKS, flatten_observation, get_task, make_environment, physics_state
from trainer import entry

ALGORITHMS = {"random": "random", "ou": "ou_noise", "search": "augmented_random_search"}
"""Policy -> the folder of its episodes."""


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """Augmented random search: directions tried in an iteration, the best ones that are followed, the length of a step, and how
    far from the policy is tried."""

    directions: int = 16
    best: int = 8
    step: float = 0.1
    noise: float = 0.1


@dataclasses.dataclass(frozen=True)
class Order:
    """One episode to collect.

    Attributes:
      policy: 'random', 'ou' or 'search'; index: the episode's number among its policy's.
      weights: [A, O] of a linear policy on states less `mean` and divided by `std`; None for the other policies.
    """

    task: str
    policy: str
    index: int
    seed: int
    action_repeat: int
    folder: Path
    weights: Any = None
    mean: Any = None
    std: Any = None


@functools.cache
def _environment(task: str) -> Any:
    return make_environment(get_task(task), seed=0)


def _reseed(environment: Any, seed: int) -> None:
    """Makes the environment's next reset depend on the seed alone."""
    random = environment.task.random if hasattr(environment.task, "random") else environment.random_state
    random.seed(seed)


def _actions(order: Order, size: int) -> Iterator[Any]:
    """Receives states and yields actions in -1 .. 1."""
    generator = np.random.default_rng((order.seed, 1))
    noise = np.zeros(size)
    state = yield np.zeros(size)
    while True:
        if order.policy == "random":
            action = generator.uniform(-1, 1, size)
        elif order.policy == "ou":
            noise = 0.85 * noise + 0.4 * generator.normal(size=size)
            action = noise
        else:
            action = order.weights @ ((state - order.mean) / order.std)
        state = yield np.clip(action, -1, 1).astype(np.float32)


def collect(order: Order) -> tuple[float, np.ndarray, np.ndarray, int]:
    """Plays one episode and writes it.

    Returns:
      Its return; the sum, the sum of squares and the number of the states that were acted in, for their statistics.
    """
    task, environment = get_task(order.task), _environment(order.task)
    _reseed(environment, order.seed)
    time_step = environment.reset()
    policy = _actions(order, task.action_size)
    next(policy)
    rows = [(flatten_observation(time_step.observation), np.zeros(task.action_size, np.float32), 0.0, 1.0,
             physics_state(environment))]
    acted_in = []
    for step in range(task.episode_steps):
        if step % order.action_repeat == 0:
            acted_in.append(rows[-1][0].astype(np.float64))
            action = policy.send(acted_in[-1])
        time_step = environment.step(action)
        rows.append((flatten_observation(time_step.observation), action, time_step.reward or 0.0,
                     1.0 if time_step.discount is None else time_step.discount, physics_state(environment)))
    observation, actions, reward, discount, physics = zip(*rows, strict=True)
    episode = Episode(np.stack(observation), np.stack(actions), np.array(reward, np.float32), np.array(discount, np.float32),
                      np.stack(physics))
    write_episode(order.folder, "collected", order.index, episode)
    states = np.stack(acted_in)
    return episode_return(episode.reward), states.sum(0), np.square(states).sum(0), len(states)


class Search:
    """Augmented random search over linear policies, with the statistics of all states seen.

    Its state is saved after each iteration; an iteration that was interrupted is played again, with the same seeds.
    """

    def __init__(self, config: SearchConfig, shape: tuple[int, int], seed: int, path: Path) -> None:
        self.config, self.seed, self.path = config, seed, path
        self.iteration = 0
        self.weights = np.zeros(shape)
        self.sums = np.zeros((2, shape[1]))
        self.count = 0
        if path.exists():
            with np.load(path) as stored:
                self.iteration, self.count = int(stored["iteration"]), int(stored["count"])
                self.weights, self.sums = stored["weights"], stored["sums"]

    @property
    def mean(self) -> Float[np.ndarray, " O"]:
        """The mean of all states seen; 0 before the first."""
        return self.sums[0] / max(self.count, 1)

    @property
    def std(self) -> Float[np.ndarray, " O"]:
        """The deviation of all states seen; 1 before the first, and for what hardly changes."""
        variance = self.sums[1] / max(self.count, 1) - np.square(self.mean)
        return np.where(variance > 1e-6, np.sqrt(np.maximum(variance, 1e-6)), 1.0)

    def directions(self) -> Float[np.ndarray, "n A O"]:
        """Returns the iteration's directions."""
        generator = np.random.default_rng((self.seed, 2, self.iteration))
        return generator.normal(size=(self.config.directions, *self.weights.shape))

    def update(self, returns: Float[np.ndarray, " 2n"], states: Sequence[tuple[np.ndarray, np.ndarray, int]]) -> None:
        """Follows the best directions (Algorithm 2, lines 6 and 7), and saves the state.

        Args:
          returns: of the policies on both sides of each direction, in turn.
        """
        pairs = returns.reshape(-1, 2)
        best = np.argsort(-pairs.max(1), kind="stable")[:self.config.best]
        spread = max(float(pairs[best].std()), 1e-6)
        gradient = np.tensordot(pairs[best, 0] - pairs[best, 1], self.directions()[best], 1)
        self.weights = self.weights + self.config.step / (self.config.best * spread) * gradient
        for total, squares, count in states:
            self.sums = self.sums + np.stack([total, squares])
            self.count += count
        self.iteration += 1
        partial = self.path.with_suffix(".part.npz")
        np.savez(partial, iteration=self.iteration, count=self.count, weights=self.weights, sums=self.sums)
        os.replace(partial, self.path)


def run(args: argparse.Namespace) -> None:
    """Collects what is missing."""
    task = get_task(args.task)
    make_environment(task, 0)  # a missing simulator is reported by this process
    # Tasks of one body share its folder, but have algorithms' folders of their own.
    folders = {policy: Path(args.output).expanduser() / task.domain / f"{name}_{task.task}" / "buffer"
               for policy, name in ALGORITHMS.items()}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    search_config = SearchConfig()
    per_iteration = 2 * search_config.directions
    others = max(1, args.episodes // 10)
    iterations = max(1, -(-(args.episodes - 2 * others) // per_iteration))
    about = {"collected with": "dm_control", "task": task.name, "seed": args.seed, "action_repeat": args.action_repeat,
             "episodes": {"random": others, "ou": others, "search": iterations * per_iteration},
             "search": dataclasses.asdict(search_config),
             "versions": {name: importlib.metadata.version(name) for name in ("dm_control", "mujoco", "numpy")}}
    for folder in folders.values():
        _claim(folder.parent / "collected.json", about)
    search = Search(search_config, (task.action_size, task.observation_size), args.seed,
                    folders["search"].parent / "search.npz")
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.workers) as pool, Progress(transient=False) as progress:
        bar = progress.add_task(f"collecting {task.name}", total=2 * others + iterations * per_iteration)
        orders = [Order(task.name, policy, index, _seed(args.seed, policy, index), args.action_repeat, folders[policy])
                  for policy in ("random", "ou") for index in range(others)]
        missing = [order for order in orders if not list(order.folder.glob(f"collected_{order.index}_*.npz"))]
        progress.advance(bar, len(orders) - len(missing))
        for _ in pool.imap_unordered(collect, missing):
            progress.advance(bar)
        progress.advance(bar, search.iteration * per_iteration)
        while search.iteration < iterations:
            first = search.iteration * per_iteration
            policies = [search.weights + sign * search_config.noise * direction
                        for direction in search.directions() for sign in (1, -1)]
            orders = [Order(task.name, "search", first + i, _seed(args.seed, "search", first + i), args.action_repeat,
                            folders["search"], weights, search.mean, search.std) for i, weights in enumerate(policies)]
            results = []
            for result in pool.imap(collect, orders):
                results.append(result)
                progress.advance(bar)
            returns = np.array([result[0] for result in results])
            search.update(returns, [result[1:] for result in results])
            progress.console.print(f"search {search.iteration} of {iterations}: returns {returns.min():.1f} to "
                                   f"{returns.max():.1f}, mean {returns.mean():.1f}")
    print(f"{task.name}: {2 * others + iterations * per_iteration} episodes below {Path(args.output) / task.domain}")


def _seed(seed: int, policy: str, index: int) -> int:
    """Returns the seed of an episode."""
    return int(np.random.SeedSequence((seed, list(ALGORITHMS).index(policy), index)).generate_state(1)[0])


def _claim(path: Path, about: dict[str, Any]) -> None:
    """Writes what is collected, or compares with what the folder's collection was begun with.

    Raises:
      UserError: it was begun with other options.
    """
    if path.exists():
        begun = json.loads(path.read_text(encoding="utf-8"))
        different = [name for name in about if begun.get(name) != about[name]]
        if different:
            raise UserError(f"{path}: was begun with {different[0]} {begun.get(different[0])}, now {about[different[0]]}; the "
                            "same options, or another --output, would work")
    else:
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.collect_trajectories", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--task", required=True, help=f"out of {', '.join(TASKS)}")
    parser.add_argument("--output", required=True, help="folder, which gets {domain}/{algorithm}/buffer/*.npz")
    parser.add_argument("--episodes", type=entry.at_least_one, default=400, help="about how many (default 400)")
    parser.add_argument("--action-repeat", type=entry.at_least_one, default=5,
                        help="simulator steps that an action is held for (default 5); every step is recorded")
    parser.add_argument("--workers", type=entry.at_least_one, default=2, help="processes (default 2)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    return entry.run(lambda: run(args))


if __name__ == "__main__":
    entry.leave(main())
