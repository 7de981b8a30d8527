"""Files in a store are read like local ones; prepared data in a store are read through the local
cache."""

import asyncio
import errno
import gzip
import json
import random
import shutil
import subprocess
import tracemalloc
from pathlib import Path

import fsspec
import numpy as np
import pytest

from data import paths, source_files, tables
from data.encode import EncodingRules
from data.errors import TransientError, UserError, is_transient
from data.prepare import prepare
from data.report import Report
from data.sources import Source, Sources, read
from data.tokenizer import Tokenizer
from tests.conftest import REPOSITORY

FIXTURES = REPOSITORY / "data/fixtures"


@pytest.fixture
def store():
    """Yields fsspec's in-memory store, empty before and after."""
    system = fsspec.filesystem("memory")
    system.rm("/", recursive=True) if system.ls("/") else None
    yield system
    system.rm("/", recursive=True)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("~/own", "home/own"),
        ("", "home/.cache/longstripe"),
        (None, "home/.cache/longstripe"),
        ("/elsewhere", "/elsewhere"),
    ],
)
def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch, variable, expected):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LONGSTRIPE_CACHE", raising=False)
    if variable is not None:
        monkeypatch.setenv("LONGSTRIPE_CACHE", variable)
    assert paths.cache_folder("xla") == tmp_path / expected / "xla"
    assert paths.local_folder("gs://bucket/prepared") == tmp_path / expected / "prepared"


def put(system, path, content):
    with system.open(path, "wb") as file:
        file.write(content)


@pytest.mark.parametrize(
    "root", ["lr[0.1]", "a*b", "a?b", "a::b", "memory://lr[0.1]", "memory://a*b"]
)
def test_paths_are_never_patterns(store, tmp_path, monkeypatch, root):
    """Next to each folder is one that its name would match as a pattern."""
    monkeypatch.setenv("LONGSTRIPE_CACHE", str(tmp_path / "cache"))
    system = store if paths.is_remote(root) else fsspec.filesystem("file", auto_mkdir=True)
    root = root if paths.is_remote(root) else str(tmp_path / root)
    for folder in (
        root,
        root.replace("lr[0.1]", "lr0").replace("a*b", "axb").replace("a?b", "axb"),
    ):
        put(system, f"{folder}/a.txt", folder.encode())
    for path in (root, f"{root}/a.txt"):
        assert [item.text for item in read(Source(path, "text"), Report())] == [root]
    tokenizer = Tokenizer.load(FIXTURES / "tiny_tokenizer")
    first, again = [], []
    for documents in (first, again):
        train = prepare(
            Sources((Source(f"{root}/a.txt", "text"),)),
            tokenizer,
            EncodingRules(64),
            f"{root}/prepared",
            progress=False,
        ).train
        documents += [train[number].tokens.tolist() for number in range(len(train))]
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    assert first == again and first


def test_a_store_is_read_like_a_folder(store, tmp_path):
    dirty = (FIXTURES / "dirty.json").read_bytes()
    array, local = np.arange(9, dtype=np.int32), tmp_path / "local"
    np.save(tmp_path / "a.npy", array)
    (local / "more").mkdir(parents=True)
    for name, content in (
        ("dirty.json", dirty),
        ("more/b.txt", b"A text"),
        ("a.npy", (tmp_path / "a.npy").read_bytes()),
    ):
        (local / name).write_bytes(content)
        put(store, f"/set/{name}", content)
    for format in ("sharegpt", "text", "tokens"):
        source = Source(str(local / "dirty.json") if format == "sharegpt" else str(local), format)
        remote = Source(source.path.replace(str(local), "memory://set"), format)
        if format == "text":  # dirty.json is not a text
            (local / "dirty.json").unlink()
            store.rm("/set/dirty.json")
        records, remote_records = list(read(source, Report())), list(read(remote, Report()))
        assert len(records) == len(remote_records) > 0
        for record, other in zip(records, remote_records, strict=True):
            if format == "tokens":
                assert record.id == other.id and (record.tokens == other.tokens).all()
            else:
                assert record == other
    with pytest.raises(UserError, match=r"memory://set/none\.json: no such file"):
        list(read(Source("memory://set/none.json"), Report()))


