"""Collecting episodes: each depends only on its seed, the search improves, and an interrupted
collection ends with the same files."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from data.trajectories.episodes import episode_return, read_episode
from data.trajectories.search import Search, SearchConfig
from data.trajectories.tasks import TASKS, get_task, relabel
from scripts import collect_trajectories
from scripts.collect_trajectories import EXPLORERS, EpisodeRequest, collect

TASK = get_task("cartpole_swingup")


def hashes(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*.npz")
    }


def test_an_episode_depends_only_on_its_seed(tmp_path):
    """Also when another was played before in the same process."""
    returns = []
    for name, seeds in (("a", (5,)), ("b", (6, 5))):
        (tmp_path / name).mkdir()
        returns += [
            collect(EpisodeRequest(TASK.name, "random", 0, seed, 5, tmp_path / name))[0]
            for seed in seeds
        ]
    first, second = (
        read_episode(tmp_path / name / "collected_0_1000.npz", TASK) for name in ("a", "b")
    )
    for array, again in zip(first, second, strict=True):
        np.testing.assert_array_equal(array, again)
    assert returns[0] == returns[2] == episode_return(first.reward) != returns[1]
    assert (first.action[1:].reshape(-1, 5) == first.action[1::5]).all(), "held for five steps"
    np.testing.assert_array_equal(
        relabel(TASK, first.physics, first.action), first.reward * (np.arange(1001) > 0)
    )


class ThisProcess(Executor):
    """Plays episodes immediately, in the test's process."""

    def submit(self, work, request):
        future = Future()
        future.set_result(work(request))
        return future


@pytest.fixture
def collected(monkeypatch):
    """Collects into a folder with 4 episodes per search iteration, as the command does, but in this
    process."""
    monkeypatch.setattr(
        collect_trajectories, "SearchConfig", functools.partial(SearchConfig, directions=2, best=1)
    )
    monkeypatch.setattr(
        collect_trajectories, "_workers", lambda count: contextlib.nullcontext(ThisProcess())
    )
    # Shorter episodes, to save time.
    short = dataclasses.replace(TASK, episode_steps=50)
    monkeypatch.setitem(TASKS, TASK.name, short)

    def collect_into(folder, *options):
        status = collect_trajectories.main(["--task", TASK.name, "--output", str(folder), *options])
        return hashes(folder) if status == 0 else status

    return collect_into


def test_a_larger_number_of_episodes_adds_to_a_folder(collected, tmp_path):
    few = collected(tmp_path / "grown", "--episodes", "10")
    grown = collected(tmp_path / "grown", "--episodes", "30")
    assert len(few) == 1 + 1 + 8 + 1 and len(grown) == 3 + 3 + 24 + 1, (
        "random, noise, search and its state"
    )
    assert all(grown[name] == few[name] for name in few if "search.npz" not in name)
    assert collected(tmp_path / "whole", "--episodes", "30") == grown
    assert collected(tmp_path / "grown", "--episodes", "10") == grown, (
        "a smaller number changes nothing"
    )
    record = json.loads((tmp_path / "grown/cartpole/random_swingup/collected.json").read_text())
    assert record["episodes"] == {"random": 3} and record["task"] == TASK.name


def test_the_requested_number_of_episodes_is_collected(collected, tmp_path):
    """Also if they end within a search iteration (of 4 episodes here), which is finished when more
    are requested."""
    few = collected(tmp_path / "grown", "--episodes", "8")
    assert len(few) == 1 + 1 + 6 + 1, "random, noise, search and its state"
    grown = collected(tmp_path / "grown", "--episodes", "17")
    assert sum("collected_" in name for name in grown) == 17 and few.items() - grown.items() <= {
        (name, few[name]) for name in few if "search.npz" in name
    }
    assert collected(tmp_path / "whole", "--episodes", "17") == grown
    assert sum("collected_" in name for name in collected(tmp_path / "one", "--episodes", "1")) == 1


def test_policies_collected_separately_are_the_same(collected, tmp_path):
    everything = collected(tmp_path / "all", "--episodes", "20")
    assert collected(tmp_path / "parts", "--episodes", "2", "--policy", "random").keys() == {
        f"cartpole/random_swingup/buffer/collected_{index}_50.npz" for index in range(2)
    }
    collected(
        tmp_path / "parts", "--episodes", "18", "--policy", "ou_noise", "augmented_random_search"
    )
    assert collected(tmp_path / "parts", "--episodes", "20") == everything


