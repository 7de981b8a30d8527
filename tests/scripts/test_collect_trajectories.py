"""Collecting episodes: each is a function of its seed, the search improves, and what was stopped ends with the same files."""
import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from data.errors import UserError
from data.trajectories.episodes import episode_return, read_episode
from data.trajectories.tasks import get_task, relabel
from scripts.collect_trajectories import Order, Search, SearchConfig, _claim, collect

TASK = get_task("cartpole_swingup")


def hashes(folder):
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*.npz")}


def test_an_episode_is_a_function_of_its_seed(tmp_path):
    """Also when another was played before in the same process."""
    returns = []
    for name, seeds in (("a", (5,)), ("b", (6, 5))):
        (tmp_path / name).mkdir()
        returns += [collect(Order(TASK.name, "random", 0, seed, 5, tmp_path / name))[0] for seed in seeds]
    first, second = (read_episode(tmp_path / name / "collected_0_1000.npz", TASK) for name in ("a", "b"))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
    assert returns[0] == returns[2] == episode_return(first.reward) != returns[1]
    assert (first.action[1:].reshape(-1, 5) == first.action[1::5]).all(), "held for five steps"
    np.testing.assert_array_equal(relabel(TASK, first.physics, first.action), first.reward * (np.arange(1001) > 0))


def test_the_search_climbs(tmp_path):
    """On a made-up return that is the policy's closeness to a given one."""
    best = np.linspace(-1, 1, 6).reshape(2, 3)
    search = Search(SearchConfig(directions=8, best=4, step=0.1, noise=0.1), best.shape, 0, tmp_path / "search.npz")
    start = np.square(search.weights - best).sum()
    states = [(np.zeros(3), np.ones(3), 10)]
    for _ in range(60):
        policies = [search.weights + sign * 0.1 * direction for direction in search.directions() for sign in (1, -1)]
        search.update(np.array([-np.square(policy - best).sum() for policy in policies]), states)
    assert np.square(search.weights - best).sum() < 0.1 * start


def test_the_search_goes_on_where_it_was(tmp_path):
    def search():
        return Search(SearchConfig(directions=2, best=1), (1, 3), 7, tmp_path / "search.npz")

    first = search()
    first.update(np.array([1.0, 2.0, 3.0, 5.0]), [(np.ones(3), np.full(3, 4.0), 2)])
    again = search()
    assert again.iteration == 1
    np.testing.assert_array_equal(again.weights, first.weights)
    np.testing.assert_array_equal(again.std, first.std)
    np.testing.assert_array_equal(again.directions(), first.directions())


def test_statistics_are_those_of_all_states(tmp_path):
    states = np.random.default_rng(0).normal(3, 2, size=(50, 4))
    search = Search(SearchConfig(directions=1, best=1), (1, 4), 0, tmp_path / "search.npz")
    search.update(np.array([1.0, 2.0]), [(part.sum(0), np.square(part).sum(0), len(part)) for part in np.split(states, 2)])
    np.testing.assert_allclose(search.mean, states.mean(0), rtol=1e-12)
    np.testing.assert_allclose(search.std, states.std(0), rtol=1e-10)


def test_another_collection_in_the_folder_is_named(tmp_path):
    _claim(tmp_path / "collected.json", {"seed": 0, "task": TASK.name})
    _claim(tmp_path / "collected.json", {"seed": 0, "task": TASK.name})
    with pytest.raises(UserError, match="was begun with seed 0, now 1"):
        _claim(tmp_path / "collected.json", {"seed": 1, "task": TASK.name})


@pytest.mark.slow
def test_killed_and_started_again_it_ends_with_the_same_files(repository, tmp_path):
    def command(folder):
        return [sys.executable, "-m", "scripts.collect_trajectories", "--task", TASK.name, "--output", str(tmp_path / folder),
                "--episodes", "80"]

    subprocess.run(command("whole"), cwd=repository, check=True)
    for seconds in (4, 9, 14):
        process = subprocess.Popen(command("killed"), cwd=repository, start_new_session=True)
        time.sleep(seconds)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run(command("killed"), cwd=repository, check=True)
    assert hashes(tmp_path / "whole") == hashes(tmp_path / "killed")
    about = json.loads((tmp_path / "whole/cartpole/augmented_random_search_swingup/collected.json").read_text())
    assert about["collected with"] == "dm_control" and about["task"] == TASK.name
