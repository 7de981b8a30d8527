"""Preparing episodes: random access to what was stored, and the count of what was left out."""
import numpy as np
import pytest

from data.errors import UserError
from data.trajectories.builder import prepare_trajectories
from data.trajectories.tasks import get_task, make_environment, physics_state

from .made import TASK, episode, folder_of


def test_episodes_are_those_of_the_files(tmp_path):
    buffer = folder_of(tmp_path / "data", count=4)
    (buffer / "made_0_9.npz").write_bytes(b"half an archive")
    prepared = prepare_trajectories(tmp_path / "data", TASK.name, tmp_path / "prepared")
    assert len(prepared) == 4 and list(prepared.lengths) == [20] * 4
    np.testing.assert_allclose(prepared.returns, [2, 4, 6, 8], rtol=1e-6)
    for stored, given in zip(prepared.episode(2), episode(3), strict=True):
        np.testing.assert_array_equal(stored, given)
    assert len(prepared.dropped) == 1 and "made_0_9.npz: damaged" in prepared.report
    assert "least 2.0, quartiles 3.5 5.0 6.5, best 8.0, mean 5.0" in prepared.report


def test_they_are_prepared_once_until_a_file_changes(tmp_path):
    buffer = folder_of(tmp_path / "data", count=2)
    first = prepare_trajectories(tmp_path / "data", TASK.name, tmp_path / "prepared")
    marker = first.folder / "marker"
    marker.touch()
    assert prepare_trajectories(buffer, TASK.name, tmp_path / "prepared").folder == first.folder and marker.exists()
    (buffer / "made_2_20.npz").unlink()
    assert prepare_trajectories(buffer, TASK.name, tmp_path / "prepared").key != first.key


def test_rewards_are_the_tasks_unless_the_folder_says_that_they_are(tmp_path):
    buffer = folder_of(tmp_path / "data", count=1)
    (buffer.parent / "collected.json").unlink()
    environment = make_environment(TASK, 0)
    environment.reset()
    upright = episode(1)._replace(physics=np.tile([0.0, 0.0, 0.0, 0.0], (21, 1)), action=np.zeros((21, 1), np.float32))
    assert physics_state(environment).shape == (4,)
    np.savez(buffer / "made_1_20.npz", **upright._asdict())
    prepared = prepare_trajectories(buffer, TASK.name, tmp_path / "prepared")
    np.testing.assert_allclose(prepared.returns, [20.0])  # a pole that stands still in the middle: 1 for each step


def test_no_usable_episode_is_an_error(tmp_path):
    buffer = folder_of(tmp_path / "data", count=1)
    (buffer / "made_1_20.npz").write_bytes(b"")
    with pytest.raises(UserError, match=r"none of 1 episodes can be used; the first: .*damaged"):
        prepare_trajectories(buffer, TASK.name, tmp_path / "prepared")
    assert not list((tmp_path / "prepared").iterdir()), "nothing half prepared is left"


def test_episodes_of_another_body_are_left_out(tmp_path):
    folder_of(tmp_path / "data", count=1)
    with pytest.raises(UserError, match="needs walker/ALGORITHM/buffer"):
        prepare_trajectories(tmp_path / "data", get_task("walker_walk").name, tmp_path / "prepared")