def test_pairs_start_from_the_same_state(collected, tmp_path):
    starts = {}
    for name, options in (("paired", ["--paired"]), ("apart", [])):
        collected(tmp_path / name, "--episodes", "10", *options)
        files = [
            next(tmp_path.glob(f"{name}/cartpole/augmented*/buffer/collected_{index}_*.npz"))
            for index in range(8)
        ]
        starts[name] = [read_episode(file, TASK).physics[0] for file in files]
    for index in range(0, 8, 2):
        assert (starts["paired"][index] == starts["paired"][index + 1]).all()
        assert (starts["apart"][index] != starts["apart"][index + 1]).any()
    assert (starts["paired"][0] != starts["paired"][2]).any()


def test_other_options_and_missing_episodes_are_named(collected, tmp_path, capsys):
    collected(tmp_path, "--episodes", "10")
    for options, message in (
        (["--seed", "1"], "was begun with seed 0, now 1; the same options"),
        (["--paired"], "'paired': True}; the same options"),
        (["--action-repeat", "2"], "action_repeat 5, now 2"),
    ):
        assert collected(tmp_path, "--episodes", "10", *options) == 2
        assert message in capsys.readouterr().err
    state = next(tmp_path.glob("cartpole/augmented*/search.npz"))
    whole = state.read_bytes()
    state.write_bytes(whole[:100])
    assert (
        collected(tmp_path, "--episodes", "10") == 2
        and "search.npz: damaged; remove it" in capsys.readouterr().err
    )
    state.write_bytes(whole)
    next(tmp_path.glob("cartpole/augmented*/buffer/collected_5_*")).unlink()
    assert collected(tmp_path, "--episodes", "10") == 2
    assert "episode 5 is missing, and 0 more; remove" in capsys.readouterr().err
    for content, problem in (("{", "is not JSON"), ("[]", "does not list episodes")):
        (tmp_path / "cartpole/random_swingup/collected.json").write_text(content)
        assert collected(tmp_path, "--episodes", "10") == 2
        assert f"collected.json: {problem}" in capsys.readouterr().err


@pytest.mark.parametrize("explorer", EXPLORERS)
def test_an_explorer_resumes_where_it_was(explorer, collected, tmp_path, capsys):
    """Episodes, parameters and optimizers are bitwise equal; the folders are ExoRL's."""
    options = ["--explorer", explorer, "--episodes"]
    few = collected(tmp_path / "grown", *options, "11")
    assert few.keys() == {f"cartpole/{explorer}/buffer/collected_{i}_50.npz" for i in range(11)}
    grown = collected(tmp_path / "grown", *options, "14")
    assert few.items() <= grown.items() and len(grown) == 14
    assert collected(tmp_path / "whole", *options, "14") == grown
    states = [
        torch.load(tmp_path / name / f"cartpole/{explorer}/explorer.pt")
        for name in ("grown", "whole")
    ]
    assert states[0].pop("cpu_seconds") > 0 and states[1].pop("cpu_seconds") > 0
    assert states[0]["updates"] == 5 * 10, "one for each decision from the tenth episode on"
    torch.testing.assert_close(*states, rtol=0, atol=0)
    record = json.loads((tmp_path / f"whole/cartpole/{explorer}/collected.json").read_text())
    assert record["episodes"] == {explorer: 14} and record["cpu_hours"] >= 0
    assert "CPU hours" in capsys.readouterr().out


def test_an_explorer_does_not_see_the_rewards(collected, tmp_path, monkeypatch):
    options = ["--explorer", "rnd", "--episodes", "13"]
    collected(tmp_path / "a", *options)
    monkeypatch.setattr(
        "dm_control.suite.cartpole.Balance.get_reward",
        lambda task, physics: physics.cart_position(),
    )
    collected(tmp_path / "b", *options)
    name = "cartpole/rnd/buffer/collected_12_50.npz"
    a, b = (read_episode(tmp_path / folder / name, TASK) for folder in "ab")
    np.testing.assert_array_equal(a.action, b.action)
    assert (a.reward[1:] != b.reward[1:]).any()


def test_options_without_effect_and_a_damaged_explorer_are_named(collected, tmp_path, capsys):
    for options, name in (
        (["--explorer", "rnd", "--workers", "1"], "workers"),
        (["--explorer", "random", "--paired"], "paired"),
        (["--explorer", "random", "--updates", "2"], "updates"),
        (["--policy", "random", "--updates", "1"], "updates"),
    ):
        assert collected(tmp_path, *options) == 2
        assert f"--{name}: has no effect with " in capsys.readouterr().err
    assert collected(tmp_path, "--action-repeat", "51") == 2
    assert (
        "--action-repeat: found 51, but an episode of cartpole_swingup has 50 steps"
        in capsys.readouterr().err
    )
    random = collected(tmp_path, "--explorer", "random", "--episodes", "3")
    assert random.keys() == {f"cartpole/random/buffer/collected_{i}_50.npz" for i in range(3)}
    collected(tmp_path, "--explorer", "rnd", "--episodes", "2")
    assert collected(tmp_path, "--explorer", "rnd", "--episodes", "3", "--updates", "2") == 2
    assert "was begun with updates_per_decision 1, now 2" in capsys.readouterr().err
    (tmp_path / "cartpole/rnd/buffer/collected_1_50.npz").unlink()
    assert collected(tmp_path, "--explorer", "rnd", "--episodes", "3") == 2
    assert "episode 1 is missing" in capsys.readouterr().err
    state = tmp_path / "cartpole/rnd/explorer.pt"
    state.write_bytes(state.read_bytes()[:1000])
    assert collected(tmp_path, "--explorer", "rnd", "--episodes", "3") == 2
    assert "explorer.pt: damaged; remove it" in capsys.readouterr().err


