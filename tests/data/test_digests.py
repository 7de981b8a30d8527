"""Digests of files are computed once, and again after every kind of change."""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest

from data import digests, paths
from data.digests import file_digest, file_digests
from data.encode import EncodingRules
from data.paths import File
from data.prepare import prepare
from data.sources import Source, Sources
from data.tokenizer import Tokenizer
from tests.conftest import REPOSITORY

SIZE = 100_000


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Returns the folder in which digests of files of any age, above 1,000 bytes, are kept."""
    monkeypatch.setenv("LONGSTRIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "LARGE_BYTES", 1000)
    monkeypatch.setattr(digests, "_SETTLED_SECONDS", -1.0)
    return tmp_path / "cache" / "digests"


@pytest.fixture
def hashed(monkeypatch):
    """Returns a list of the contents that were read to be hashed."""
    contents, compute = [], digests._sha256

    def counted(opened):
        contents.append(opened.read())
        opened.seek(0)
        return compute(opened)

    monkeypatch.setattr(digests, "_sha256", counted)
    return contents


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"a" * SIZE)
    return path


def true_digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def read_by_this_process():
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


@pytest.mark.parametrize("format", ["text", "tokens"])
def test_a_later_start_reads_nothing_of_the_source(tmp_path, monkeypatch, format):
    tokenizer = Tokenizer.load(REPOSITORY / "data/fixtures/tiny_tokenizer")
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(3):
        if format == "tokens":
            np.save(folder / f"{number}.npy", np.full(250_000, number, np.int32))
        else:
            text = "".join(f"Line {line} of book {number}.\n" for line in range(13_000))
            (folder / f"{number}.txt").write_text(text)
    sizes = [path.stat().st_size for path in folder.iterdir()]

    def start():
        before = read_by_this_process()
        made = prepare(
            Sources((Source(str(folder), format),)),
            tokenizer,
            EncodingRules(4096),
            tmp_path / "prepared",
            progress=False,
        )
        return made.folder, read_by_this_process() - before

    first, read_bytes = start()
    assert read_bytes > sum(sizes)
    with monkeypatch.context() as later:
        # Memory-mapped reads are no reads to the system.
        later.setattr(np.memmap, "min", lambda *_: pytest.fail("reads the array"), raising=False)
        again, read_bytes = start()
    assert again == first and read_bytes < min(sizes)
    changed = sorted(folder.iterdir())[1]
    content = changed.read_bytes()
    changed.write_bytes(content[:-4] + b"\x07\0\0\0")
    assert start()[0] != first
    changed.write_bytes(content)
    assert start()[0] == first, "the name depends on contents only"


def test_a_digest_covers_every_byte_and_is_kept_for_large_files(tmp_path, cache, hashed, file):
    small = tmp_path / "small"
    small.write_bytes(b"a")
    assert file_digest(small) == true_digest(small) and not cache.exists()
    for _ in range(3):
        assert file_digest(file) == true_digest(file)
    assert hashed == [b"a", b"a" * SIZE]
    with file.open("r+b") as opened:
        opened.seek(77_777)
        opened.write(b"x")
    assert file_digest(file) == true_digest(file)


def test_many_small_files_are_hashed_once(tmp_path, hashed):
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_bytes(b"%d" % number * 100)
    files = [File(str(path)) for path in sorted(folder.iterdir())]
    expected = [true_digest(file.path) for file in files]
    assert file_digests(files, folder) == file_digests(files, folder) == expected
    assert len(hashed) == 40
    Path(files[3].path).write_bytes(b"x" * 2000)
    expected[3] = true_digest(files[3].path)
    assert file_digests(files, folder) == file_digests(files, folder) == expected
    assert len(hashed) == 41, "only the changed one is read"


def rewritten(file, times):
    file.write_bytes(b"b" * SIZE)


def rewritten_with_its_time(file, times):
    file.write_bytes(b"b" * SIZE)
    os.utime(file, ns=times)


def written_in_place_with_its_time(file, times):
    with file.open("r+b") as opened:
        opened.write(b"b")
    os.utime(file, ns=times)


def replaced_with_its_time(file, times):
    other = file.with_name("other")
    other.write_bytes(b"b" * SIZE)
    os.utime(other, ns=times)
    other.replace(file)


def linked_elsewhere(file, times):
    other = file.with_name("other")
    other.write_bytes(b"b" * SIZE)
    os.utime(other, ns=times)
    file.unlink()
    file.symlink_to(other)


@pytest.mark.parametrize(
    "change",
    [
        rewritten,
        rewritten_with_its_time,
        written_in_place_with_its_time,
        replaced_with_its_time,
        linked_elsewhere,
    ],
)
def test_each_change_of_a_file_is_noticed(file, change):
    before, status = file_digest(file), file.stat()
    time.sleep(0.02)  # a tick of the clock of file systems
    change(file, (status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == SIZE
    assert file_digest(file) == true_digest(file) != before


def test_a_digest_is_not_kept_for_a_file_that_may_change_within_a_tick(
    monkeypatch, cache, file, hashed
):
    """However long the hashing takes: what counts is the file's age when it began."""
    compute = digests._sha256

    def slow(opened):
        time.sleep(0.2)
        return compute(opened)

    monkeypatch.setattr(digests, "_sha256", slow)
    monkeypatch.setattr(digests, "_SETTLED_SECONDS", 0.1)
    file.write_bytes(b"b" * SIZE)
    file_digest(file)
    assert not cache.exists()
    file_digest(file)
    assert cache.exists() and len(hashed) == 2
    file_digest(file)
    assert len(hashed) == 2
    later = time.time() + 3600  # as of a machine whose clock is ahead
    os.utime(file, (later, later))
    for _ in range(3):
        file_digest(file)
    assert len(hashed) == 5


