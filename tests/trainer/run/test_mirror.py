"""Tests of trainer/run/mirror.py: the bucket gives back what the run's folder holds, after a kill
at any moment."""

import json
import shutil

import pytest

from data.errors import TransientError
from trainer.run import mirror as mirrors
from trainer.run.bucket import Bucket
from trainer.run.directory import RunDirectory
from trainer.run.mirror import Mirror, mirrored


@pytest.fixture
def mirror(gcs, tmp_path):
    made = Mirror(Bucket("gs://bucket/run"), tmp_path / "here")
    made.pull()
    return made


def line(step):
    return json.dumps({"step": step}) + "\n"


def log(folder, steps, mode="a"):
    with open(folder / "metrics.jsonl", mode, encoding="utf-8") as file:
        file.writelines(line(step) for step in steps)


def elsewhere(tmp_path):
    """What another machine finds in the bucket."""
    other = Mirror(Bucket("gs://bucket/run"), tmp_path / "elsewhere")
    other.pull()
    return other


def test_logs_are_appended_and_other_files_replaced(gcs, mirror, tmp_path):
    (mirror.folder / "config.yaml").write_text("one")
    (mirror.folder / "tensorboard").mkdir()
    (mirror.folder / "tensorboard/events").write_bytes(b"\0\1")
    log(mirror.folder, [1, 2])
    mirror.push()
    (mirror.folder / "config.yaml").write_text("another")
    log(mirror.folder, [3])
    mirror.push()
    mirror.push()
    parts = [name for name in gcs.store.names() if "metrics" in name]
    assert parts == [
        "run/metrics.jsonl/000000-000000000000000",
        f"run/metrics.jsonl/000000-{2 * len(line(1)):015}",
    ]
    assert gcs.store.objects["bucket", parts[1]][0] == line(3).encode(), "only the new line"
    folder = elsewhere(tmp_path).folder
    assert (folder / "metrics.jsonl").read_text() == line(1) + line(2) + line(3)
    assert (folder / "config.yaml").read_text() == "another"
    assert (folder / "tensorboard/events").read_bytes() == b"\0\1"


def test_a_log_merged_between_listing_and_reading_is_whole(store_and_url, monkeypatch, tmp_path):
    server, url = store_and_url
    parts = {f"000000-{2 * len(line(1)) * n:015}": line(2 * n) + line(2 * n + 1) for n in (0, 1)}
    objects = server.store.objects
    for name, content in parts.items():
        objects["bucket", f"run/metrics.jsonl/{name}"] = content.encode(), 1
    names, listed = Bucket.names, []

    def merge_after_listing(bucket, prefix=""):
        listed.append(names(bucket, prefix))
        if len(listed) == 1:
            for name in parts:
                del objects["bucket", f"run/metrics.jsonl/{name}"]
            whole = "".join(parts.values()).encode()
            objects["bucket", f"run/metrics.jsonl/000001-{0:015}"] = whole, 2
        return listed[-1]

    monkeypatch.setattr(Bucket, "names", merge_after_listing)
    Mirror(Bucket(f"{url}/run"), tmp_path / "here").pull()
    assert (tmp_path / "here/metrics.jsonl").read_text() == "".join(parts.values())
    monkeypatch.setattr(Bucket, "names", lambda bucket, prefix="": ["gone"])
    with pytest.raises(TransientError, match=rf"^{url}/run/gone: is listed, but not there; "):
        Bucket(f"{url}/run").read_all()


