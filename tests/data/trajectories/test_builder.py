"""Preparing episodes: random access to the stored ones, and reports of those left out."""

from pathlib import Path

import fsspec
import numpy as np
import pytest
import tensorflow_datasets as tfds

from data.errors import UserError
from data.trajectories.builder import prepare_trajectories
from data.trajectories.episodes import write_episode
from data.trajectories.tasks import get_task, make_environment, physics_state

from .made import TASK, episode, folder_of


def test_prepared_episodes_match_the_files(tmp_path):
    buffer = folder_of(tmp_path / "data", count=4)
    (buffer / "made_0_9.npz").write_bytes(b"half an archive")
    prepared = prepare_trajectories(tmp_path / "data", TASK.name, tmp_path / "prepared")
    assert len(prepared) == 4 and list(prepared.lengths) == [20] * 4
    np.testing.assert_allclose(prepared.returns, [2, 4, 6, 8], rtol=1e-6)
    for stored, expected in zip(prepared.episode(2), episode(3), strict=True):
        np.testing.assert_array_equal(stored, expected)
    assert len(prepared.dropped) == 1 and "made_0_9.npz: damaged" in prepared.report
    assert "least 2.0, quartiles 3.5 5.0 6.5, best 8.0, mean 5.0" in prepared.report


def test_steps_have_the_flags_of_rlds(tmp_path):
    """Read like any RLDS data set; the second episode ends in a terminal state, the first at its
    time limit."""
    buffer = folder_of(tmp_path / "data", count=1)
    write_episode(
        buffer,
        "made",
        2,
        episode(2, steps=7)._replace(discount=np.array([1] * 7 + [0], np.float32)),
    )
    prepared = prepare_trajectories(tmp_path / "data", TASK.name, tmp_path / "prepared")
    source = tfds.builder_from_directory(str(prepared.folder / "episodes")).as_data_source(
        split="episodes"
    )
    for record, length, is_terminal in zip(source, (20, 7), (False, True), strict=True):
        steps = record["steps"]
        assert steps["is_first"].tolist() == [True] + [False] * length
        assert steps["is_last"].tolist() == [False] * length + [True]
        assert steps["is_terminal"].tolist() == [False] * length + [is_terminal]
        assert steps["reward"].shape == steps["discount"].shape == (length + 1,)


