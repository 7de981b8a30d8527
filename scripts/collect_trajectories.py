"""Collects episodes with dm_control, from random to improving policies, in ExoRL's format.

    python -m scripts.collect_trajectories --task walker_walk --output trajectories/collected

A tenth of the episodes act at random, a tenth with Ornstein-Uhlenbeck noise, and the rest come from
an augmented random search (Mania et al., Simple random search of static linear policies is
competitive for reinforcement learning, Algorithm 2). All episodes are kept, so returns range from
nothing to a linear policy's best. --policy selects among the three, in the same proportions. With
--explorer, a learner that never sees the task's rewards plays instead.

After an interruption the same command continues and produces the same files; with a larger number
of episodes it adds to them. The number of episodes may leave the search's last iteration
unfinished.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from data.errors import UserError
from data.folders import exclusive, sync
from data.printable import console
from data.trajectories.collected import claim, describe, stored_episodes
from data.trajectories.episodes import SEARCH_STATE, episode_return, write_episode
from data.trajectories.play import Policy, play_episode
from data.trajectories.search import Search, SearchConfig
from data.trajectories.tasks import TASKS, get_task, make_environment
from trainer import entry
from trainer.options import AtLeastOne, AtLeastZero, command, option

ALGORITHMS = {"random": "random", "ou": "ou_noise", "search": "augmented_random_search"}
"""Policy -> its name in commands and folders. Seeds depend on the order of the entries."""
SHARES = {"random": 1, "ou": 1, "search": 8}
"""Policy -> its number of episodes out of ten."""
EXPLORERS = ("rnd", "icm_apt", "proto")
"""Explorers that learn, named like ExoRL's archives. Seeds depend on the order of the entries."""
UPDATES = 1  # optimizer steps of an explorer per decision
WORKERS = 2


