"""Tests of trainer/checkpoint/commit.py: in a bucket a checkpoint counts once its manifest exists;
the remains of a kill are removed."""

import json
import os
import re
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.errors import TransientError, UserError
from data.paths import cache_folder
from trainer.checkpoint import commit, fetch
from trainer.checkpoint.fetch import local_copy
from trainer.checkpoint.manifest import DamagedError, ForeignError, read_manifest
from trainer.checkpoint.readers import restore_model, stored_parameters
from trainer.checkpoint.store import CheckpointStore


@pytest.fixture
def server(store_and_url):
    return store_and_url[0]


@pytest.fixture
def url(store_and_url):
    return f"{store_and_url[1]}/runs/mine"


def save(store, step):
    model = {"w": jnp.full((8, 4), step, jnp.float32)}
    store.save(step, model=model, optimizer={"mu": model}, data={"step": step}, assets=store.assets)
    store.wait()


@pytest.fixture
def store(url, tmp_path):
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets/config.json").write_text("{}")
    made = CheckpointStore(url, keep=2)
    made.assets, made.url = tmp_path / "assets", url
    return made


def test_checkpoints_are_saved_and_restored_and_the_oldest_removed(server, store):
    for step in (1, 2, 3):
        save(store, step)
    assert CheckpointStore(store.url).steps() == [2, 3] and store.latest_good() == 3
    assert not [name for name in server.store.names() if "/1/" in name], "all of it is removed"
    abstract = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    restored = store.restore(3, abstract, {"mu": abstract})
    assert restored.step == 3 and restored.data == {"step": 3}
    for array in (restored.model["w"], restored.optimizer["mu"]["w"]):
        assert (np.asarray(array) == 3).all()


def test_a_checkpoint_without_a_manifest_does_not_count_and_the_next_save_removes_it(server, store):
    save(store, 1)

    def refused(method, path):
        return 403 if method in ("POST", "PUT") and saving else None

    saving, server.store.refused = True, refused
    store.before = lambda: None
    with pytest.raises((OSError, UserError)):
        save(store, 2)
    saving = False
    save(store, 3)
    server.store.objects["bucket", "runs/mine/checkpoints/4/model/d/left"] = b"by a kill", 1
    assert CheckpointStore(store.url).steps() == [1, 3]
    save(store, 5)
    assert not [name for name in server.store.names() if "/4/" in name or "/2/" in name]


def test_old_checkpoints_that_cannot_be_removed_cost_no_new_one(server, store, capsys):
    """A bucket has no scratch folder: clearing up once removed the checkpoint that counted."""
    for step in (1, 2):
        save(store, step)
    counts = ("bucket", "runs/mine/checkpoints/3/manifest.json")
    server.store.refused = lambda method, _: (
        403 if (method == "DELETE" and counts in server.store.objects) else None
    )
    save(store, 3)
    warning = f"warning: {store.url}/checkpoints/1: beyond checkpoint.keep and not removed ("
    assert warning in capsys.readouterr().err
    assert CheckpointStore(store.url).latest_good() == 3 and store.steps() == [1, 2, 3]
    server.store.refused = lambda *_: None
    save(store, 4)
    assert store.steps() == [3, 4]


def test_a_process_that_lost_the_lock_saves_nothing(store):
    def lost():
        raise UserError("another process has taken the lock")

    store.before = lost
    with pytest.raises(OSError, match="another process has taken the lock"):
        save(store, 1)
    assert store.steps() == []


def test_a_changed_object_is_found_and_the_previous_checkpoint_used(server, store, capsys):
    save(store, 1)
    save(store, 2)
    damage(server, 2)
    assert store.latest_good() == 1
    assert "/2: model/ocdbt.process_0/d/" in capsys.readouterr().err


def test_commands_read_a_copy_without_moments(server, store, capsys):
    save(store, 1)
    save(store, 2)
    for path in (store.url, f"{store.url}/checkpoints", f"{store.url}/checkpoints/2"):
        assert (restore_model(path)["w"] == 2).all()
        assert (np.asarray(stored_parameters(path)["w"]) == 2).all()
    copy = local_copy(store.url)
    assert copy.is_dir() and not (copy / "optimizer").exists()
    assert capsys.readouterr().err.count(f"downloading {store.url}/checkpoints/2") == 1
    assert json.loads((copy / "assets/config.json").read_text()) == {}