def test_a_learned_policy_replayed_from_its_seed_gives_the_same_return(tmp_path):
    """Bitwise in every state, both in a new process and in one that has played other episodes."""
    task = get_task("walker_walk")
    weights = np.random.default_rng(3).normal(size=(task.action_size, task.observation_size))
    search = Search(SearchConfig(directions=1, best=1), weights.shape, 0, tmp_path / "search.npz")
    search.update(
        np.array([2.0, 1.0]), [(np.ones(weights.shape[1]), np.full(weights.shape[1], 4.0), 7)]
    )
    requests = [
        EpisodeRequest(
            task.name, "search", number, 11, 5, tmp_path, search.weights, search.mean, search.std
        )
        for number in range(3)
    ]
    first = collect(requests[0])[0]
    collect(dataclasses.replace(requests[1], seed=12))
    again = collect(requests[1])[0]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        elsewhere = executor.submit(collect, requests[2]).result()[0]
    assert first == again == elsewhere
    files = [(tmp_path / f"collected_{number}_1000.npz").read_bytes() for number in range(3)]
    assert files[0] == files[1] == files[2]


def command(folder, *options):
    words = ["--task", TASK.name, "--output", str(folder), *options]
    return [sys.executable, "-m", "scripts.collect_trajectories", *words]


def started(folder, repository, *options):
    return subprocess.Popen(
        command(folder, *options), cwd=repository, stderr=subprocess.PIPE, text=True
    )


def players(process):
    """Returns the ids of the processes that play, once they have written an episode; the first
    child is the resource tracker."""
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
            yield int(child)


def until(condition, seconds=60):
    """Waits for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
def test_killed_processes_end_the_command(repository, tmp_path):
    """Killing a worker ends the command with one line; killing the command ends its workers."""
    process = started(tmp_path, repository, "--policy", "random", "--episodes", "500")
    until(lambda: list(tmp_path.rglob("*.npz")))
    os.kill(next(players(process)), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and errors.splitlines()[-1].startswith(
        "error: a process that played an episode was killed"
    )
    assert "Traceback" not in errors
    process = started(tmp_path, repository, "--policy", "random", "--episodes", "500")
    count = len(list(tmp_path.rglob("*.npz")))
    until(lambda: len(list(tmp_path.rglob("*.npz"))) > count)
    workers = list(players(process))
    assert len(workers) == 2
    busy = subprocess.run(process.args, cwd=repository, capture_output=True, text=True)
    assert busy.returncode == 75 and f"another process collects {TASK.name} into it" in busy.stderr
    process.kill()
    process.communicate()
    until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), 10)


@pytest.mark.slow
def test_a_collection_killed_at_random_instants_ends_with_the_same_files(repository, tmp_path):
    """The command alone, or with its workers, at random instants within its uninterrupted
    duration."""
    options = ["--episodes", "80"]
    start = time.monotonic()
    subprocess.run(command(tmp_path / "whole", *options), cwd=repository, check=True)
    seconds = time.monotonic() - start
    generator = np.random.default_rng(int.from_bytes(os.urandom(4)))
    kills = 0
    for _ in range(12):
        process = subprocess.Popen(
            command(tmp_path / "killed", *options), cwd=repository, start_new_session=True
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(float(generator.uniform(0.5, 0.6 * seconds)))
        if process.poll() is None:
            kills += 1
            (os.killpg if generator.integers(2) else os.kill)(process.pid, signal.SIGKILL)
        process.wait()
    assert kills >= 3
    subprocess.run(command(tmp_path / "killed", *options), cwd=repository, check=True)
    assert hashes(tmp_path / "whole") == hashes(tmp_path / "killed")
    assert not list(tmp_path.rglob("*.part*"))
    record = json.loads(
        (tmp_path / "whole/cartpole/augmented_random_search_swingup/collected.json").read_text()
    )
    assert record["collected with"] == "dm_control" and record["task"] == TASK.name
