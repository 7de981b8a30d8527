"""Prepared folders and the loader: rows against a simple implementation, reuse, and resuming at a
step."""

import json
import os
import pickle
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest

from data import packing
from data.batch import permute
from data.clean import CleanConfig
from data.encode import Encoder, EncodingRules
from data.errors import UserError
from data.loader import Loader
from data.prepare import prepare
from data.report import Report
from data.sources import Source, Sources, read
from data.templates import render
from data.tokenizer import Tokenizer
from tests.conftest import REPOSITORY

FIXTURES = REPOSITORY / "data/fixtures"
LENGTH = 64  # shorter than most conversations, so that documents are cut
RULES = EncodingRules(LENGTH, clean=CleanConfig(split=False))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(FIXTURES / "tiny_tokenizer")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Returns a file with 60 of the fixtures' conversations."""
    path = tmp_path_factory.mktemp("data") / "small.json"
    path.write_text(json.dumps(json.loads((FIXTURES / "conversations.json").read_text())[:60]))
    return path


def _prepared(source, tokenizer, folder, length=LENGTH):
    return prepare(Sources((source,)), tokenizer, EncodingRules(length), folder, progress=False)


def _with_a_fifth_held_out(path, **options):
    return Sources((Source(str(path), **options),), held_out_fraction=0.2)


