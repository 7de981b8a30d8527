"""Training reads shards from a store: only those that its rows need, in a cache of bounded size."""

import errno
import hashlib
import json
import threading
import time

import numpy as np
import pytest

from data import blocks, paths, record_store
from data.encode import EncodingRules
from data.errors import TransientError, UserError
from data.loader import Loader
from data.prepare import prepare
from data.prepared import read
from data.shard_cache import ShardCache
from data.sources import Source, Sources
from data.tokenizer import Tokenizer
from tests.data.test_fixtures import FIXTURES

LENGTH = 64


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(FIXTURES / "tiny_tokenizer")


@pytest.fixture
def opened(tokenizer, tmp_path, monkeypatch):
    """Returns a function that opens prepared data in a store like another machine, and the data as
    opened by the first machine."""
    monkeypatch.setattr(record_store, "RECORDS_IN_A_FILE", 32)
    monkeypatch.setattr(blocks, "MOST_DOCUMENTS", 40)
    monkeypatch.setattr(blocks, "BLOCK", 100)
    monkeypatch.setenv("LONGSTRIPE_CACHE", str(tmp_path / "first"))
    texts = tmp_path / "in.jsonl"
    chats = json.loads((FIXTURES / "conversations.json").read_text())[:60]
    texts.write_text("\n".join(json.dumps({"text": json.dumps(chat)}) for chat in chats))

    def open_on(machine, cache_gib=1.0):
        monkeypatch.setenv("LONGSTRIPE_CACHE", str(tmp_path / machine))
        source, store = Source(str(texts), "text"), f"file://{tmp_path}/store"
        return prepare(
            Sources((source,)),
            tokenizer,
            EncodingRules(LENGTH),
            store,
            progress=False,
            cache_gib=cache_gib,
        )

    return open_on, open_on("first")


def _equal(a, b):
    assert a.keys() == b.keys()
    return all(np.array_equal(a[name], b[name]) for name in a)


def _shards(prepared):
    return sorted(prepared.folder.glob("documents/[!.]*.array_record-*"))


def test_rows_match_local_data_and_the_cache_stays_within_its_size(opened):
    open_on, first = opened
    sizes = [path.stat().st_size for path in _shards(first)]
    limit = 2 * max(sizes)
    assert first.train.cache is None and sum(sizes) > 3 * limit
    second = open_on("second", limit / 2**30)
    assert not _shards(second), "a shard is copied before it is needed"
    loaders = [Loader(prepared, LENGTH, 4, 0) for prepared in (first, second)]
    assert loaders[0].fingerprint == loaders[1].fingerprint
    batches = loaders[1].batches(ahead=2)
    for step in range(len(loaders[0]) // 4):
        assert _equal(loaders[0].batch(step), next(batches))
        with second.train.cache._counted():
            assert sum(sizes[int(path.name[-5:])] for path in _shards(second)) <= limit


def test_a_process_copies_only_the_shards_of_its_rows(opened, monkeypatch):
    """Each of 1, 2 or 4 processes reads its rows of the same batches, of a plan in blocks."""
    open_on, first = opened
    loader = Loader(first, LENGTH, 4, 0)
    last = len(loader) // 4 - 1
    assert loader._in_blocks and loader._plan(0)._blocks > 2
    expected, expected_last = loader.batch(0), loader.batch(last)
    for processes in (1, 2, 4):
        for process in range(processes):
            prepared = open_on(f"{processes}-{process}")
            rows = [row for row in range(4) if row % processes == process]
            loader = Loader(prepared, LENGTH, 4, 0)
            batch = loader.batch(0, rows)
            assert all(np.array_equal(batch[name], expected[name][rows]) for name in expected)
            numbers = {piece.document for row in rows for piece in loader._pieces(row)}
            assert len(_shards(prepared)) == len({number // 32 for number in numbers})
            batch = loader.batch(last, rows)
            assert all(np.array_equal(batch[name], expected_last[name][rows]) for name in expected)


def test_upcoming_shards_are_copied_in_advance(opened):
    prepared = opened[0]("second")
    prepared.train.prefetch(range(40))
    deadline = time.monotonic() + 10
    while len(_shards(prepared)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [path.name[-5:] for path in _shards(prepared)] == ["00000", "00001"]


def test_a_damaged_shard_and_a_small_cache_are_named(opened, tmp_path):
    open_on, first = opened
    with pytest.raises(
        UserError, match=r"data.cache_gib: found .* a shard of file://.* would work"
    ):
        open_on("small", 1e-6)
    [shard] = (tmp_path / "store" / first.folder.name).glob("documents/*-00000")
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    prepared = open_on("second")
    with pytest.raises(UserError, match=r"documents/.*-00000: is damaged"):
        _ = prepared.train[0]
    assert not _shards(prepared) and prepared.train[40].tokens.any()


def test_damaged_copies_of_small_files_are_replaced(opened):
    open_on, _ = opened
    prepared = open_on("second")
    (prepared.folder / "report.json").write_text("[")
    assert open_on("second").report.records == 60
    assert read(prepared.folder, with_shards=False).reports


def test_a_failing_store_is_retried(opened, monkeypatch):
    prepared, calls = opened[0]("second"), []
    file_system = paths.fsspec.filesystem("file")
    get = type(file_system).get_file

    def failing(self, *args, **kwargs):
        calls.append(args)
        if len(calls) % 5 != 4:
            raise OSError(errno.ETIMEDOUT, "timed out")
        return get(self, *args, **kwargs)

    monkeypatch.setattr(type(file_system), "get_file", failing)
    monkeypatch.setattr(paths, "_FIRST_WAIT", 0.001)
    assert prepared.train[0].tokens.any() and len(calls) == 4


def test_a_full_disk_is_a_one_line_error(opened, monkeypatch):
    prepared = opened[0]("second")

    def full(source, local):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(paths, "get_file", full)
    with pytest.raises(TransientError, match=r"No space left on device; with more room there"):
        prepared.train.cache.local("documents/longstripe-documents.array_record-00000")


def test_threads_copy_a_shard_once(tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    (tmp_path / "store/a.array_record-0").write_bytes(b"x" * 1000)
    shard = "a.array_record-0"
    files = {shard: (1000, hashlib.sha256(b"x" * 1000).hexdigest())}
    cache = ShardCache(f"file://{tmp_path}/store", files, tmp_path / "here", 4000)
    copied, get = [], paths.get_file

    def slow(source, local):
        copied.append(source)
        time.sleep(0.05)
        get(source, local)

    monkeypatch.setattr(paths, "get_file", slow)
    cache.prefetch([shard])
    threads = [threading.Thread(target=cache.local, args=(shard,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [name for name in copied if name.startswith(cache.remote)] == [f"{cache.remote}/{shard}"]
