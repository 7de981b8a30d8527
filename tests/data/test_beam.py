"""Prepared data are byte for byte the same whether one process or Beam's workers make them."""

import errno
import gzip
import json
import os
import resource
import signal
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from data import paths, record_store
from data.clean import SETS, CleanConfig
from data.encode import EncodingRules
from data.engine import PROCESSES
from data.errors import UserError
from data.prepare import prepare
from data.report import SourceReport
from data.sources import Source, Sources
from data.tokenizer import Tokenizer
from scripts.prepare import main

pytest.importorskip("apache_beam")
from data.beam import Beam

LENGTH = 64
FIXTURES = Path(__file__).parents[2] / "data/fixtures"
RULES = EncodingRules(LENGTH, clean=CleanConfig(**SETS["scraped"]))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(FIXTURES / "tiny_tokenizer")


def _chat(question, answer, **more):
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": turns, **more}


def _row(name, parent, role, text):
    return {"message_id": name, "parent_id": parent, "role": role, "text": text}


def _contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _both(tmp_path, sources, tokenizer, rules=RULES):
    """Returns the data that one process and Beam prepare."""
    results = [
        prepare(sources, tokenizer, rules, tmp_path / name, progress=False, engine=engine)
        for name, engine in (("one", PROCESSES), ("beam", Beam()))
    ]
    assert not list((tmp_path / "beam").glob(".*")), "the workers' folder is left behind"
    assert [prepared.folder.name for prepared in results[:1]] == [results[1].folder.name]
    return results


def _write_every_shape(folder):
    """Writes files that repeat each other's conversations, contain rows of trees, and have unusable
    records."""
    chats = [_chat(f"Question {number}?", f"Answer {number}. " * 9) for number in range(20)]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, [*chats[:8], {"x": 1}, chats[2]])))
    (folder / "b.json.gz").write_bytes(gzip.compress(json.dumps([*chats[5:14], 3]).encode()))
    table = pyarrow.Table.from_pylist([*chats[10:], {"conversations": []}])
    parquet.write_table(table, folder / "c.parquet")
    (folder / "d.json").write_text(json.dumps({"version": 1}))


