"""Folders appear complete or not at all: leftovers of killed processes are removed, and other users
can read the result."""

import errno
import os
import resource
import stat
import subprocess
import sys
import time

import pytest

from data import folders
from data.errors import UserError, is_transient
from data.outputs import new_folder
from tests.conftest import REPOSITORY

NAME = "0123456789abcdef0123"


def is_whole(folder):
    return (folder / "whole").exists()


def build(folder, content="new"):
    with folders.building(folder, is_whole) as scratch:
        (scratch / "whole").write_text(content)


def test_a_folder_has_the_users_permissions(tmp_path):
    previous = os.umask(0o027)
    try:
        build(tmp_path / NAME)
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o750
    assert [path.name for path in (tmp_path / NAME).iterdir()] == ["whole"]


def test_a_complete_folder_is_kept_and_a_damaged_one_replaced(tmp_path):
    build(tmp_path / NAME, "first")
    build(tmp_path / NAME, "second")
    assert (tmp_path / NAME / "whole").read_text() == "first"
    (tmp_path / NAME / "whole").rename(tmp_path / NAME / "damaged")
    build(tmp_path / NAME, "third")
    assert [path.read_text() for path in (tmp_path / NAME).iterdir()] == ["third"]
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_an_error_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), folders.building(tmp_path / NAME, is_whole) as scratch:
        (scratch / "a").write_text("a")
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_leftovers_of_killed_processes_are_removed_but_not_folders_being_built(tmp_path):
    code = (
        "import os, pathlib, sys, time; from data import folders\n"
        "with folders.building(pathlib.Path(sys.argv[1]), lambda folder: True) as scratch:\n"
        "    print(scratch, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / NAME)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        scratch = process.stdout.readline().strip()
        build(tmp_path / NAME)
        assert os.path.isdir(scratch)
        process.kill()
    earlier = [tmp_path / f".{NAME}-old_{age}" for age in (1, 8)]  # without a lock
    for path, days in zip(earlier, (1, 8), strict=True):
        path.mkdir()
        os.utime(path, (time.time() - days * 86_400,) * 2)
    (tmp_path / ".other").mkdir()
    build(tmp_path / ("f" * 20))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [".other", earlier[0].name, NAME, "f" * 20]
    )


def test_a_full_disk_is_named(tmp_path):
    with (
        pytest.raises(UserError, match=rf"^{tmp_path}: No space left on device; with more room"),
        folders.named_errors(tmp_path),
        open("/dev/full", "w") as full,
    ):
        full.write("a")
    words = rf"^{tmp_path}: No space left on device while {NAME} was written"
    with pytest.raises(UserError, match=words), folders.building(tmp_path / NAME, is_whole):
        # array_record's wording.
        raise RuntimeError("write() failed: No space left on device; writing a")
    with pytest.raises(FileNotFoundError), folders.named_errors(tmp_path):
        open(tmp_path / "none").close()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_files():
    """A limit of 1,000 bytes on the size of files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_on_the_size_of_files_is_named_and_would_be_hit_again(tmp_path, small_files):
    words = r": File too large{}; files may have 1,000 bytes; a higher limit, .*ulimit -f"
    with (
        pytest.raises(UserError, match=f"^{tmp_path}" + words.format("")) as error,
        folders.named_errors(tmp_path),
        open(tmp_path / "a", "wb") as file,
    ):
        file.write(bytes(2000))
    assert not is_transient(error.value)
    building = words.format(f" while {NAME} was written")
    with pytest.raises(UserError, match=f"^{tmp_path}{building}") as error:
        build(tmp_path / NAME, "a" * 2000)
    assert not is_transient(error.value)


def test_a_parent_that_cannot_be_written_to_is_named():
    with pytest.raises(UserError, match=r"^/proc/none: cannot be written to \("):
        build(folders.Path("/proc/none") / NAME)


@pytest.mark.parametrize(
    ("code", "lasts"), [(errno.EIO, False), (errno.EACCES, True), (errno.EBUSY, True)]
)
def test_a_failed_rename_has_its_own_reason(tmp_path, monkeypatch, code, lasts):
    """Not `No such file or directory`, from looking into a folder that is not there. A mount point
    stays busy."""
    rename = os.rename

    def failing(source, target):
        if os.path.basename(target) == NAME:
            raise OSError(code, os.strerror(code))
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    words = "is a mount point" if code == errno.EBUSY else os.strerror(code)
    refused = pytest.raises((OSError, UserError), match=words)
    with refused as error, folders.building(tmp_path / NAME, folders.holds_files) as scratch:
        (scratch / "file").touch()
    assert is_transient(error.value) != lasts


def test_a_file_system_that_cannot_rename_folders_is_refused_before_the_work(tmp_path, monkeypatch):
    """A flat bucket mounted by gcsfuse renames files and empty folders only."""
    rename = os.rename

    def flat(source, target):
        if os.path.isdir(source) and os.listdir(source):
            raise OSError(errno.EMFILE, "Too many open files")
        rename(source, target)

    monkeypatch.setattr(os, "rename", flat)
    for make in (build, new_folder):
        with pytest.raises(UserError, match=f"^{tmp_path}: a folder cannot be renamed there .*Too"):
            make(tmp_path / NAME)
    assert not list(tmp_path.iterdir())


def test_two_processes_do_not_write_into_one_folder(tmp_path):
    """The lock ends with the process that held it."""
    lock = tmp_path / ".lock"
    code = (
        "import sys, time; from pathlib import Path; from data.folders import exclusive\n"
        f"with exclusive(Path({str(lock)!r}), 'collects'): print('locked', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    refused = pytest.raises(
        UserError, match=f"{tmp_path}: another process collects; wait until it has ended"
    )
    with refused, folders.exclusive(lock, "collects"):
        pass
    process.kill()
    process.wait()
    with folders.exclusive(lock, "collects"):
        pass


def test_the_temporary_folder_of_a_killed_process_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path))
    code = (
        "import sys, tempfile, time; from data import folders; tempfile.tempdir = sys.argv[1]\n"
        "with folders.scratch_folder() as scratch:\n"
        "    (scratch / 'a').touch(); print(scratch, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    used = process.stdout.readline().strip()
    unrelated = [tmp_path / "longstripe-scratch-of-mine", tmp_path / "longstripe-scratch-link"]
    unrelated[0].mkdir()
    unrelated[1].symlink_to(REPOSITORY)
    with folders.scratch_folder() as scratch:
        assert os.path.exists(used) and not any(scratch.iterdir())
    process.kill()
    process.wait()
    with folders.scratch_folder():
        assert not os.path.exists(used)
    assert sorted(tmp_path.iterdir()) == sorted(unrelated)