@dataclasses.dataclass(frozen=True)
class EpisodeRequest:
    """One episode to collect.

    Attributes:
      policy: 'random', 'ou' or 'search'.
      index: the episode's number among its policy's episodes.
      weights: [A, O] of a linear policy on states normalized by `mean` and `std`; None for other
        policies.
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


def _policy(request: EpisodeRequest, size: int) -> Policy:
    """Returns the policy of a request, for actions of `size` numbers."""
    generator = np.random.default_rng((request.seed, 1))
    noise = np.zeros(size)

    def act(state: np.ndarray) -> np.ndarray:
        nonlocal noise
        if request.policy == "random":
            return generator.uniform(-1, 1, size)
        if request.policy == "ou":
            noise = 0.85 * noise + 0.4 * generator.normal(size=size)
            return noise
        return request.weights @ ((state - request.mean) / request.std)

    return act


def collect(request: EpisodeRequest) -> tuple[float, np.ndarray, np.ndarray, int]:
    """Plays one episode and writes it.

    Returns:
      The episode's return, and the sum, the sum of squares and the number of its states.
    """
    task = get_task(request.task)
    policy = _policy(request, task.action_size)
    episode = play_episode(task, request.seed, request.action_repeat, policy)
    write_episode(request.folder, "collected", request.index, episode)
    states = episode.observation[: -1 : request.action_repeat].astype(np.float64)
    return episode_return(episode.reward), states.sum(0), np.square(states).sum(0), len(states)


class Collection:
    """A task's collection: its folders, and which episodes they must contain.

    Attributes:
      counts: policy -> number of its episodes, for the collected policies.
      folders: policy -> the folder of its files.
    """

    def __init__(self, args: Options) -> None:
        """Creates the folders, or checks that they were created with the same options.

        Raises:
          UserError: they were created with other options.
        """
        self.args, self.task = args, get_task(args.task)
        self.search_config = SearchConfig(paired=args.paired)
        policies = [policy for policy, name in ALGORITHMS.items() if name in args.policy]
        if args.explorer == "random":
            policies = ["random"]
        self.counts = episode_counts(args.episodes, policies)
        # Tasks of one domain share its folder, but each has separate folders per algorithm.
        domain = Path(args.output) / self.task.domain
        self.folders = {
            policy: domain / (args.explorer or f"{ALGORITHMS[policy]}_{self.task.task}") / "buffer"
            for policy in self.counts
        }
        for policy, folder in self.folders.items():
            folder.mkdir(parents=True, exist_ok=True)
            claim(folder.parent / "collected.json", self._description(policy))

    def _description(self, policy: str) -> dict[str, Any]:
        search = {"search": dataclasses.asdict(self.search_config)} if policy == "search" else {}
        return {
            **describe(self.task, self.args.seed, self.args.action_repeat),
            "episodes": {policy: self.counts[policy]},
            **search,
        }

    def request(self, policy: str, index: int, **linear: Any) -> EpisodeRequest:
        """Returns the request for an episode."""
        start = index - index % 2 if policy == "search" and self.search_config.paired else index
        return EpisodeRequest(
            self.task.name,
            policy,
            index,
            _seed(self.args.seed, policy, start),
            self.args.action_repeat,
            self.folders[policy],
            **linear,
        )

    def collect_unguided(self, executor: Executor, on_episode: Callable[[int], object]) -> None:
        """Collects the missing episodes of policies that do not learn."""
        requests = [
            self.request(policy, index)
            for policy in self.folders
            if policy != "search"
            for index in range(self.counts[policy])
        ]
        missing = [
            request
            for request in requests
            if not list(request.folder.glob(f"collected_{request.index}_*.npz"))
        ]
        on_episode(len(requests) - len(missing))
        for finished in as_completed([executor.submit(collect, request) for request in missing]):
            finished.result()
            on_episode(1)

    def collect_search(
        self,
        executor: Executor,
        on_episode: Callable[[int], object],
        on_iteration: Callable[[str], object],
    ) -> None:
        """Plays the search's missing iterations, including a final incomplete one.

        Raises:
          UserError: an earlier iteration's episode is missing; its policy is no longer known.
        """
        folder, size = self.folders["search"], self.search_config.episodes
        search = Search(
            self.search_config,
            (self.task.action_size, self.task.observation_size),
            self.args.seed,
            folder.parent / SEARCH_STATE,
        )
        stored_episodes(folder, search.iteration * size, search.path)
        iterations, rest = divmod(self.counts["search"], size)
        on_episode(min(search.iteration * size, self.counts["search"]))
        while search.iteration < iterations:
            results = []
            for result in executor.map(collect, self._search_requests(search)):
                results.append(result)
                on_episode(1)
            returns = np.array([result[0] for result in results])
            # Episodes must be durable before the search's state, which then forgets their policies.
            sync(folder)
            search.update(returns, [result[1:] for result in results])
            on_iteration(
                f"search {search.iteration} of {iterations}: returns {returns.min():.1f} to "
                f"{returns.max():.1f}, mean {returns.mean():.1f}"
            )
        if search.iteration == iterations:
            # Nothing is learned from part of an iteration; with more episodes it is replayed
            # identically.
            for _ in executor.map(collect, self._search_requests(search)[:rest]):
                on_episode(1)

    def _search_requests(self, search: Search) -> list[EpisodeRequest]:
        """Returns the next iteration's requests: each direction added to and subtracted from the
        policy."""
        policies = [
            search.weights + sign * self.search_config.noise * direction
            for direction in search.directions()
            for sign in (1, -1)
        ]
        first = search.iteration * self.search_config.episodes
        return [
            self.request("search", first + index, weights=weights, mean=search.mean, std=search.std)
            for index, weights in enumerate(policies)
        ]


def episode_counts(episodes: int, policies: Sequence[str]) -> dict[str, int]:
    """Returns the number of episodes of each policy that gets any.

    The policies take turns in proportion to their SHARES, so a larger total never means fewer
    episodes of any policy.
    """
    turns = [policy for policy in policies for _ in range(SHARES[policy])]
    return dict(collections.Counter(turns[number % len(turns)] for number in range(episodes)))


def run(args: Options) -> None:
    """Collects the missing episodes.

    Raises:
      UserError: the folder was created with other options, another process is collecting into it,
        or a worker was killed.
    """
    task = get_task(args.task)
    _refuse_unused(args)
    if args.action_repeat > task.episode_steps:
        raise UserError(
            f"--action-repeat: found {args.action_repeat}, but an episode of {task.name} has "
            f"{task.episode_steps} steps"
        )
    make_environment(task, 0)  # this process reports a missing simulator
    domain = Path(args.output) / task.domain
    domain.mkdir(parents=True, exist_ok=True)
    with exclusive(domain / f".{task.name}.lock", f"collects {task.name} into it"):
        if args.explorer in EXPLORERS:
            explore(args)
            return
        collection = Collection(args)
        total = sum(collection.counts.values())
        with (
            _workers(args.workers or WORKERS) as executor,
            Progress(console=console(), transient=False) as progress,
        ):
            bar = progress.add_task(f"collecting {task.name}", total=total)
            on_episode = functools.partial(progress.advance, bar)
            collection.collect_unguided(executor, on_episode)
            if "search" in collection.folders:
                collection.collect_search(
                    executor, on_episode, functools.partial(progress.console.print, highlight=False)
                )
    print(f"{task.name}: {total} episodes below {domain}")


def _refuse_unused(args: Options) -> None:
    """Raises UserError if an option has no effect in combination with the others."""
    learns = args.explorer in EXPLORERS
    for name, is_set, is_read in (
        ("policy", args.policy != tuple(ALGORITHMS.values()), args.explorer is None),
        ("paired", args.paired, args.explorer is None),
        ("workers", args.workers is not None, not learns),
        ("updates", args.updates is not None, learns),
    ):
        if is_set and not is_read:
            explorer = f"--explorer {args.explorer}" if args.explorer else "no --explorer"
            raise UserError(f"--{name}: has no effect with {explorer}; leave it out")


@contextlib.contextmanager
def _workers(count: int) -> Iterator[Executor]:
    """Yields processes that play episodes; after an error they only finish the current ones.

    Raises:
      UserError: one of the processes was killed.
    """
    executor = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin_worker)
    try:
        yield executor
    except BrokenProcessPool:
        raise UserError(
            "a process that played an episode was killed, perhaps out of memory; repeat the "
            "command to continue, with fewer --workers to use less"
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    """Leaves Ctrl-C to the main process; this process ends when that one does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent():
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _seed(seed: int, policy: str, index: int) -> int:
    """Returns the seed of an episode."""
    names = [*ALGORITHMS, *EXPLORERS]
    return int(np.random.SeedSequence((seed, names.index(policy), index)).generate_state(1)[0])