def test_episodes_damaged_after_the_start_are_named(tmp_path):
    folder_of(tmp_path / "data", count=4)
    prepared = prepare_trajectories(tmp_path / "data", TASK.name, tmp_path / "prepared")
    (path,) = (prepared.folder / "episodes").glob("*array_record*")
    content = bytearray(path.read_bytes())
    content[100 : len(content) // 2] = bytes(len(content) // 2 - 100)
    path.write_bytes(content)
    message = rf"^{prepared.folder}: an episode cannot be read \(.*\); if this folder is deleted, the same command makes it"
    with pytest.raises(UserError, match=message):
        [prepared.episode(number) for number in range(len(prepared))]


def test_episodes_may_have_different_lengths(tmp_path):
    buffer = folder_of(tmp_path / "data", count=2, steps=20)
    write_episode(buffer, "made", 3, episode(3, steps=12))
    prepared = prepare_trajectories(tmp_path / "data", TASK.name, tmp_path / "prepared")
    assert (
        sorted(prepared.lengths) == [12, 20, 20]
        and "3 episodes of 12 to 20 steps" in prepared.report
    )
    for number in range(3):
        assert len(prepared.episode(number).reward) == prepared.lengths[number] + 1


def test_episodes_that_are_copies_of_others_are_counted(tmp_path):
    """As of two tasks of a domain collected with the same seed, which differ in rewards."""
    buffer = folder_of(tmp_path / "data", count=3)
    prepared = prepare_trajectories(tmp_path / "data", TASK.name, tmp_path / "prepared")
    assert prepared.copies == 0 and "of others" not in prepared.report
    for number in (1, 2):
        again = episode(number)._replace(reward=np.zeros(21, np.float32))
        write_episode(buffer, "again", number, again)
    for _ in range(2):  # built, then read
        prepared = prepare_trajectories(tmp_path / "data", TASK.name, tmp_path / "prepared")
        assert len(prepared) == 5 and prepared.copies == 2
        assert "2 episodes have the states and actions of others" in prepared.report


def test_every_kind_of_invalid_file_is_named_and_counted(tmp_path):
    buffer = folder_of(tmp_path / "data", count=3)
    bad = {
        "mixed": {"action": np.zeros((7, 1), np.float32)},
        "nan": {"reward": np.full(21, np.nan, np.float32)},
        "walker": {"observation": np.zeros((21, 24), np.float32)},
        "strange": {"physics": np.zeros((21, 18))},
    }
    for number, (name, change) in enumerate(bad.items()):
        np.savez(buffer / f"{name}_{number}_20.npz", **{**episode(1)._asdict(), **change})
    whole = (buffer / "made_1_20.npz").read_bytes()
    (buffer / "half_9_20.npz").write_bytes(whole[: len(whole) // 2])
    (buffer / "folder_7_20.npz").mkdir()
    prepared = prepare_trajectories(tmp_path / "data", TASK.name, tmp_path / "prepared")
    assert (
        len(prepared) == 3 and len(prepared.dropped) == 6 and "6 files left out:" in prepared.report
    )
    for name, reason in (
        ("half_9", "damaged"),
        ("folder_7", "damaged"),
        ("mixed_0", "lengths are"),
        ("nan_1", "reward holds values that are not finite numbers"),
        ("walker_2", r"observation has shape (24,); cartpole's is (5,)"),
        ("strange_3", "physics has shape"),
    ):
        assert any(name in text and reason in text for text in prepared.dropped), name


def test_episodes_are_prepared_again_only_after_a_file_changes(tmp_path):
    buffer = folder_of(tmp_path / "data", count=2)
    first = prepare_trajectories(tmp_path / "data", TASK.name, tmp_path / "prepared")
    marker = first.folder / "marker"
    marker.touch()
    assert (
        prepare_trajectories(buffer, TASK.name, tmp_path / "prepared").folder == first.folder
        and marker.exists()
    )
    (buffer / "made_2_20.npz").unlink()
    assert prepare_trajectories(buffer, TASK.name, tmp_path / "prepared").key != first.key


def test_prepared_episodes_in_a_store_serve_other_machines(tmp_path, monkeypatch):
    """Each machine reads the copy in its own cache; no local folder is named like the store."""
    monkeypatch.chdir(tmp_path)
    buffer = folder_of(tmp_path / "data", count=2)
    for machine in ("one", "other"):
        monkeypatch.setenv("LONGSTRIPE_CACHE", str(tmp_path / machine))
        prepared = prepare_trajectories(buffer, TASK.name, "memory://trajectories/prepared/")
        assert prepared.folder.is_relative_to(tmp_path / machine) and len(prepared) == 2
        monkeypatch.setattr(
            "data.trajectories.builder._build", lambda *_: pytest.fail("made again")
        )
    assert not list(tmp_path.glob("memory*"))
    store = fsspec.filesystem("memory")
    expected = {path.name for path in prepared.folder.rglob("*") if path.is_file()}
    store.rm("/trajectories", recursive=True)
    for name in ("trajectories", "others"):  # deleted, or another bucket
        prepare_trajectories(buffer, TASK.name, f"memory://{name}/prepared")
        assert {Path(path).name for path in store.find(f"/{name}/prepared")} == expected


def test_another_process_opens_prepared_episodes(tmp_path):
    first = prepare_trajectories(
        folder_of(tmp_path / "data", count=2), TASK.name, tmp_path / "prepared"
    )
    second = prepare_trajectories("nowhere", TASK.name, tmp_path / "prepared", key=first.key)
    assert second.folder == first.folder and len(second) == 2
    with pytest.raises(
        UserError,
        match=rf"elsewhere/{first.key}: not found on this machine, .* all processes share",
    ):
        prepare_trajectories(tmp_path / "data", TASK.name, tmp_path / "elsewhere", key=first.key)


def test_rewards_are_recomputed_unless_collected_for_the_task(tmp_path):
    buffer = folder_of(tmp_path / "data", count=1)
    (buffer.parent / "collected.json").unlink()
    environment = make_environment(TASK, 0)
    environment.reset()
    upright = episode(1)._replace(
        physics=np.tile([0.0, 0.0, 0.0, 0.0], (21, 1)), action=np.zeros((21, 1), np.float32)
    )
    assert physics_state(environment).shape == (4,)
    np.savez(buffer / "made_1_20.npz", **upright._asdict())
    prepared = prepare_trajectories(buffer, TASK.name, tmp_path / "prepared")
    # An upright pole at rest in the middle: 1 per step.
    np.testing.assert_allclose(prepared.returns, [20.0])


def test_no_usable_episode_is_an_error(tmp_path):
    buffer = folder_of(tmp_path / "data", count=1)
    (buffer / "made_1_20.npz").write_bytes(b"")
    with pytest.raises(UserError, match=r"none of 1 episodes can be used; the first: .*damaged"):
        prepare_trajectories(buffer, TASK.name, tmp_path / "prepared")
    assert not list((tmp_path / "prepared").iterdir()), "an incomplete folder is left"


def test_episodes_of_another_body_are_not_used(tmp_path):
    folder_of(tmp_path / "data", count=1)
    with pytest.raises(UserError, match="needs walker/ALGORITHM/buffer"):
        prepare_trajectories(tmp_path / "data", get_task("walker_walk").name, tmp_path / "prepared")