def test_an_array_in_a_store_stays_on_disk(store, tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSTRIPE_CACHE", str(tmp_path))
    ids = np.arange(5, 3_000_005, dtype=np.int32)
    with store.open("/set/ids.npy", "wb") as file:
        np.save(file, ids)
    tracemalloc.start()
    array = tables.open_npy(paths.File("memory://set/ids.npy"), "an array would work")
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(array, np.memmap) and np.array_equal(array, ids)
    assert used < ids.nbytes, "the whole array is in memory"
    [record] = read(Source("memory://set/ids.npy", "tokens"), Report())
    assert isinstance(record.tokens, np.memmap) and np.array_equal(record.tokens, ids)
    assert [path.name for path in tmp_path.rglob("*")] == ["downloads"]
    with pytest.raises(UserError, match="nostore"):
        list(read(Source("nostore://set/none.json"), Report()))


def test_data_in_a_store_are_prepared_once(store, tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSTRIPE_CACHE", str(tmp_path / "cache"))
    tokenizer = Tokenizer.load(FIXTURES / "tiny_tokenizer")
    records = json.loads((FIXTURES / "conversations.json").read_text())
    put(store, "/in/talks.json", json.dumps(records[:5]).encode())
    sources = Sources((Source("memory://in/talks.json"),))
    prepared = prepare(
        sources,
        tokenizer,
        EncodingRules(128),
        "memory://out/prepared/",
        progress=False,
    )
    assert prepared.folder.parent == tmp_path / "cache/prepared" and len(prepared.train) >= 5
    first = [prepared.train[number].tokens.tolist() for number in range(len(prepared.train))]
    assert store.isfile(f"/out/prepared/{prepared.folder.name}/index.npz")
    shutil.rmtree(tmp_path / "cache")  # as on another machine
    monkeypatch.setattr("data.prepare._build", lambda *_: pytest.fail("prepared again"))
    again = prepare(
        sources,
        tokenizer,
        EncodingRules(128),
        "memory://out/prepared",
        progress=False,
    )
    assert [again.train[number].tokens.tolist() for number in range(len(again.train))] == first
    assert again.folder == tmp_path / "cache/shards" / prepared.folder.name
    assert again.report.records == 5


def test_a_store_gets_the_data_that_an_interrupted_start_or_its_owner_left_out(
    store, tmp_path, monkeypatch
):
    """The copy in this machine's cache does not count as the folder in the store."""
    monkeypatch.setenv("LONGSTRIPE_CACHE", str(tmp_path / "cache"))
    tokenizer = Tokenizer.load(FIXTURES / "tiny_tokenizer")
    records = json.loads((FIXTURES / "conversations.json").read_text())
    put(store, "/in/talks.json", json.dumps(records[:5]).encode())
    sources = Sources((Source("memory://in/talks.json"),))

    def prepared_in(folder):
        target = f"memory:/{folder}"
        prepared = prepare(sources, tokenizer, EncodingRules(128), target, progress=False)
        assert prepared.train[0].tokens.size
        found = store.find(folder)
        return {name.removeprefix(folder): store.cat_file(name) for name in found}

    whole = prepared_in("/undisturbed")
    assert whole and prepared_in("/another") == whole
    shutil.rmtree(tmp_path / "cache")
    upload, left = paths.put_file, iter(range(3))

    def refused(local, target):
        if next(left, None) is None:
            raise UserError("no permission")
        upload(local, target)

    monkeypatch.setattr(paths, "put_file", refused)
    with pytest.raises(UserError, match="no permission"):
        prepared_in("/interrupted")
    monkeypatch.setattr(paths, "put_file", upload)
    assert prepared_in("/interrupted") == whole
    shutil.rmtree(tmp_path / "cache")  # so that only the small files are copied from the store
    assert prepared_in("/interrupted") == whole
    store.rm("/interrupted", recursive=True)
    assert prepared_in("/interrupted") == whole


def test_a_folder_is_downloaded_completely_or_not_at_all(store, tmp_path):
    """Without the file that is uploaded last it is incomplete and is not used."""
    for name in ("z.npz", "a/b"):
        (tmp_path / "from" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "from" / name).write_text(name)
    paths.upload(tmp_path / "from", "memory://set", "z.npz")
    paths.download("memory://set", tmp_path / "to", "missing", Path.exists)
    assert not (tmp_path / "to").exists()
    paths.download("memory://set", tmp_path / "to", "z.npz", Path.exists)
    assert (tmp_path / "to/a/b").read_text() == "a/b" and (
        tmp_path / "to/z.npz"
    ).read_text() == "z.npz"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["from", "to"]


def test_an_unreachable_store_is_a_one_line_error(monkeypatch):
    """Stores' libraries raise their own errors: botocore's NoCredentialsError is a plain
    Exception."""

    def unreachable(self, path, **options):
        raise Exception("Unable to locate credentials\nsee the manual")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "isdir", unreachable)
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", unreachable)
    for look in (lambda: Source("memory://a.json").files(), paths.File("memory://a.json").size):
        with pytest.raises(UserError, match=r"^memory://a\.json: Unable to locate credentials$"):
            look()


@pytest.mark.parametrize(
    "path",
    ["github://org:repo@/a.txt", "data:,https://a", "zip://a.txt::memory://a.zip", "reference://a"],
)
def test_only_known_stores_are_read(path):
    with pytest.raises(UserError, match=r"is not a supported store; gs, .* are$"):
        Source(path, "text").files()


UNREAD = {
    "a.jsonl": True,
    "more/b.jsonlines": True,
    "more/c.JSON.gz": True,
    "d.jsonl.lz4": False,
    "e.json.bak": False,
    "more/f.xlsx": False,
    "g": False,
    ".ipynb_checkpoints/a-checkpoint.jsonl": False,
    "more/._a.jsonl": False,
}
ABOUT = ("README.md", "LICENSE", "more/readme.txt", ".gitattributes", ".git/HEAD", "_SUCCESS")


@pytest.mark.parametrize("kind", ["local", "store"])
def test_files_of_a_folder_that_are_not_read_are_named(tmp_path, store, kind):
    """Those with other suffixes and hidden ones, which the library datasets leaves out too."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / ".data" / "chats"
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    for number, name in enumerate([*UNREAD, *ABOUT]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({**talk, "id": number}).encode() + b"\n"
        (folder / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    prepared = tmp_path / "prepared"
    path = str(folder)
    if kind == "store":
        path = "memory://chats"
        for name in (*UNREAD, *ABOUT):
            put(store, f"/chats/{name}", (folder / name).read_bytes())
    source = Source(path)
    read_names = sorted(name for name, is_read in UNREAD.items() if is_read)
    assert [str(file).split("chats/")[1] for file in source.files()] == read_names
    theirs = {Path(name) for name in datasets.data_files.resolve_pattern("**", str(folder))}
    names = {file.relative_to(folder).as_posix() for file in theirs}
    assert {*UNREAD} - names == {name for name in UNREAD if "/." in f"/{name}"}
    suffixes = (".json", ".jsonl", ".jsonlines")
    unread = sorted(name for name, is_read in UNREAD.items() if not is_read)
    assert source_files.find(path, suffixes).unread == unread
    tokenizer = Tokenizer.load(FIXTURES / "tiny_tokenizer")
    source = Source(path, template="vicuna_v1.1")
    (note,) = prepare(Sources((source,)), tokenizer, EncodingRules(64), prepared).report.notes
    assert note.startswith(f"not read: {', '.join(unread[:5])} and 1 more; files whose names end")
    for name in read_names:
        (store.rm(f"/chats/{name}") if kind == "store" else (folder / name).unlink())
    with pytest.raises(UserError, match=r"no \.json .*file in this folder \(found \.ipynb_check"):
        source.files()


def test_a_folder_of_texts_says_how_texts_are_read(tmp_path):
    (tmp_path / "book.TXT").write_text("Once upon a time.", encoding="utf-8")
    with pytest.raises(UserError, match=r"\(found book\.TXT\)") as caught:
        Source(str(tmp_path)).files()
    assert f"--data.sources '[{{path: {tmp_path}, format: text}}]' would work" in str(caught.value)
    hidden = tmp_path / "other/.hidden/a.txt"
    hidden.parent.mkdir(parents=True)
    hidden.touch()
    for format in ("preference", "text"):
        with pytest.raises(UserError, match=r", would work$") as caught:
            Source(str(tmp_path / "other"), format=format).files()
        assert "for texts" not in str(caught.value)


def test_a_pattern_stands_for_objects_of_a_bucket(gcs):
    names = ("chats/train-0.txt", "chats/train-01.txt", "chats/train/2.txt", "chats/test.txt")
    for name in names:
        gcs.store.objects["bucket", name] = name.encode(), 1
    for pattern, expected in {
        "gs://bucket/chats/train*": names[:3],
        "gs://bucket/chats/train-?.txt": names[:1],
        "gs://bucket/c*": (names[3], *names[:3]),
    }.items():
        files = source_files.find(pattern, (".txt",)).files
        assert [str(file) for file in files] == [f"gs://bucket/{name}" for name in expected]
    gcs.store.objects["bucket", "new.txt"] = b"", 1
    assert paths.File("gs://bucket/new.txt").exists()  # no listing is remembered


@pytest.fixture
def quick_retries(gcs, monkeypatch):
    """gcsfs and `paths` retry without waiting."""
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda _: sleep(0))
    monkeypatch.setattr(paths, "_FIRST_WAIT", 0)


@pytest.mark.parametrize(
    ("status", "kind", "reason"),
    [(403, UserError, r"no permission \(Forbidden: .*"), (503, TransientError, "refused, 503")],
)
def test_a_store_that_does_not_answer_is_not_an_empty_one(
    gcs, quick_retries, tmp_path, status, kind, reason
):
    url = "gs://bucket/set"
    gcs.store.objects["bucket", "set/a.jsonl"] = b"{}", 1
    assert paths.File(f"{url}/a.jsonl").exists() and not paths.File(f"{url}/b.jsonl").exists()
    gcs.store.refused = lambda *_: status
    for look in (
        paths.File(f"{url}/a.jsonl").exists,
        lambda: paths.download(url, tmp_path / "to", "a.jsonl", Path.exists),
        lambda: paths.remove_tree(url),
    ):
        with pytest.raises(UserError, match=rf"^gs://bucket/set[/.\w]*: {reason}") as error:
            look()
        assert type(error.value) is kind
    with pytest.raises(UserError, match=r"^gs://bucket/set/a\.jsonl: |^refused, 503") as error:
        list(read(Source(f"{url}/a.jsonl"), Report()))
    assert is_transient(error.value) == (status == 503)


@pytest.mark.parametrize("kind", [OSError, FileNotFoundError])
def test_a_mount_that_fails_is_not_an_absent_file(tmp_path, monkeypatch, kind):
    """Some libraries turn any error into that of an absent file."""

    def fails(self, path, **_):
        raise kind(path) from OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(type(fsspec.filesystem("file")), "info", fails)
    with pytest.raises((OSError, TransientError)):
        paths.File(str(tmp_path / "a.jsonl")).exists()


def test_a_stores_numbered_error_names_the_path(monkeypatch):
    """s3fs gives its errors the numbers of similar ones of a disk."""

    def fails(self, path, **_):
        raise OSError(errno.EBUSY, "Please reduce your request rate.") from Exception("SlowDown")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", fails)
    with pytest.raises(TransientError, match=r"^memory://bucket/a\.jsonl: .*reduce your request"):
        paths.File("memory://bucket/a.jsonl").exists()


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize(
    ("status", "reason"),
    [(403, "no permission"), (404, "no such file"), (503, "refused, 503")],
)
def test_a_failed_read_names_the_file(gcs, quick_retries, name, status, reason):
    text = random.Random(0).randbytes(1 << 18).hex().encode()
    file = paths.File(f"gs://bucket/{name}")
    stored = gzip.compress(text) if name.endswith(".gz") else text
    gcs.store.objects["bucket", name] = stored, 1
    with file.open_decompressed() as opened:
        assert opened.read() == text
    with (
        pytest.raises(UserError, match=rf"^gs://bucket/{name}: {reason}") as error,
        file.open_decompressed() as opened,
    ):
        gcs.store.refused = lambda *_: status
        opened.read()
    assert is_transient(error.value) == (status == 503)


@pytest.mark.parametrize("root", ["local", "memory://patterns"])
def test_the_last_part_of_a_path_may_be_a_pattern(store, tmp_path, root):
    """It stands for files and folders, unless a file has this very name; the shell agrees."""
    system = store if paths.is_remote(root) else fsspec.filesystem("file", auto_mkdir=True)
    root = root if paths.is_remote(root) else str(tmp_path / root)
    names = ("train-0.txt", "train-1.txt", "train/2.txt", "train.csv.bak", "test-0.txt", "x[0].txt")
    for name in names:
        put(system, f"{root}/{name}", name.encode())

    def texts(pattern):
        return [item.text for item in read(Source(f"{root}/{pattern}", "text"), Report())]

    shell = {
        "train-*": ["train-0.txt", "train-1.txt"],
        "train*": ["train-0.txt", "train-1.txt", "train/2.txt"],
        "t*-0.txt": ["test-0.txt", "train-0.txt"],
        "train-[1-9].txt": ["train-1.txt"],
        "train-?.txt": ["train-0.txt", "train-1.txt"],
        "x[0].txt": ["x[0].txt"],
    }
    for pattern, expected in shell.items():
        assert texts(pattern) == expected
        if not paths.is_remote(root) and pattern != "x[0].txt":
            command = ["bash", "-c", f"cd {root} && find {pattern} -name '*.txt' | LC_ALL=C sort"]
            assert subprocess.check_output(command, text=True).split() == expected
    notes = Source(f"{root}/train*", "text").notes(is_held_out=False)
    assert [note.partition(";")[0] for note in notes] == ["not read: train.csv.bak"]
    for pattern in ("x*.md", "none*", "no/such*"):
        with pytest.raises(UserError, match=r"no \.txt .* file that this pattern stands for"):
            texts(pattern)
    for pattern in ("**/2.txt", "t*/2.txt", "t*/*.txt"):
        with pytest.raises(UserError, match="only the last part of a path may be a pattern"):
            texts(pattern)
