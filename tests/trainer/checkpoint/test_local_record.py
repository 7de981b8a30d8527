"""Which run a folder's record of local checkpoints belongs to."""

import json
import shutil

import pytest

from trainer.checkpoint.local_record import (
    RECORD,
    newest_local_step,
    own_record,
    place_of,
    read_record,
)

RUN = "0123456789abcdef"


def write(folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    record = {"run": RUN, "step": 8, **place_of(folder, str(folder)), **changes}
    (folder / RECORD).write_text(json.dumps(record))
    return record


def test_a_copied_folder_names_its_original(tmp_path):
    record = write(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert own_record(tmp_path / "a", "a") == record
    assert own_record(tmp_path / "b", "b") == {"copy_of": str(tmp_path / "a")}
    assert newest_local_step(tmp_path / "a", "a") == 8
    assert newest_local_step(tmp_path / "b", "b") == 0


def test_a_renamed_folder_keeps_its_record_even_if_it_was_copied_before(tmp_path):
    record = write(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a").rename(tmp_path / "c")
    assert own_record(tmp_path / "c", "c") == record
    assert own_record(tmp_path / "b", "b")["copy_of"] == str(tmp_path / "a")


def test_a_folder_that_may_have_been_moved_to_another_disk_says_its_original_run(tmp_path):
    """Its inode is new, and its path too; nothing is at the old one."""
    record = write(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    moved = own_record(tmp_path / "b", "b")
    places = {"copy_of": str(tmp_path / "a"), "location": str(tmp_path / "b")}
    assert moved == {**places, "original_run": RUN}
    assert newest_local_step(tmp_path / "b", "b") == 0
    (tmp_path / "b" / RECORD).write_text(json.dumps(record | {"location": moved["location"]}))
    assert own_record(tmp_path / "b", "b")["run"] == RUN


def test_a_file_system_may_number_its_files_anew(tmp_path):
    record = write(tmp_path / "a", inode=1)
    assert own_record(tmp_path / "a", "a") == record


def test_a_folder_may_be_given_by_another_path(tmp_path, monkeypatch):
    record = write(tmp_path / "a", inode=1)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert own_record(tmp_path / "link", "link") == record
    monkeypatch.chdir(tmp_path)
    assert own_record(type(tmp_path)("a"), "a") == record


def test_an_earlier_versions_record_is_the_folders(tmp_path):
    write(tmp_path / "a")
    (tmp_path / "a" / RECORD).write_text(f'{{"run": "{RUN}", "step": 8}}')
    assert own_record(tmp_path / "a", "a") == {"run": RUN, "step": 8}


def test_a_run_in_a_bucket_has_no_inode(tmp_path):
    """Its local folder is another one in each process."""
    url = "gs://bucket/runs/a"
    assert place_of(tmp_path, url) == {"location": url}
    (tmp_path / RECORD).write_text(json.dumps({"run": RUN, "step": 8, "location": url}))
    assert own_record(tmp_path, url)["run"] == RUN
    assert own_record(tmp_path, "gs://bucket/runs/b") == {"copy_of": url}


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"run": "../elsewhere"}', '{"run": 3'])
def test_an_unreadable_record_is_none(tmp_path, text):
    assert own_record(tmp_path, "a") == {}
    (tmp_path / RECORD).write_text(text)
    assert read_record(tmp_path) == {} and newest_local_step(tmp_path, "a") == 0


def test_a_step_that_may_be_complete_counts(tmp_path):
    write(tmp_path, begun=9)
    assert newest_local_step(tmp_path, "a") == 9
    write(tmp_path, step=None, begun=None)
    assert newest_local_step(tmp_path, "a") == 0