@pytest.mark.parametrize("pushed", [True, False])
def test_a_log_that_is_cut_back_is_cut_back_in_the_bucket(gcs, mirror, tmp_path, pushed):
    """Also if it has grown beyond the bucket's copy again."""
    for step in (1, 2, 4):
        log(mirror.folder, [step])
        mirror.push()
    other = elsewhere(tmp_path)
    other.push()
    log(other.folder, [1, 2], mode="w")  # as a restart from step 2 leaves it
    if pushed:
        other.push()
    log(other.folder, [3, 44, 5])
    other.push()
    log(other.folder, [6])
    other.push()
    shutil.rmtree(other.folder)
    copied = (elsewhere(tmp_path).folder / "metrics.jsonl").read_text()
    assert copied == "".join(map(line, (1, 2, 3, 44, 5, 6)))


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_kill_while_objects_are_composed_loses_nothing(gcs, mirror, tmp_path, monkeypatch, kept):
    for step in (1, 2, 3):
        log(mirror.folder, [step])
        mirror.push()
    monkeypatch.setattr(mirrors, "MOST_PARTS", 2)
    other, deletes = elsewhere(tmp_path), []

    def refused(method, path):
        if method == "DELETE":
            deletes.append(path)
            return 403 if len(deletes) > kept else None
        return None

    gcs.store.refused = refused
    log(other.folder, [4])
    if kept < 3:
        with pytest.raises(Exception, match="PERMISSION"):
            other.push()
    else:
        other.push()
    assert (elsewhere(tmp_path).folder / "metrics.jsonl").read_text() == "".join(
        map(line, (1, 2, 3, 4))
    )


@pytest.mark.parametrize(
    "remove", [shutil.rmtree, lambda folder: (folder / "metrics.jsonl").unlink()]
)
def test_a_run_whose_local_folder_is_cleaned_up_stays_in_the_bucket(gcs, mirror, remove):
    """A push once removed config.yaml there too, and the run could not be resumed."""
    (mirror.folder / "config.yaml").write_text("one")
    (mirror.folder / "assets").mkdir()
    (mirror.folder / "assets/old.json").write_text("{}")
    log(mirror.folder, [1])
    mirror.push()
    shutil.rmtree(mirror.folder / "assets")  # as each start does
    mirror.push()
    before = gcs.store.names()
    remove(mirror.folder)
    with pytest.raises(TransientError, match=f"^{mirror.folder}/.*: was removed while the run"):
        mirror.push()
    assert gcs.store.names() == before and "run/assets/old.json" not in before


def test_a_file_that_vanishes_while_it_is_copied_ends_nothing(gcs, mirror, monkeypatch):
    """Such as a board's temporary file."""
    (mirror.folder / "wandb").mkdir()
    (mirror.folder / "wandb/part").write_text("x")
    state = mirrors._state
    monkeypatch.setattr(mirrors, "_state", lambda path: (path.unlink(), state(path)))
    mirror.push()
    assert gcs.store.names() == []


def test_folders_made_by_hand_are_no_files(store_and_url, tmp_path):
    """A store's console keeps them as empty objects."""
    server, url = store_and_url
    for name in ("run/", "run/checkpoints/", "run/tensorboard/"):
        server.store.objects["bucket", name] = b"", 1
    bucket = Bucket(f"{url}/run")
    bucket.write("tensorboard/events", b"x")
    assert bucket.names() == bucket.names("tensorboard/") == ["tensorboard/events"]
    Mirror(bucket, tmp_path / "here").pull()


def test_checkpoints_profiles_and_the_lock_stay_in_the_bucket(gcs, mirror, tmp_path):
    for name in ("checkpoints/7/manifest.json", "lock", "config.yaml"):
        mirror.bucket.write(name, b"x")
    run = RunDirectory(mirror.folder, "gs://bucket/run", mirror)
    run.keep_profile("plugins/profile/steps_2_3/process1.host.xplane.pb", b"x")
    assert [name for name in gcs.store.names() if "profile/" in name] == [
        "run/profile/plugins/profile/steps_2_3/process1.host.xplane.pb"
    ]
    assert [path.name for path in elsewhere(tmp_path).folder.iterdir()] == ["config.yaml"]


def test_closing_copies_what_is_left_and_removes_the_folder(gcs, mirror):
    with mirrored(mirror):
        log(mirror.folder, [1])
    assert mirror.bucket.read("metrics.jsonl/000000-000000000000000") == line(1).encode()
    assert not mirror.folder.exists()
