"""Files in the hub's cache are kept if they match the hub's digests, also after kills."""

import errno
import hashlib
import os
import signal
import subprocess
import sys

import pytest

from data.download_checks import checked, remove_damaged
from data.errors import UserError
from tests.conftest import REPOSITORY

WHOLE = b"weights" * 1000
SHA256 = hashlib.sha256(WHOLE).hexdigest()
GIT = hashlib.sha1(b"blob %d\0" % len(WHOLE) + WHOLE).hexdigest()
PLAIN = hashlib.sha1(WHOLE).hexdigest()
KILLED = """
import os, pathlib, signal, sys
from data.download_checks import checked
repository = pathlib.Path(sys.argv[1])
with checked(repository):
    for name, content in zip(sys.argv[2::2], sys.argv[3::2]):
        (repository / "blobs" / name).write_text(content)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "models--me--tiny"
    (folder / "blobs").mkdir(parents=True)
    return folder


def notes(repository):
    return [path.name for path in repository.parent.iterdir() if path.name.startswith(".")]


def killed(repository, **arrived):
    """Runs a process that is killed after files have arrived."""
    arguments = [word for name, content in arrived.items() for word in (name, content)]
    code = subprocess.run(
        [sys.executable, "-c", KILLED, str(repository), *arguments], cwd=REPOSITORY, check=False
    ).returncode
    assert code == -signal.SIGKILL


def test_files_of_a_killed_download_are_checked_by_the_next(repository, capsys):
    digests = [SHA256, GIT, PLAIN, SHA256.upper()]
    damaged = WHOLE.decode()[:-1]
    killed(repository, **dict.fromkeys(digests, damaged), **{"of-a-mirror": "x"})
    (repository / "blobs" / "of-a-mirror").chmod(0o400)
    assert len(notes(repository)) == 1
    remove_damaged(repository)
    assert [blob.name for blob in (repository / "blobs").iterdir()] == ["of-a-mirror"]
    warnings = capsys.readouterr().err
    assert all(
        warnings.count(f"{digest}: does not match the hub's digest") == 1 for digest in digests
    )
    assert notes(repository) == []


def test_a_complete_file_is_kept_and_an_earlier_one_is_not_read_again(repository):
    before = repository / "blobs" / ("a" * 64)
    before.write_bytes(b"does not match its name, but an earlier download checked it")
    killed(repository, **{SHA256: WHOLE.decode()})
    remove_damaged(repository)
    assert {blob.name for blob in (repository / "blobs").iterdir()} == {SHA256, before.name}


def test_a_truncated_note_causes_all_files_to_be_checked(repository):
    killed(repository)
    (note,) = notes(repository)
    (repository.parent / note).write_bytes(b'["' + SHA256.encode())
    (repository / "blobs" / SHA256).write_bytes(WHOLE[1:])
    remove_damaged(repository)
    assert not list((repository / "blobs").iterdir())


def test_a_running_download_is_left_alone(repository):
    with checked(repository):
        blob = repository / "blobs" / SHA256
        blob.write_bytes(b"not all of it yet")
        remove_damaged(repository)
        assert blob.exists()
        assert len(notes(repository)) == 1
        blob.write_bytes(WHOLE)
    assert notes(repository) == []


@pytest.mark.parametrize("error", [None, OSError])
def test_a_damaged_file_is_removed_with_an_error(repository, error):
    refused = pytest.raises(UserError, match=f"{SHA256}: does not match the hub's digest")
    with refused, checked(repository):
        (repository / "blobs" / SHA256).write_bytes(WHOLE[1:])
        if error:
            raise error("the connection broke off")
    assert not list((repository / "blobs").iterdir())
    assert notes(repository) == []


def test_an_interruption_skips_the_check_and_leaves_its_note(repository):
    blob = repository / "blobs" / SHA256
    with pytest.raises(KeyboardInterrupt), checked(repository):
        blob.write_bytes(WHOLE[1:])
        raise KeyboardInterrupt
    assert blob.exists()
    remove_damaged(repository)
    assert not blob.exists()


@pytest.mark.parametrize("problem", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_cache_that_cannot_be_written_to_is_still_checked(repository, monkeypatch, problem):
    def rename(*_):
        raise OSError(problem, os.strerror(problem))

    monkeypatch.setattr("data.download_checks.os.rename", rename)
    with checked(repository):
        (repository / "blobs" / SHA256).write_bytes(WHOLE)
    assert (repository / "blobs" / SHA256).exists() and not notes(repository)
    with pytest.raises(UserError, match="does not match the hub's digest"), checked(repository):
        (repository / "blobs" / GIT).write_bytes(WHOLE[1:])
    assert not notes(repository)
