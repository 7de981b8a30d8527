"""The distribution of returns per algorithm, against numpy, and files left out."""

import json

import numpy as np
import pytest

from data.trajectories.episodes import write_episode
from scripts import inspect_trajectories
from tests.data.trajectories.made import TASK, episode, folder_of


@pytest.fixture
def folder(tmp_path):
    """Two algorithms, one with returns 2, 4, 6, 8 and one with 20, 40; and four files that are not
    such episodes."""
    good = folder_of(tmp_path / "data", count=4)
    better = tmp_path / "data" / TASK.domain / "better" / "buffer"
    better.mkdir(parents=True)
    (better.parent / "collected.json").write_text((good.parent / "collected.json").read_text())
    for number in (10, 20):
        write_episode(better, "made", number, episode(number))
    whole = (good / "made_1_20.npz").read_bytes()
    (better / "half_30_20.npz").write_bytes(whole[: len(whole) // 2])
    write_episode(better, "nan", 31, episode(1)._replace(reward=np.full(21, np.nan, np.float32)))
    write_episode(
        better, "walker", 32, episode(1)._replace(observation=np.zeros((21, 24), np.float32))
    )
    np.savez(
        better / "mixed_33_20.npz", **{**episode(1)._asdict(), "reward": np.zeros(5, np.float32)}
    )
    return tmp_path / "data"


def test_the_table_the_numbers_and_the_picture(folder, tmp_path, capsys):
    plot, numbers = tmp_path / "out" / "returns.png", tmp_path / "out" / "returns.json"
    assert (
        inspect_trajectories.main(
            [str(folder), "--task", TASK.name, "--plot", str(plot), "--json", str(numbers)]
        )
        == 0
    )
    printed = capsys.readouterr().out
    result = json.loads(numbers.read_text())
    np.testing.assert_allclose(result["returns"]["made"], [2, 4, 6, 8], rtol=1e-6)
    np.testing.assert_allclose(result["returns"]["better"], [20, 40], rtol=1e-6)
    made, everything = result["algorithms"]["made"], result["algorithms"]["all"]
    assert (
        made["episodes"] == 4
        and made["mean"] == pytest.approx(5)
        and made["25%"] == pytest.approx(3.5)
    )
    assert everything["max"] == pytest.approx(40) and everything["median"] == pytest.approx(7)
    rows = [line.split() for line in printed.splitlines()]
    assert ["made", "4", "2.0", "3.5", "5.0", "6.5", "8.0", "5.0"] in rows
    assert ["all", "6", "2.0", "4.5", "7.0", "17.0", "40.0", "13.3"] in rows
    assert "4 files skipped:" in printed and len(result["left_out"]) == 4
    for name, reason in (
        ("half_30_20", "damaged"),
        ("nan_31_20", "reward holds values that are not finite numbers"),
        ("walker_32_20", "cartpole's is (5,)"),
        ("mixed_33_20", "lengths are observation 21"),
    ):
        assert any(name in text and reason in text for text in result["left_out"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_coverage_counts_the_visited_cells(folder, tmp_path, capsys):
    """Along the two principal directions of made-up states, an algorithm that visits half of the
    plane has half of the cells."""
    generator = np.random.default_rng(0)
    plane = np.zeros((20_000, 5))
    plane[:, :2] = generator.uniform(-1, 1, (20_000, 2))
    plane[:, 2] = plane[:, 0]  # makes these two the first direction
    counts = inspect_trajectories.visits({"all": plane, "half": plane[plane[:, 0] > 0]})
    assert inspect_trajectories.share(counts["all"]) > 0.99
    assert inspect_trajectories.share(counts["half"]) == pytest.approx(0.5, abs=0.03)
    assert counts["all"].sum() == pytest.approx(20_000, rel=0.03)
    numbers, picture = tmp_path / "numbers.json", tmp_path / "coverage.png"
    options = ["--coverage", str(picture), "--json", str(numbers)]
    assert inspect_trajectories.main([str(folder), "--task", TASK.name, *options]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    shares = json.loads(numbers.read_text())["coverage"]
    printed = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    assert f"coverage: {printed}" in capsys.readouterr().out


def test_a_single_state_is_in_one_cell():
    """As of one episode of fewer than ten steps."""
    counts = inspect_trajectories.visits({"all": np.ones((1, 5), np.float32)})["all"]
    assert counts.sum() == counts.max() == 1


def test_rewards_can_be_those_of_another_task(folder, capsys):
    """Files of another task get rewards from their states: a pole standing in the middle earns 1
    per step."""
    buffer = folder / TASK.domain / "better" / "buffer"
    (buffer.parent / "collected.json").unlink()
    for path in buffer.iterdir():
        path.unlink()
    write_episode(
        buffer,
        "upright",
        1,
        episode(1)._replace(physics=np.zeros((21, 4)), action=np.zeros((21, 1), np.float32)),
    )
    assert inspect_trajectories.main([str(buffer), "--task", TASK.name]) == 0
    assert ["better", "1", "20.0"] in [
        line.split()[:3] for line in capsys.readouterr().out.splitlines()
    ]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("walker_wlak", "did you mean walker_walk"),
        ("walker_walk", "found no episodes; needs walker/ALGORITHM/buffer"),
    ],
)
def test_unusable_folders_are_a_one_line_error(folder, task, message, capsys):
    assert inspect_trajectories.main([str(folder), "--task", task]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