@pytest.fixture
def sources(tmp_path):
    folders = {name: tmp_path / "in" / name for name in ("chats", "trees", "texts", "ids")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    _write_every_shape(folders["chats"])
    question = _row("1", None, "prompter", "Who?")
    (folders["trees"] / "a.jsonl").write_text(json.dumps(question))
    answers = [_row(str(number), "1", "assistant", f"Me {number}.") for number in (2, 3)]
    (folders["trees"] / "b.jsonl").write_text("\n".join(map(json.dumps, [*answers, answers[0]])))
    for number in range(3):
        (folders["texts"] / f"{number}.txt").write_text(f"Book {number}. " * 60 + "é" * number)
    np.save(folders["ids"] / "0.npy", np.arange(200, dtype=np.uint16))
    (folders["ids"] / "1.jsonl").write_text(
        "\n".join(
            json.dumps({"tokens": [1, 2, 3 + n], "labels": [-100, 2, 3 + n]}) for n in range(3)
        )
    )
    return Sources(
        (
            Source(str(folders["chats"]), template="vicuna_v1.1", weight=0.5),
            Source(str(folders["trees"]), template="vicuna_v1.1"),
            Source(str(FIXTURES / "dirty.json"), template="vicuna_v1.1"),
            Source(str(folders["texts"]), "text"),
            Source(str(folders["ids"]), "tokens"),
        )
    )


def test_beam_writes_the_files_of_one_process_for_every_shape(
    sources, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(record_store, "RECORDS_IN_A_FILE", 7)  # shards begin and end within parts
    held_out = (Source(str(FIXTURES / "dirty.json"), template="vicuna_v1.1"),)
    sources = replace(sources, held_out=held_out, held_out_fraction=0.2)
    one, beam = _both(tmp_path, sources, tokenizer)
    contents = _contents(one.folder)
    assert contents == _contents(beam.folder)
    assert sum("array_record" in name for name in contents) > 5
    chats, trees = one.report.sources[:2]
    # By hand: of 20 conversations, b repeats some of a.jsonl, and c some of b.
    assert chats.kept == 20 and chats.dropped["duplicate"] == 1 + 3 + 4
    assert trees.kept == 1 and one.train.sources.tolist().count(1) in (0, 1)
    dropped = [json.loads(line) for line in contents["dropped.jsonl"].splitlines()]
    numbers = [(entry["source"], entry["record"]) for entry in dropped]
    assert numbers == sorted(numbers) and len(set(numbers)) == len(numbers)
    last = [beam.train[number].tokens.tolist() for number in range(len(beam.train))][-9:]
    assert [1, 2, 3] in last or [1, 2, 4] in last or [1, 2, 5] in last


def test_near_duplicates_match_one_process_across_files_and_shapes(sources, tokenizer, tmp_path):
    for name in ("chats", "texts"):
        folder = tmp_path / "in" / name
        long = " ".join(f"w{number}" for number in range(80))
        for number in range(4):
            text = f"{long} {number}"
            content = json.dumps(_chat("Go on.", text)) if name == "chats" else text
            (folder / f"{3 - number}-near.{'jsonl' if name == 'chats' else 'txt'}").write_text(
                content
            )
    near = replace(RULES, clean=replace(RULES.clean, near_duplicates=0.8))
    one, beam = _both(tmp_path, sources, tokenizer, near)
    contents = _contents(one.folder)
    assert contents == _contents(beam.folder)
    assert [source.dropped["near duplicate"] for source in one.report.sources] == [3, 0, 1, 3, 0]
    kept = {
        json.loads(line)["near_duplicate_of"]["file"]
        for line in contents["dropped.jsonl"].splitlines()
        if b"near_duplicate_of" in line
    }
    assert len(kept) == 3


def test_workers_write_to_a_store_that_fails_every_fifth_request(
    sources, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(record_store, "RECORDS_IN_A_FILE", 7)
    monkeypatch.setenv("LONGSTRIPE_CACHE", str(tmp_path / "cache"))
    store, results = tmp_path / "store", []
    one = prepare(sources, tokenizer, RULES, tmp_path / "one", progress=False)
    failed = _failing_store(store, monkeypatch)
    in_store = partial(prepare, sources, tokenizer, RULES, f"file://{store}")
    write = record_store.write_metadata
    monkeypatch.setattr(record_store, "write_metadata", _raising)
    with pytest.raises(RuntimeError, match="killed"):  # after all shards were written
        in_store(progress=False, engine=Beam())
    monkeypatch.setattr(record_store, "write_metadata", write)
    assert list(store.glob("*/documents/*")) and not list(store.glob("*/index.npz"))
    for _ in range(2):
        results.append(in_store(progress=False, engine=Beam()))
    assert _contents(store / one.folder.name) == _contents(one.folder)
    assert [path.name for path in store.iterdir()] == [one.folder.name], "workers' folder left"
    assert len(failed) > 20 and results[1].train[0].tokens.tolist() == one.train[0].tokens.tolist()


def _raising(*_):
    raise RuntimeError("killed")


def _failing_store(store, monkeypatch):
    """Makes every fifth request to a folder that acts as a store fail; returns the failed ones."""
    file_system, calls, failed = type(paths.fsspec.filesystem("file")), [], []

    def failing(name, method):
        def call(self, *args, **kwargs):
            if any(str(arg).startswith(str(store)) for arg in args):
                calls.append(name)
                if len(calls) % 5 == 0:
                    failed.append(name)
                    raise OSError(errno.ETIMEDOUT, "timed out")
            return method(self, *args, **kwargs)

        return call

    for name in ("isfile", "exists", "size", "open", "get_file", "put_file", "makedirs", "find"):
        monkeypatch.setattr(file_system, name, failing(name, getattr(file_system, name)))
    monkeypatch.setattr(paths, "_FIRST_WAIT", 0.001)
    return failed


def test_unpaired_preferences_borrow_from_the_previous_record_across_files(tokenizer, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for file in range(3):
        records = [
            {"prompt": f"{file} {number}?", "completion": f"It is {number}.", "label": number > 0}
            for number in range(3)
        ]
        (folder / f"{file}.jsonl").write_text("\n".join(map(json.dumps, records)))
    source = Source(str(folder), "preference", template="vicuna_v1.1")
    rules = replace(RULES, context_length=512, unpaired=True)
    one, beam = _both(tmp_path, Sources((source,)), tokenizer, rules)
    assert len(one.train) == 9 and _contents(one.folder) == _contents(beam.folder)


def test_beam_refuses_with_the_message_of_one_process(tokenizer, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps([_chat("a", "b")]))
    broken, unusable = folder / "b.json", tmp_path / "none.json"
    broken.write_bytes(b"\xff\xfe\x00")
    unusable.write_text(json.dumps([_chat("a", "")]))
    for path in (folder, unusable):
        sources, messages = Sources((Source(str(path), template="vicuna_v1.1"),)), []
        for engine in (PROCESSES, Beam()):
            target = tmp_path / type(engine).__name__
            with pytest.raises(UserError) as error:
                prepare(
                    sources,
                    tokenizer,
                    EncodingRules(LENGTH),
                    target,
                    progress=False,
                    engine=engine,
                )
            messages.append(str(error.value))
        assert messages[0] == messages[1] and "\n" not in messages[0]


def test_rerunning_after_a_failure_keeps_finished_work(sources, tokenizer, tmp_path, monkeypatch):
    write, written = record_store.write_shard, []

    def write_few(path, serialized):
        written.append(path.name)
        if len(written) in (3, 12):
            raise RuntimeError("the machine is gone")
        return write(path, serialized)

    monkeypatch.setattr(record_store, "RECORDS_IN_A_FILE", 7)
    one = prepare(sources, tokenizer, RULES, tmp_path / "one", progress=False)
    monkeypatch.setattr(record_store, "write_shard", write_few)
    by_beam = partial(prepare, sources, tokenizer, RULES, tmp_path / "beam")
    for _ in range(2):
        with pytest.raises(UserError, match=r"direct runner failed: .*the machine is gone"):
            by_beam(progress=False, engine=Beam())
    beam = by_beam(progress=False, engine=Beam())
    assert _contents(one.folder) == _contents(beam.folder)
    parts = 3 + 1 + 1 + 3 + 2 + 1  # files per source; a source of tree rows is one part
    shards = sum("array_record" in name for name in _contents(one.folder))
    assert len(written) == parts + shards + 2, "more than the failed files are written again"


def test_a_workers_limit_on_file_sizes_is_named_and_the_same_command_continues(tokenizer, tmp_path):
    """As after a full disk, which differs in the message."""
    folder = tmp_path / "in"
    folder.mkdir()
    for file in range(2):
        chats = [_chat(f"{file} {number}?", f"{number} " * 40) for number in range(600)]
        (folder / f"{file}.jsonl").write_text("\n".join(map(json.dumps, chats)))
    one, beam = (tmp_path / name for name in ("one", "beam"))
    sources = Sources((Source(str(folder), template="vicuna_v1.1"),))
    expected = prepare(sources, tokenizer, EncodingRules(LENGTH), one, progress=False)
    by_beam = partial(prepare, sources, tokenizer, EncodingRules(LENGTH), beam)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, before[1]))  # the job itself fits
    try:
        with pytest.raises(UserError, match=r"File too large while a part was .*ulimit") as error:
            by_beam(progress=False, engine=Beam())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(error.value).startswith(tempfile.gettempdir()) and "\n" not in str(error.value)
    assert not [path for path in _contents(beam) if "/parts/" in path or path[0] != "."]
    again = by_beam(progress=False, engine=Beam())
    assert _contents(again.folder) == _contents(expected.folder)


def test_beam_reads_a_cached_data_set_of_the_hub(tokenizer, tmp_path, monkeypatch):
    cache = tmp_path / "hub/datasets--me--chats"
    snapshot = cache / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("a" * 40)
    chats = [_chat(f"{number}?", f"It is {number}.") for number in range(9)]
    (snapshot / "a.jsonl").write_text("\n".join(map(json.dumps, chats[:6])))
    parquet.write_table(pyarrow.Table.from_pylist(chats[3:]), snapshot / "b.parquet")
    (snapshot / "README.md").write_text("Chats.")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    source = Source("hf://datasets/me/chats", template="vicuna_v1.1")
    one, beam = _both(tmp_path, Sources((source,)), tokenizer)
    assert one.report.kept == 9 and one.report.sources[0].dropped["duplicate"] == 3
    assert _contents(one.folder) == _contents(beam.folder)


def test_two_dask_workers_write_the_files_of_one_process(sources, tokenizer, tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    near = replace(RULES, clean=replace(RULES.clean, near_duplicates=0.8))
    sources = replace(sources, held_out_fraction=0.2)
    one = prepare(sources, tokenizer, near, tmp_path / "one", progress=False)
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        engine = Beam("dask", (f"--dask_client_address={client.scheduler.address}",))
        dask = tmp_path / "dask"
        prepared = prepare(sources, tokenizer, near, dask, progress=False, engine=engine)
        assert _contents(prepared.folder) == _contents(one.folder)
        engine.run([*range(8)], partial(_note_process, tmp_path))
        assert len(list(tmp_path.glob("process-*"))) == 2, "only one worker works"


def _note_process(folder, number):
    time.sleep(0.1)
    (folder / f"process-{os.getpid()}").touch()
    return ()


def _note_run(folder, number):
    with (folder / f"run-{number}").open("a") as file:
        file.write(f"{os.getpid()}\n")
    return ()


def test_finished_work_is_not_rerun_when_dask_workers_die(tmp_path):
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        engine = Beam("dask", (f"--dask_client_address={client.scheduler.address}",))
        engine.run([*range(8)], partial(_note_run, tmp_path))
        workers = client.run(os.getpid)
        for pid in workers.values():
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while not client.scheduler_info()["workers"].keys().isdisjoint(workers):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        client.wait_for_workers(2, timeout=30)
        # Anything rerun would run before this.
        client.submit(_note_run, tmp_path, 8, priority=-1).result()
    runs = [path.read_text().count("\n") for path in sorted(tmp_path.iterdir())]
    assert runs == [1] * 9


def test_unknown_flags_and_runners_are_refused():
    with pytest.raises(UserError, match=r"--no_such_flag=1 is unknown"):
        Beam("direct", ("--no_such_flag=1",))
    with pytest.raises(UserError, match=r"--runner: found fast; direct, dask, flink"):
        Beam("fast")
    assert Beam("flink", ("--flink_master=host:8081",)).runner == "flink"
    assert Beam("dataflow", ("--project=p", "--region=r", "--temp_location=gs://b/t")).options


def test_a_run_finds_data_that_the_command_prepared_with_beam(small_recipe, tmp_path, capsys):
    command = ["--config", str(small_recipe), "--data.prepared", str(tmp_path / "made")]
    assert main([*command, "--engine", "beam", "--runner", "direct", "--", "--workers=1"]) == 2
    assert "--workers=1 is unknown" in capsys.readouterr().err
    assert main([*command, "--runner", "dask"]) == 2
    assert "--runner dask: only applies to --engine beam" in capsys.readouterr().err
    assert main([*command, "--engine", "beam", "--", "--direct_num_workers=1"]) == 0
    output = capsys.readouterr().out
    assert main(command) == 0 and capsys.readouterr().out == output


def test_counts_of_parts_add_up_to_the_counts_of_one_process():
    """Only the first names are counted individually, whichever part they are in."""
    names = ["b: 1", "a: 2", "a: 3", "a: 2", "c", "d: 1", "a: 3", "b: 2"]
    expected, merged = (SourceReport("", most_names=3) for _ in range(2))
    for name in names:
        expected.drop(name)
        expected.count_kept([name], [name])
    for first in (0, 3):
        part = SourceReport("", most_names=100)
        for name in names[first : first + 3 if not first else None]:
            part.drop(name)
            part.count_kept([name], [name])
        merged.add(part)
    assert expected.to_dict() == merged.to_dict()
    assert expected.unread["other fields"] == 3 and expected.dropped["d"] == 1
