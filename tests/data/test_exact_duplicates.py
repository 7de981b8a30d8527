import errno
import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.exact_duplicates import SeenOnDisk


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30))))
def test_a_set_on_disk_holds_what_a_set_holds(tmp_path_factory, steps):
    path = tmp_path_factory.mktemp("a folder?x=1 #%41") / "seen"
    seen, expected = SeenOnDisk(path), set()
    for adds, number in steps:
        digest = bytes([number, 0]) * 8
        assert (digest in seen) == (digest in expected)
        if adds:
            seen.add(digest)
            expected.add(digest)
    seen.close()
    assert not path.exists()


def test_a_full_disk_is_an_error_of_the_file_system(tmp_path):
    """SQLite's limit of pages makes the same error as a full disk."""
    seen = SeenOnDisk(tmp_path / "seen")
    seen._database.execute("PRAGMA max_page_count = 3")
    with pytest.raises(OSError, match=r"No space left on device.*seen") as error:
        for number in range(10_000):
            seen.add(number.to_bytes(16, "big"))
    assert error.value.errno == errno.ENOSPC


class BrokenDisk:
    def execute(self, *_):
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR
        raise error


def test_a_broken_disk_is_named_when_the_file_is_made_and_when_it_is_used(tmp_path, monkeypatch):
    seen = SeenOnDisk(tmp_path / "seen")
    seen._database = BrokenDisk()
    monkeypatch.setattr(sqlite3, "connect", lambda *_, **__: BrokenDisk())
    for use in (
        lambda: seen.add(bytes(16)),
        lambda: bytes(16) in seen,
        lambda: SeenOnDisk(tmp_path / "seen"),
    ):
        with pytest.raises(OSError, match=r"Input/output error.*seen") as error:
            use()
        assert error.value.errno == errno.EIO