def explore(args: Options) -> None:
    """Collects the missing episodes of an explorer that learns, in this process.

    Raises:
      UserError: its learner is not installed, its state is damaged, or an episode is missing.
    """
    try:
        from data.trajectories.exploration import Exploration
    except ImportError:
        raise UserError(
            f"--explorer {args.explorer}: the learner is missing: make install EXTRAS=rl installs "
            "stable-baselines3"
        ) from None
    assert args.explorer is not None
    exploration = Exploration(
        args.explorer,
        get_task(args.task),
        Path(args.output),
        episodes=args.episodes,
        action_repeat=args.action_repeat,
        updates=args.updates or UPDATES,
        seed=args.seed,
    )
    with Progress(console=console(), transient=False) as progress:
        name = f"exploring {exploration.task.domain} by {args.explorer}"
        bar = progress.add_task(name, total=args.episodes)
        exploration.run(
            functools.partial(_seed, args.seed, args.explorer),
            functools.partial(progress.advance, bar),
            functools.partial(progress.console.print, highlight=False),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    task: str = option(f"one of {', '.join(TASKS)}")
    output: str = option("folder for {domain}/{algorithm}/buffer/*.npz")
    episodes: AtLeastOne = option("number of episodes; a larger number adds to the folder", 400)
    policy: tuple[str, ...] = option(
        "policies to collect (default: all, in the proportion 1 : 1 : 8)",
        tuple(ALGORITHMS.values()),
        choices=tuple(ALGORITHMS.values()),
    )
    explorer: str | None = option(
        "explore without a task instead, like ExoRL's archive of this name: with a learner "
        "rewarded only for novelty, or at random",
        None,
        choices=("random", *EXPLORERS),
    )
    updates: AtLeastOne | None = option(
        f"optimizer steps per decision of an --explorer that learns (default {UPDATES})", None
    )
    paired: bool = option(
        "start both episodes of a search direction from the same state, so that only their "
        "policies differ; cannot change within a folder"
    )
    action_repeat: AtLeastOne = option("simulator steps per action; every step is recorded", 5)
    workers: AtLeastOne | None = option(
        f"worker processes (default {WORKERS}); an --explorer that learns uses one process", None
    )
    seed: AtLeastZero = option("seed of the episodes", 0)


main = command(Options, run)


if __name__ == "__main__":
    entry.leave(main())