def test_a_digest_is_not_kept_for_a_file_that_changes_meanwhile(monkeypatch, cache, file):
    compute = digests._sha256

    def changed_after_it_was_read(opened):
        sha256 = compute(opened)
        file.write_bytes(b"b" * SIZE)
        return sha256

    time.sleep(0.02)
    monkeypatch.setattr(digests, "_sha256", changed_after_it_was_read)
    file_digest(file)
    assert not cache.exists()


def test_a_damaged_cache_is_ignored_and_replaced(cache, file, hashed):
    file_digest(file)
    (kept,) = cache.iterdir()
    whole = kept.read_text()
    digit = "0" if true_digest(file)[0] != "0" else "1"
    damages = [
        b"",
        b"\xff\x00",
        whole[: len(whole) // 2].encode(),
        whole.replace(true_digest(file), digit + true_digest(file)[1:]).encode(),
        json.dumps({"path": str(file), "sha256": "of an earlier version"}).encode(),
    ]
    for text in ("3", "[3]", '[["a", 3]]', "{"):  # complete, of another version
        damages.append(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}".encode())
    for count, damaged in enumerate(damages, 2):
        kept.write_bytes(damaged)
        assert file_digest(file) == file_digest(file) == true_digest(file)
        assert len(hashed) == count and kept.read_text() == whole
    kept.unlink()
    kept.mkdir()
    assert file_digest(file) == true_digest(file)
    assert list(cache.iterdir()) == [kept], "the unfinished file was removed"


def test_digests_are_computed_without_a_cache(tmp_path, monkeypatch, file):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("LONGSTRIPE_CACHE", str(tmp_path / "a file"))
    assert file_digest(file) == true_digest(file)


def test_the_cache_keeps_its_newest_parts(tmp_path, cache, monkeypatch, file):
    file_digest(file)
    (kept,) = cache.iterdir()
    monkeypatch.setattr(digests, "CACHE_BYTES", int(2.5 * kept.stat().st_size))
    for number in range(5):
        other = tmp_path / f"f{number:03d}"
        other.write_bytes(b"c" * SIZE)
        time.sleep(0.02)
        file_digest(other)
    assert len(list(cache.iterdir())) == 2
    text = "".join(path.read_text() for path in cache.iterdir())
    assert "f003" in text and "f004" in text


ONE_OF_TWO = """
import sys
from pathlib import Path
from data import digests
digests.LARGE_BYTES, digests._SETTLED_SECONDS = 1, -1.0
folder, own = Path(sys.argv[1]), sys.argv[2]
files = [digests.File(str(path)) for path in sorted(folder.iterdir())]
first = digests.file_digests(files, folder)
for number in range(50):
    (folder.parent / own).write_bytes(b"%d" % number)
    again = digests.file_digests([*files, digests.File(str(folder.parent / own))], folder)
    assert again[:-1] == first
print(*first)
"""


def test_two_processes_may_keep_digests_at_once(tmp_path, cache):
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}").write_bytes(b"%d" % number * 1000)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_OF_TWO, folder, name],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("own-a", "own-b")
    ]
    expected = [true_digest(path) for path in sorted(folder.iterdir())]
    for process in running:
        assert process.communicate()[0].split() == expected and process.returncode == 0
    (kept,) = cache.iterdir()
    assert {digests._read(kept)[str(path)][1] for path in folder.iterdir()} == {*expected}


@pytest.mark.parametrize(
    ("version", "reads"), [('"5d41"', 1), (7, 1), ('W/"5d41"', 2), ("", 2), (None, 2)]
)
def test_a_file_in_a_store_is_hashed_once_per_version(monkeypatch, hashed, version, reads):
    """Unless the store has none, or a weak ETag, which may stay through a change."""
    store = fsspec.filesystem("memory")
    info = type(store).info
    monkeypatch.setattr(
        type(store), "info", lambda self, path: {**info(self, path), "ETag": version}
    )
    monkeypatch.setitem(paths._VERSIONS, "memory", "ETag")
    for content in (b"a" * SIZE, b"b" * SIZE):
        store.pipe("/digests/a.txt", content)
        file = File("memory://digests/a.txt")
        for _ in range(2):
            assert file_digests([file], "memory://digests")[0] in {
                hashlib.sha256(text).hexdigest() for text in (b"a" * SIZE, b"b" * SIZE)
            }
        assert hashed == [content] * reads
        hashed.clear()
        version = f"{version} changed" if reads == 1 else version


def test_a_changed_object_on_google_cloud_storage_is_hashed_again(gcs, hashed):
    for content in (b"a" * SIZE, b"b" * SIZE, b"a" * SIZE):
        store = fsspec.filesystem("gs", skip_instance_cache=True)
        store.pipe("bucket/a.txt", content)
        fsspec.filesystem("gs").invalidate_cache()
        for _ in range(2):
            assert file_digest("gs://bucket/a.txt") == hashlib.sha256(content).hexdigest()
        assert hashed == [content]
        hashed.clear()