@pytest.fixture(scope="module")
def prepared(small, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    return prepare(_with_a_fifth_held_out(small), tokenizer, RULES, folder, progress=False)


def test_documents_match_rendered_conversations_and_splits_are_disjoint(prepared, small, tokenizer):
    expected = {}
    for conversation in read(Source(str(small)), Report()):
        segments = render(conversation.messages, "vicuna_v1.1", tokenizer)
        ids = [token for s in segments for token in s.ids]
        mask = [s.train for s in segments for _ in s.ids]
        for start in range(0, len(ids), LENGTH):
            if any(mask[start + 1 : start + LENGTH]):
                piece = (ids[start : start + LENGTH], mask[start : start + LENGTH])
                expected.setdefault(conversation.id, []).append(piece)
    documents, records = {}, []
    for split in (prepared.train, prepared.held_out):
        records.append(set())
        for number in range(len(split)):
            document = split[number]
            assert (
                document.tokens.dtype == np.int32 and len(document.tokens) == split.lengths[number]
            )
            assert split.trained[number] == document.loss_mask[1:].sum() > 0
            documents.setdefault(document.record_id, []).append(
                (document.tokens.tolist(), document.loss_mask.tolist())
            )
            records[-1].add(document.record_id)
    assert documents == expected
    assert not records[0] & records[1] and 3 <= len(records[1]) <= 24  # 12 on average


def test_rows_follow_the_plan(prepared):
    loader = Loader(prepared, LENGTH, 4, seed=3)
    row = loader.row(5)
    assert {name: (array.dtype, array.shape) for name, array in row.items()} == {
        **dict.fromkeys(
            ["tokens", "targets", "positions", "index", "segment_ids"],
            (np.dtype("int32"), (LENGTH,)),
        ),
        "loss_weights": (np.dtype("float32"), (LENGTH,)),
    }
    for number in range(len(loader) + 2):  # into the second epoch
        row = loader.row(number)
        pieces = loader._plan(number // len(loader)).row(number % len(loader))
        piece_start = 0
        for segment, (document, start, length) in enumerate(pieces, 1):
            for offset in range(length):
                index, source = piece_start + offset, prepared.train[document]
                assert row["segment_ids"][index] == segment and row["positions"][index] == offset
                assert row["tokens"][index] == source.tokens[start + offset]
                last = offset == length - 1
                assert row["targets"][index] == (0 if last else source.tokens[start + offset + 1])
                assert row["loss_weights"][index] == (
                    0 if last else source.loss_mask[start + offset + 1]
                )
            piece_start += length
        assert (
            not row["segment_ids"][piece_start:].any()
            and not row["loss_weights"][piece_start:].any()
        )
        assert row["index"].tolist() == list(range(LENGTH))


def test_batches_depend_only_on_the_step_and_not_on_prefetching(prepared):
    loader = Loader(prepared, LENGTH, 4, seed=3)
    again = Loader(pickle.loads(pickle.dumps(loader.documents)), LENGTH, 4, seed=3)
    ahead = loader.batches(start=7)
    for step in range(7, 7 + 2 * len(loader) // 4):
        batch = next(ahead)
        for name, array in again.batch(step).items():
            np.testing.assert_array_equal(batch[name], array)
            np.testing.assert_array_equal(
                array, np.stack([again.row(4 * step + i)[name] for i in range(4)])
            )
    assert loader.fingerprint == again.fingerprint
    others = [
        Loader(prepared, LENGTH, 4, seed=4),
        Loader(prepared, LENGTH, 2, seed=3),
        Loader(prepared, 32, 4, seed=3),
    ]
    others.append(Loader(prepared, LENGTH, 4, seed=3, split="held_out"))
    assert len({other.fingerprint for other in [loader, *others]}) == 5


def test_record_ids_match_the_documents_of_a_step(prepared):
    """Each listed record has a piece in the batch, and each piece belongs to a listed record."""
    loader = Loader(prepared, LENGTH, 3, seed=3)
    texts = {}
    for number in range(len(prepared.train)):
        document = prepared.train[number]
        texts.setdefault(document.record_id, []).append(",".join(map(str, document.tokens)))
    for step in (0, 2, len(loader)):
        batch, ids = loader.batch(step), loader.record_ids(step)
        assert len(ids) == len(set(ids))
        pieces = {
            ",".join(map(str, tokens[segments == number]))
            for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True)
            for number in range(1, segments.max() + 1)
        }
        assert all(any(piece in text for name in ids for text in texts[name]) for piece in pieces)
        assert all(any(piece in text for piece in pieces for text in texts[name]) for name in ids)


def test_a_held_out_file_that_is_trained_on_too_is_named(small, tokenizer, tmp_path, monkeypatch):
    folder = tmp_path / "sources"
    for name in ("sources/one", "sources/two"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "chats.json").write_bytes(small.read_bytes())
    one, two = "sources/one/chats.json", folder / "two"
    monkeypatch.chdir(tmp_path)
    for train, held_out, both in ((folder, one, True), (one, folder, True), (one, two, False)):
        sources = Sources((Source(str(train)),), (Source(str(held_out)),))
        report = prepare(sources, tokenizer, RULES, tmp_path / "prepared", progress=False).report
        warnings = [line for line in report.summary().splitlines() if "trained on too" in line]
        assert len(warnings) == both, report.summary()
        assert all(line.startswith(f"warning: {held_out}: ") for line in warnings)


def test_one_epoch_of_held_out_counts_each_target_once(prepared):
    loader = Loader(prepared, LENGTH, 5, seed=0, split="held_out")
    batches = list(loader.epoch_batches())
    assert all(batch["tokens"].shape == (5, LENGTH) for batch in batches)
    assert sum(batch["loss_weights"].sum() for batch in batches) == prepared.held_out.trained.sum()


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_last_batch_of_a_run_has_only_the_rows_that_are_left(prepared, epochs):
    """Each document is read `epochs` times. After the run's end, and in other processes' parts,
    rows are empty."""
    endless, loader = (Loader(prepared, LENGTH, 5, seed=3) for _ in range(2))
    loader.end = epochs * len(loader)
    steps = -(-loader.end // 5)
    assert loader.end % 5 and loader.fingerprint == endless.fingerprint
    batches = loader.batches()
    read = [next(batches) for _ in range(steps + 1)]
    targets = sum(batch["loss_weights"].sum() for batch in read)
    assert targets == epochs * prepared.train.trained.sum()
    for step, batch in enumerate(read):
        for row in range(5):
            exists = 5 * step + row < loader.end
            for name, array in endless.row(5 * step + row).items():
                expected = array if exists or name == "index" else np.zeros_like(array)
                np.testing.assert_array_equal(batch[name][row], expected)
        part = loader.batch(step, rows=[0, 4], indices=np.arange(10))
        assert all((part[name] == array[[0, 4], :10]).all() for name, array in batch.items())
        assert loader.lengths(step).sum() == (batch["segment_ids"] > 0).sum()
    last = [loader.row(number)["segment_ids"].max() for number in range(5 * steps - 5, loader.end)]
    assert len(loader.lengths(steps - 1)) == sum(last) > 0
    assert loader.record_ids(steps) == [] and loader.record_ids(steps - 1)


def test_a_sources_weight_does_not_affect_evaluation(prepared, small, tokenizer):
    for weight in (0.01, 2.5):
        sources = _with_a_fifth_held_out(small, weight=weight)
        weighted = prepare(sources, tokenizer, RULES, prepared.folder.parent, progress=False)
        batches = Loader(weighted, LENGTH, 5, seed=0, split="held_out").epoch_batches()
        assert (
            sum(batch["loss_weights"].sum() for batch in batches) == prepared.held_out.trained.sum()
        )
        assert set(weighted.train.weights) == {weight}


def test_a_prepared_folder_is_reused_for_equal_content_and_not_after_any_change(
    prepared, small, tokenizer, tmp_path
):
    folder = prepared.folder.parent
    stamp = (prepared.folder / "index.npz").stat().st_mtime_ns
    moved = tmp_path / "elsewhere.json"
    shutil.copy(small, moved)
    same = prepare(
        _with_a_fifth_held_out(moved, weight=2.0), tokenizer, RULES, folder, progress=False
    )
    assert (
        same.folder == prepared.folder and (same.folder / "index.npz").stat().st_mtime_ns == stamp
    )
    assert (
        same.report.sources[0].path == str(moved) and same.report.kept == prepared.report.kept == 60
    )
    moved.write_text(moved.read_text().replace("Tell me", "Say"))
    sources = _with_a_fifth_held_out(small)
    changed = [
        prepare(other_sources, tokenizer, rules, folder, progress=False)
        for other_sources, rules in (
            (_with_a_fifth_held_out(moved), RULES),
            (sources, replace(RULES, context_length=LENGTH + 1)),
            (replace(sources, held_out_fraction=0.0), RULES),
            (sources, replace(RULES, clean=CleanConfig())),
        )
    ]
    assert len({prepared.folder, *(c.folder for c in changed)}) == 5
    assert not list(folder.glob(".*")), "an incomplete folder is left"


def test_the_date_affects_the_folder_only_if_the_template_writes_it(small, tokenizer, tmp_path):
    folder = shutil.copytree(FIXTURES / "tiny_tokenizer", tmp_path / "tokenizer")
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}" + turns)
    folders = {}
    for name, dated in (("writes it", Tokenizer.load(folder)), ("writes none", tokenizer)):
        template = "tokenizer" if name == "writes it" else "vicuna_v1.1"
        folders[name] = {
            prepare(
                _with_a_fifth_held_out(small, template=template),
                dated.with_template_date(date),
                RULES,
                tmp_path / "prepared",
                progress=False,
            ).folder
            for date in (datetime(2024, 3, 4), datetime(2025, 3, 4))
        }
    assert len(folders["writes it"]) == 2 and len(folders["writes none"]) == 1


def test_data_prepared_by_another_process_open_without_their_sources(prepared, tokenizer, tmp_path):
    missing, folder = _with_a_fifth_held_out(tmp_path / "gone.json"), prepared.folder
    opened = prepare(missing, tokenizer, RULES, folder.parent, key=folder.name)
    assert opened.folder == folder and opened.train.fingerprint == prepared.train.fingerprint
    np.testing.assert_array_equal(opened.train[3].tokens, prepared.train[3].tokens)
    with pytest.raises(UserError, match=rf"{tmp_path}/{folder.name}: not found on this machine"):
        prepare(missing, tokenizer, RULES, tmp_path, key=folder.name)


def test_held_out_sources_are_separate_and_epochs_have_their_own_lengths(
    small, tokenizer, tmp_path
):
    sources = (Source(str(small)), Source(str(FIXTURES / "dirty.json"), weight=0.5))
    held_out = (Source(str(FIXTURES / "conversations_held_out.json")),)
    made = prepare(
        Sources(sources, held_out),
        tokenizer,
        EncodingRules(512),
        tmp_path,
        progress=False,
    )
    assert (
        set(made.held_out.sources) == {2}
        and set(made.train.sources) == {0, 1}
        and len(made.held_out) == 120
    )
    loader = Loader(made, 512, 2, seed=0)
    rows = [len(loader._plan(epoch)) for epoch in range(4)]
    assert loader.locate(sum(rows[:3]) + 1) == (3, 1) and loader.locate(rows[0] - 1) == (
        0,
        rows[0] - 1,
    )
    assert loader.batch(40)["tokens"].shape == (2, 512)


@pytest.mark.parametrize("weight", [1.0, 2.5])
def test_concurrent_threads_get_the_same_rows_and_compute_each_plan_once(
    small, tokenizer, tmp_path, weight, monkeypatch
):
    prepared = _prepared(Source(str(small), weight=weight), tokenizer, tmp_path)
    plans = [
        packing.plan(prepared.train.lengths, LENGTH, 0, epoch, prepared.train.weights)
        for epoch in range(3)
    ]
    expected = [(epoch, row) for epoch, plan in enumerate(plans) for row in range(len(plan))]
    planned = []

    def slowly(lengths, context_length, seed, epoch, weights):
        planned.append(epoch)
        time.sleep(0.02)
        return plans[epoch]

    monkeypatch.setattr(packing, "plan", slowly)
    loader = Loader(prepared, LENGTH, 4, seed=0)
    with ThreadPoolExecutor(8) as pool:
        located = list(pool.map(loader.locate, range(len(expected))))
        rows = list(pool.map(lambda item: loader._plan(item.epoch).row(item.row), located))
    assert located == expected and rows == [
        plan.row(row) for plan in plans for row in range(len(plan))
    ]
    assert sorted(planned) == [0, 1, 2]


def _documents(split):
    return [split[number] for number in range(len(split))]


def test_long_conversations_are_split_between_exchanges(tokenizer, tmp_path):
    exchanges = [(f"Question {i}?", "word " * (3 + 5 * i)) for i in range(9)]
    turns = [
        {"from": role, "value": text}
        for pair in exchanges
        for role, text in zip(("human", "gpt"), pair, strict=True)
    ]
    path = tmp_path / "long.json"
    path.write_text(
        json.dumps([{"conversations": [{"from": "system", "value": "Be brief."}, *turns]}])
    )
    prepared = _prepared(Source(str(path)), tokenizer, tmp_path / "prepared", 128)
    texts = [tokenizer.decode(document.tokens) for document in _documents(prepared.train)]
    assert len(texts) >= 3 and all(text.startswith("Be brief. USER: Question") for text in texts)
    assert (
        all(text.rstrip().endswith("word") for text in texts) and max(prepared.train.lengths) <= 128
    )
    questions = [f"Question {i}?" for i in range(9)]
    assert [sum(question in text for text in texts) for question in questions] == [1] * 9
    assert "".join(texts).index(questions[-1]) > "".join(texts).index(questions[0])
    assert prepared.report.repaired == {
        "longer than context_length, split on whole exchanges": 1,
        "white space at the ends of a turn removed": 1,
    }
    last = prepare(
        Sources((Source(str(path)),)),
        tokenizer,
        EncodingRules(128, train_on="last"),
        tmp_path / "prepared",
        progress=False,
    )
    [document] = _documents(last.train)
    trained = tokenizer.decode(document.tokens[document.loss_mask])
    assert trained.split() == ["word"] * 43 and tokenizer.decode(document.tokens) == texts[-1]


def test_texts_and_tokens_are_prepared(small, tokenizer, tmp_path):
    book = "A long story of many words. " * 40
    (tmp_path / "book.txt").write_text(book)
    ready = [
        {"id": "good", "tokens": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
        {"id": "foreign", "tokens": [5, 1024]},
        {"id": "untrained", "tokens": [5, 6], "loss_mask": [1, 0]},
    ]
    (tmp_path / "ready.json").write_text(json.dumps(ready))
    sources = [
        Source(str(small)),
        Source(str(tmp_path / "book.txt"), "text"),
        Source(str(tmp_path / "ready.json"), "tokens"),
    ]
    prepared = prepare(
        Sources(tuple(sources)),
        tokenizer,
        EncodingRules(LENGTH),
        tmp_path / "prepared",
        progress=False,
    )
    documents = _documents(prepared.train)
    ids = np.concatenate([document.tokens for document in documents if document.source == 1])
    assert ids.tolist() == [*tokenizer.encode(book), tokenizer.eos_id]
    assert all(document.loss_mask.all() for document in documents if document.source == 1)
    [document] = [document for document in documents if document.source == 2]
    assert document.tokens.tolist() == [5, 6, 7, 8] and document.loss_mask.tolist() == [
        False,
        False,
        True,
        True,
    ]
    dropped = [json.loads(line) for line in prepared.report.dropped_file.read_text().splitlines()]
    assert [(entry["source"], entry["record"], entry["reason"]) for entry in dropped] == [
        (2, 2, "an id that the tokenizer does not have"),
        (2, 3, "no trained token"),
    ]
    assert str(prepared.report.dropped_file) in prepared.report.summary()
    assert prepared.report.sources[1].repaired == {"longer than context_length, cut": 1}


def test_one_process_is_started_per_usable_core(small, tokenizer, tmp_path, monkeypatch):
    started, cores = [], os.sched_getaffinity(0)
    monkeypatch.setattr("data.job.WORTH_PROCESSES", 1)
    monkeypatch.setattr(
        "data.job.encode_all",
        lambda encoder, items, processes: (
            started.append(processes) or ((item, encoder.encode(item)) for item in items)
        ),
    )
    os.sched_setaffinity(0, {min(cores)})
    try:
        _prepared(Source(str(small)), tokenizer, tmp_path)
    finally:
        os.sched_setaffinity(0, cores)
    assert started == [1]


@pytest.mark.parametrize("name", ["tiny_tokenizer", "tiny.model"])
def test_several_processes_write_the_same_data_as_one(small, name, tmp_path, monkeypatch):
    """Documents in order, dropped records with their numbers; also with a sentencepiece model."""
    thought = [{"from": "human", "value": "?</s>"}, {"from": "gpt", "value": "<think> Hm."}]
    (tmp_path / "thought.json").write_text(json.dumps([{"conversations": thought}]))
    paths = (small, FIXTURES / "dirty.json", tmp_path / "thought.json")
    sources = Sources(tuple(Source(str(path), template="vicuna_v1.1") for path in paths))
    made = {}
    for min_bytes in (1 << 30, 1):
        monkeypatch.setattr("data.job.WORTH_PROCESSES", min_bytes)
        tokenizer = (
            Tokenizer.load(FIXTURES / name).with_controls(["<think>"]).with_text_tokens(["<think>"])
        )
        made[min_bytes] = prepare(
            sources,
            tokenizer,
            EncodingRules(LENGTH),
            tmp_path / str(min_bytes),
            progress=False,
        )
    single, several = made.values()
    assert [
        (d.tokens.tolist(), d.loss_mask.tolist(), d.record_id) for d in _documents(single.train)
    ] == [(d.tokens.tolist(), d.loss_mask.tolist(), d.record_id) for d in _documents(several.train)]
    assert single.train[len(single.train) - 1].tokens.tolist().count(tokenizer.vocab_size - 1) == 1
    assert single.report.sources[2].repaired == {
        "control token in a turn's text, encoded as plain text: </s>": 1
    }
    assert (
        single.report.sources == several.report.sources
        and single.folder.name == several.folder.name
    )
    dropped = [
        sorted(made.report.dropped_file.read_text().splitlines()) for made in (single, several)
    ]
    assert dropped[0] == dropped[1] and any(
        "tool" in json.loads(line)["reason"] for line in dropped[0]
    )


def test_the_same_bytes_under_another_kind_of_name_are_prepared_again(tokenizer, tmp_path):
    """The name decides how a file is read: a table's rows are cut at commas or at tabs."""
    rows = "text\n" + "".join(f"story {number}\n" for number in range(20))
    folders = set()
    for name in ("rows.csv", "rows.tsv", "rows.txt", "README.md"):
        (tmp_path / name).write_text(rows)
        source = Source(str(tmp_path / name), "text")
        prepared = _prepared(source, tokenizer, tmp_path / "made")
        folders.add(prepared.folder)
    assert len(folders) == 4


def test_weights_mix_sources_and_the_mix_resumes(small, tokenizer, tmp_path):
    """Each source is used as often as its weight says; another loader that starts later gives the
    same batches."""
    (tmp_path / "book.txt").write_text("Once upon a time there was a word. " * 120)
    sources = [
        Source(str(small), weight=0.5),
        Source(str(tmp_path / "book.txt"), "text", weight=3.0),
    ]
    prepared = prepare(
        Sources(tuple(sources)),
        tokenizer,
        EncodingRules(LENGTH),
        tmp_path / "prepared",
        progress=False,
    )
    loader = Loader(prepared, LENGTH, 4, seed=1)
    visits, epochs = np.zeros(2), 40
    for epoch in range(epochs):
        visits += np.bincount(prepared.train.sources[loader._plan(epoch).pieces[:, 0]], minlength=2)
    shares = visits / epochs / np.bincount(prepared.train.sources)
    assert shares.tolist() == [0.5, 3.0]
    resumed = Loader(prepared, LENGTH, 4, seed=1).batches(start=50)
    for step in range(50, 60):
        batch = next(resumed)
        assert all((batch[name] == array).all() for name, array in loader.batch(step).items())
    other = prepare(
        Sources((sources[0], Source(sources[1].path, "text", weight=2.0))),
        tokenizer,
        EncodingRules(LENGTH),
        tmp_path / "prepared",
        progress=False,
    )
    assert (
        other.folder == prepared.folder
        and Loader(other, LENGTH, 4, seed=1).fingerprint != loader.fingerprint
    )


def test_only_fractional_weights_depend_on_their_rules(small, tokenizer, tmp_path, monkeypatch):
    """Runs with whole weights, however old, continue when the rules of fractional ones change."""

    def fingerprint(weight):
        source = Source(str(small), weight=weight)
        prepared = _prepared(source, tokenizer, tmp_path)
        return Loader(prepared, LENGTH, 4, seed=1).fingerprint

    before = [fingerprint(weight) for weight in (1.0, 3.0, 2.5)]
    monkeypatch.setattr(packing, "WEIGHT_RULES", "other")
    after = [fingerprint(weight) for weight in (1.0, 3.0, 2.5)]
    assert before[:2] == after[:2] and before[2] != after[2]


def test_weights_that_leave_no_document_are_refused_by_field(small, tokenizer, tmp_path):
    prepared = _prepared(Source(str(small), weight=1e-9), tokenizer, tmp_path)
    message = r"^data\.sources: their weights, 1e-09 to 1e-09, leave no document in 100 epochs; larger ones would work$"
    with pytest.raises(UserError, match=message):
        Loader(prepared, LENGTH, 4, seed=1).locate(0)


def test_sources_without_documents_are_refused(small, tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"data\.sources is empty"):
        prepare(Sources(()), tokenizer, EncodingRules(64), tmp_path)
    with pytest.raises(UserError, match="no such file"):
        _prepared(Source(str(tmp_path / "none.json")), tokenizer, tmp_path, 64)
    bad = tmp_path / "bad.json"
    bad.write_text('[{"conversations": [{"from": "gpt", "value": "alone"}]}]')
    with pytest.raises(UserError, match="1 x no human turn"):
        _prepared(Source(str(bad)), tokenizer, tmp_path / "out", 64)
    with pytest.raises(UserError, match="no document"):
        Loader(
            _prepared(Source(str(small)), tokenizer, tmp_path, 64),
            64,
            1,
            0,
            split="held_out",
        )
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("context_length", "fraction", "words"),
    [
        (
            1,
            0.0,
            r"data\.context_length: found 1, which leaves no token to predict; 2 or more would work",
        ),
        (
            64,
            1.0,
            r"data\.held_out_fraction: found 1\.0; a number from 0 to less than 1 would work",
        ),
        (
            64,
            0.9999,
            r"data\.held_out_fraction: found 0\.9999, which takes the only record and leaves none to train on",
        ),
    ],
)
def test_an_invalid_option_is_refused_by_field(
    tokenizer, tmp_path, context_length, fraction, words
):
    (tmp_path / "book.txt").write_text("Once upon a time there was a word. " * 4)
    with pytest.raises(UserError, match=f"^{words}"):
        prepare(
            Sources((Source(str(tmp_path / "book.txt"), "text"),), held_out_fraction=fraction),
            tokenizer,
            EncodingRules(context_length),
            tmp_path / "prepared",
            progress=False,
        )


def test_permute_permutes_every_array(prepared):
    batch = Loader(prepared, LENGTH, 2, seed=0).batch(0)
    order = np.arange(LENGTH).reshape(4, -1).T.ravel()
    permuted = permute(batch, order)
    for name, array in batch.items():
        for index, original in enumerate(order):
            assert (permuted[name][:, index] == array[:, original]).all()
    with pytest.raises(ValueError, match="the order has shape"):
        permute(batch, order[:-1])


def _damage(path, kind):
    content = bytearray(path.read_bytes())
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif kind in ("emptied", "halved"):
        path.write_bytes(content[: len(content) // 2 * (kind == "halved")])


_PREPARED_FILES = (
    "report.json",
    "index.npz",
    "documents/dataset_info.json",
    "documents/features.json",
    "documents/longstripe-documents.array_record-00000",
)


_DAMAGES = ("removed", "emptied", "halved", "flipped", "folder")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("index.npz", kind) for kind in _DAMAGES),
        *((name, "removed") for name in _PREPARED_FILES if name != "index.npz"),
        *((name, "flipped") for name in _PREPARED_FILES if name != "index.npz"),
    ],
)
def test_damaged_prepared_data_are_named_and_prepared_again(
    prepared, small, tokenizer, tmp_path, name, kind, capfd
):
    folder = shutil.copytree(prepared.folder, tmp_path / prepared.folder.name)
    _damage(folder / name, kind)
    again = prepare(_with_a_fifth_held_out(small), tokenizer, RULES, tmp_path, progress=False)
    warned = capfd.readouterr().err
    if (name, kind) == ("index.npz", "removed"):  # like a folder that is not complete
        assert not warned
    else:
        assert warned.startswith(f"warning: {folder}: {name} is damaged (") and warned.endswith(
            "; rebuilding it\n"
        )
        assert warned.count("\n") == 1
    for split in ("train", "held_out"):
        old, new = getattr(prepared, split), getattr(again, split)
        assert len(new) == len(old) and all(
            (new[i].tokens == old[i].tokens).all() for i in range(len(new))
        )
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_documents_damaged_after_the_start_are_named(
    prepared, small, tokenizer, tmp_path, monkeypatch
):
    """Files too large to be hashed at each start have separate checksums."""
    monkeypatch.setattr("data.folders.HASHED_AT_START", 0)
    folder = shutil.copytree(prepared.folder, tmp_path / prepared.folder.name)
    path = folder / _PREPARED_FILES[-1]
    content = bytearray(path.read_bytes())
    content[len(content) // 4 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 4)
    path.write_bytes(content)
    sources = _with_a_fifth_held_out(small)
    train = prepare(sources, tokenizer, RULES, tmp_path, progress=False).train
    with pytest.raises(
        UserError,
        match=rf"^{folder}: a document cannot be read \(.*\); if this folder is deleted, the same",
    ):
        [train[number] for number in range(len(train))]


def test_an_array_of_tokens_is_streamed_and_an_invalid_one_refused_early(tokenizer, tmp_path):
    """The documents match the same numbers as JSON; only a small part of a long array is in
    memory."""
    import tracemalloc

    numbers = (np.arange(4_000_000) * 7919 % 1000).astype(np.uint16)
    for name, array in (("short", numbers[:201]), ("long", numbers)):
        np.save(tmp_path / f"{name}.npy", array)
    (tmp_path / "short.json").write_text(json.dumps([{"tokens": numbers[:201].tolist()}]))
    short, same = (
        _prepared(Source(str(tmp_path / name), "tokens"), tokenizer, tmp_path / "prepared", 50)
        for name in ("short.npy", "short.json")
    )
    assert [document.tokens.tolist() for document in _documents(short.train)] == [
        document.tokens.tolist() for document in _documents(same.train)
    ]
    assert short.train[0].record_id == same.train[0].record_id and len(short.train) == 4
    assert short.report.repaired == same.report.repaired == {"longer than context_length, cut": 1}
    source = Source(str(tmp_path / "long.npy"), "tokens")
    encoder = Encoder(source, tokenizer, EncodingRules(1000))
    tracemalloc.start()
    [record] = read(source, Report())
    documents = encoder.encode(record).documents
    assert (
        sum(len(document.tokens) for document in documents) == len(numbers)
        and documents[3].loss_mask.all()
    )
    assert tracemalloc.get_traced_memory()[1] < 40e6, "more than a part of 4 Mi tokens is in memory"
    tracemalloc.stop()
    for bad, words in (
        (numbers.astype(np.float32), "holds float32, not integers"),
        (numbers + 5000, "ids from 5000 to 5999"),
    ):
        np.save(tmp_path / "bad.npy", bad)
        with pytest.raises(UserError, match=words):
            _prepared(Source(str(tmp_path / "bad.npy"), "tokens"), tokenizer, tmp_path / "none", 50)
    assert not (tmp_path / "none").exists()


def test_prepared_data_inside_the_source_folder_are_not_read(small, tokenizer, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    shutil.copy(small, folder / "a.json")
    first = _prepared(Source(str(folder)), tokenizer, folder / "prepared")
    again = _prepared(Source(str(folder)), tokenizer, folder / "prepared")
    elsewhere = _prepared(Source(str(folder)), tokenizer, tmp_path / "other")
    assert first.folder == again.folder and first.folder.name == elsewhere.folder.name
    assert first.report.records == 60 and not first.report.notes