def test_copies_that_no_command_has_used_for_a_week_are_removed(server, store):
    save(store, 1)
    old, used = (local_copy(store.url, [item]) for item in ("data", "assets"))
    killed = shutil.copytree(old, old.with_name(f".{old.name}-0123abcd"))
    earlier = old.with_name("of-earlier-code")  # may be the base of an adapter
    earlier.mkdir()
    for path in (old, used, killed):
        os.utime(path / fetch.LAST_USE, (0, time.time() - fetch.UNUSED_SECONDS - 60))
    assert local_copy(store.url, ["assets"]) == used
    assert {local_copy(store.url), used, earlier} == {*old.parent.iterdir()}


def test_a_removal_during_the_download_is_named(server, store, monkeypatch):
    save(store, 1)
    monkeypatch.setattr(fetch, "read_manifest", lambda f: (read_manifest(f), commit.remove(f))[0])
    with pytest.raises(TransientError, match=f"^{store.url}/checkpoints/1: was removed while"):
        local_copy(store.url)


def damage(server, step):
    """Flips a bit of a file of the checkpoint's arrays."""
    keys = [key for key in server.store.objects if f"/{step}/model/ocdbt.process_0/d/" in key[1]]
    content, generation = server.store.objects[keys[0]]
    server.store.objects[keys[0]] = content[:-1] + bytes([content[-1] ^ 1]), generation


def test_commands_use_the_previous_checkpoint_if_the_newest_is_damaged(server, store, capsys):
    for step in (1, 2):
        save(store, step)
    damage(server, 2)
    assert (restore_model(store.url)["w"] == 1).all()
    warning = rf"warning: {store.url}/checkpoints/2: model/\S+ is damaged \(its checksum differs\)"
    assert re.search(rf"{warning}; using the previous checkpoint\n", capsys.readouterr().err)
    with pytest.raises(DamagedError, match=rf"^{store.url}/checkpoints/2: model/.* is damaged"):
        local_copy(f"{store.url}/checkpoints/2")
    shutil.rmtree(cache_folder("checkpoints"))
    del server.store.objects["bucket", "runs/mine/checkpoints/1/assets/config.json"]
    with pytest.raises(
        ValueError, match=rf"^{store.url}/checkpoints: every .* \(newest: .*/2: mod"
    ):
        local_copy(store.url)
    with pytest.raises(DamagedError, match=r"/checkpoints/1: assets/config\.json is missing"):
        local_copy(f"{store.url}/checkpoints/1")


def test_the_best_checkpoint_is_known_without_the_newest(server, store):
    for step in (1, 2):
        model = {"w": jnp.full((8, 4), step, jnp.float32)}
        data = {"step": step, "best": {"step": 1}}
        store.save(step, model=model, data=data, assets=store.assets)
        store.wait()
    server.store.objects["bucket", "runs/mine/checkpoints/2/data/data.json"] = b"{", 1
    assert (restore_model(f"{store.url}/best")["w"] == 1).all()


@pytest.mark.parametrize(
    ("path", "words"),
    [("other", "no manifest.json"), ("/best", "this run has no best checkpoint")],
)
def test_a_folder_without_a_checkpoint_is_reported(store, path, words):
    save(store, 1)
    path = store.url.replace("/mine", "/other") if "other" in path else store.url + path
    with pytest.raises(ForeignError, match=f"{path}: .*{words}"):
        local_copy(path)


def test_names_of_large_checkpoints_are_compared_first(server, store, monkeypatch, capsys):
    monkeypatch.setattr("trainer.checkpoint.store.DIGESTED_BEFORE", 0)
    save(store, 1)
    save(store, 2)
    assert store.latest_good(meanwhile=True) == 2
    store.finish_digests()
    del server.store.objects["bucket", "runs/mine/checkpoints/2/optimizer/manifest.ocdbt"]
    assert store.latest_good(meanwhile=True) == 1
    assert "/2: optimizer/manifest.ocdbt is missing" in capsys.readouterr().err
    store.finish_digests()


@pytest.mark.parametrize("leftover", ["7.tmp", "5.tmp", "6.tmp-removed"])
def test_a_link_in_place_of_a_killed_save_is_removed_and_its_target_kept(tmp_path, leftover):
    """In a run that somebody else made: a save would write through the link."""
    users_folder, target = tmp_path / "own", tmp_path / "checkpoints" / "7"
    users_folder.mkdir()
    (users_folder / "manifest.json").write_text("the user's own")
    target.parent.mkdir()
    (target.parent / leftover).symlink_to(users_folder)
    commit.clear(commit.scratch_of(target))
    commit.remove_leftovers(target)
    assert list(target.parent.iterdir()) == []
    assert (users_folder / "manifest.json").read_text() == "the user's own"
