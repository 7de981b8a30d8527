"""Files of episodes: written ones are read back, and a file's faults are named."""

import numpy as np
import pytest

from data.errors import UserError
from data.trajectories.episodes import (
    Episode,
    episode_files,
    episode_return,
    read_episode,
    write_episode,
)

from .made import TASK, episode, folder_of


def test_a_written_episode_is_read_back(tmp_path):
    path = write_episode(tmp_path, "made", 7, episode(3))
    assert path.name == "made_7_20.npz"
    for stored, expected in zip(read_episode(path, TASK), episode(3), strict=True):
        assert stored.dtype == expected.dtype
        np.testing.assert_array_equal(stored, expected)


def test_writing_an_episode_is_deterministic(tmp_path):
    """A resumed collection ends with the same bytes."""
    first, second = (
        write_episode(tmp_path, name, 1, episode(1)).read_bytes() for name in ("a", "b")
    )
    assert first == second


def test_the_first_rows_reward_does_not_count():
    assert episode_return(episode(5)[2]) == pytest.approx(20 * 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": np.zeros(3, np.float32)}, "lengths are observation 21, action 21, reward 3"),
        (
            {"reward": np.full(21, np.nan, np.float32)},
            "reward holds values that are not finite numbers",
        ),
        (
            {"observation": np.zeros((21, 24), np.float32)},
            r"observation has shape \(24,\); cartpole's is \(5,\)",
        ),
        (
            {"action": np.zeros((21, 6), np.float32)},
            r"action has shape \(6,\); cartpole's is \(1,\)",
        ),
        ({"reward": np.array(["a"] * 21)}, "reward holds <U1; numbers would work"),
        ({"discount": np.ones(21, bool)}, "discount holds bool; numbers would work"),
        # Finite, but not in the float32 that is stored.
        ({"reward": np.full(21, 1e39)}, "reward holds values that are not finite numbers"),
        (
            {"action": np.full((21, 1), -1.5, np.float32)},
            r"action holds values up to 1.5; actions in -1 .. 1, which a model can predict, would",
        ),
        ({"physics": np.zeros((21, 3))}, r"physics has shape \(3,\); cartpole's is \(4,\)"),
        (
            {"observation": np.full((21, 5), np.inf, np.float32)},
            "observation holds values that are not finite numbers",
        ),
    ],
)
def test_an_invalid_array_is_named(tmp_path, change, message):
    np.savez(tmp_path / "x.npz", **{**episode(1)._asdict(), **change})
    with pytest.raises(UserError, match=message):
        read_episode(tmp_path / "x.npz", TASK)


def test_fewer_steps_than_the_name_says_are_refused(tmp_path):
    path = write_episode(tmp_path, "made", 1, episode(1))
    path = path.rename(tmp_path / "made_1_500.npz")
    with pytest.raises(UserError, match="has 20 steps, but its name says 500"):
        read_episode(path, TASK)


def test_a_missing_array_is_named(tmp_path):
    arrays = episode(1)._asdict()
    del arrays["physics"]
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(UserError, match=f"physics.*; needs {', '.join(Episode._fields)}"):
        read_episode(tmp_path / "x.npz", TASK)


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"x" * 1000]
)
def test_damaged_files_are_named(tmp_path, damage):
    path = write_episode(tmp_path, "made", 1, episode(1))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=f"{path}: damaged"):
        read_episode(path, TASK)


def test_episodes_are_found_below_the_data_and_in_a_buffer(tmp_path):
    buffer = folder_of(tmp_path, count=3)
    assert (
        episode_files(tmp_path, TASK) == episode_files(buffer, TASK) == sorted(buffer.glob("*.npz"))
    )
    with pytest.raises(UserError, match="found no episodes; needs cartpole/ALGORITHM/buffer"):
        episode_files(tmp_path / "cartpole", TASK)


def test_episodes_that_are_in_no_buffer_are_counted(tmp_path, capsys):
    buffer = folder_of(tmp_path, count=2)
    (buffer.parent / "search.npz").touch()
    unfinished = tmp_path / "cartpole/rnd.unpacking/whole/buffer"
    unfinished.mkdir(parents=True)
    write_episode(unfinished, "made", 8, episode(8))
    assert len(episode_files(tmp_path, TASK)) == 2 and not capsys.readouterr().err
    (buffer / "more").mkdir()
    (tmp_path / "cartpole/mine").mkdir()
    for folder in (tmp_path, tmp_path / "cartpole/mine", buffer / "more"):
        write_episode(folder, "made", 9, episode(9))
    assert len(episode_files(tmp_path, TASK)) == 2
    assert capsys.readouterr().err == (
        f"warning: 3 .npz files below {tmp_path} are not read, since they are not in "
        f"cartpole/ALGORITHM/buffer; the first: {buffer}/more/made_9_20.npz\n"
    )


def test_an_episode_out_of_proportion_is_not_read(tmp_path):
    path = tmp_path / "a_0_20.npz"
    np.savez_compressed(path, observation=np.zeros(1 << 23, np.float32))
    with pytest.raises(UserError, match="unpacks to more than 200 times its size"):
        read_episode(path, TASK)
