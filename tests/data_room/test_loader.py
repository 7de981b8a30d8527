"""Prepared folders and the loader: rows against a plain re-telling, reuse, and a place that is only a number."""

import json
import pickle
import shutil

import numpy as np
import pytest

from data.batch import permute
from data.errors import UserError
from data.loader import Loader
from data.prepare import prepare
from data.sources import Source
from data.templates import render
from data.tokenizer import Tokenizer
from tests.conftest import REPOSITORY

FIXTURES = REPOSITORY / "data/fixtures"
LENGTH = 64  # shorter than most conversations, so that documents are cut


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(FIXTURES / "tiny_tokenizer")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A file of 60 of our conversations."""
    path = tmp_path_factory.mktemp("data") / "small.json"
    path.write_text(json.dumps(json.loads((FIXTURES / "conversations.json").read_text())[:60]))
    return path


@pytest.fixture(scope="module")
def prepared(small, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    return prepare([Source(str(small))], tokenizer, LENGTH, folder, held_out_fraction=0.2, progress=False)


def test_documents_are_the_rendered_conversations_and_splits_share_none(prepared, small, tokenizer):
    from data.report import Report
    from data.sources import read

    expected = {}
    for conversation in read(Source(str(small)), Report()):
        segments = render(conversation.messages, "vicuna_v1.1", tokenizer)
        ids = [token for s in segments for token in s.ids]
        mask = [s.train for s in segments for _ in s.ids]
        for start in range(0, len(ids), LENGTH):
            if any(mask[start + 1 : start + LENGTH]):
                piece = (ids[start : start + LENGTH], mask[start : start + LENGTH])
                expected.setdefault(conversation.id, []).append(piece)
    found, owners = {}, []
    for split in (prepared.train, prepared.held_out):
        owners.append(set())
        for number in range(len(split)):
            document = split[number]
            assert document.tokens.dtype == np.int32 and len(document.tokens) == split.lengths[number]
            assert split.trained[number] == document.loss_mask[1:].sum() > 0
            found.setdefault(document.record_id, []).append((document.tokens.tolist(), document.loss_mask.tolist()))
            owners[-1].add(document.record_id)
    assert found == expected
    assert not owners[0] & owners[1] and 3 <= len(owners[1]) <= 24  # 12 on average


def test_rows_retell_the_plan(prepared):
    loader = Loader(prepared, LENGTH, 4, seed=3)
    row = loader.row(5)
    assert {name: (array.dtype, array.shape) for name, array in row.items()} == {
        **dict.fromkeys(["tokens", "targets", "positions", "index", "segment_ids"], (np.dtype("int32"), (LENGTH,))),
        "loss_weights": (np.dtype("float32"), (LENGTH,)),
    }
    for number in range(2 * len(loader)):
        row = loader.row(number)
        pieces = loader._plan(number // len(loader)).row(number % len(loader))
        at = 0
        for segment, (document, start, length) in enumerate(pieces, 1):
            for offset in range(length):
                place, source = at + offset, prepared.train[document]
                assert row["segment_ids"][place] == segment and row["positions"][place] == offset
                assert row["tokens"][place] == source.tokens[start + offset]
                last = offset == length - 1
                assert row["targets"][place] == (0 if last else source.tokens[start + offset + 1])
                assert row["loss_weights"][place] == (0 if last else source.loss_mask[start + offset + 1])
            at += length
        assert not row["segment_ids"][at:].any() and not row["loss_weights"][at:].any()
        assert row["index"].tolist() == list(range(LENGTH))


def test_place_is_a_number_and_reading_ahead_changes_nothing(prepared):
    one = Loader(prepared, LENGTH, 4, seed=3)
    again = Loader(pickle.loads(pickle.dumps(one.documents)), LENGTH, 4, seed=3)
    ahead = one.batches(start=7)
    for step in range(7, 7 + 2 * len(one) // 4):
        batch = next(ahead)
        for name, array in again.batch(step).items():
            np.testing.assert_array_equal(batch[name], array)
            np.testing.assert_array_equal(array, np.stack([again.row(4 * step + i)[name] for i in range(4)]))
    assert one.fingerprint == again.fingerprint
    others = [Loader(prepared, LENGTH, 4, seed=4), Loader(prepared, LENGTH, 2, seed=3), Loader(prepared, 32, 4, seed=3)]
    others.append(Loader(prepared, LENGTH, 4, seed=3, split="held_out"))
    assert len({loader.fingerprint for loader in [one, *others]}) == 5


def test_record_ids_tell_whose_tokens_a_step_holds(prepared):
    """Each listed record has a piece in the batch, and each piece of the batch is a listed record's."""
    loader = Loader(prepared, LENGTH, 3, seed=3)
    texts = {}
    for number in range(len(prepared.train)):
        document = prepared.train[number]
        texts.setdefault(document.record_id, []).append(",".join(map(str, document.tokens)))
    for step in (0, 2, len(loader)):
        batch, ids = loader.batch(step), loader.record_ids(step)
        assert len(ids) == len(set(ids))
        pieces = {",".join(map(str, tokens[segments == number])) for tokens, segments in
                  zip(batch["tokens"], batch["segment_ids"], strict=True) for number in range(1, segments.max() + 1)}
        assert all(any(piece in text for name in ids for text in texts[name]) for piece in pieces)
        assert all(any(piece in text for piece in pieces for text in texts[name]) for name in ids)


def test_one_epoch_of_held_out_counts_each_target_once(prepared):
    loader = Loader(prepared, LENGTH, 5, seed=0, split="held_out")
    batches = list(loader.epoch_batches())
    assert all(batch["tokens"].shape == (5, LENGTH) for batch in batches)
    assert sum(batch["loss_weights"].sum() for batch in batches) == prepared.held_out.trained.sum()


def test_prepared_folder_is_reused_by_content_and_made_anew_by_any_change(prepared, small, tokenizer, tmp_path):
    folder = prepared.folder.parent
    stamp = (prepared.folder / "index.npz").stat().st_mtime_ns
    moved = tmp_path / "elsewhere.json"
    shutil.copy(small, moved)
    options = {"held_out_fraction": 0.2, "progress": False}
    same = prepare([Source(str(moved), weight=2.0)], tokenizer, LENGTH, folder, **options)
    assert same.folder == prepared.folder and (same.folder / "index.npz").stat().st_mtime_ns == stamp
    assert same.report.sources[0].path == str(moved) and same.report.kept == prepared.report.kept == 60
    moved.write_text(moved.read_text().replace("Tell me", "Say"))
    changed = [
        prepare([Source(str(moved))], tokenizer, LENGTH, folder, **options),
        prepare([Source(str(small))], tokenizer, LENGTH + 1, folder, **options),
        prepare([Source(str(small))], tokenizer, LENGTH, folder, progress=False),
    ]
    assert len({prepared.folder, *(c.folder for c in changed)}) == 4
    assert not list(folder.glob(".*"))  # nothing half-made is left


def test_weighted_sources_and_held_out_sources(small, tokenizer, tmp_path):
    sources = [Source(str(small)), Source(str(FIXTURES / "dirty.json"), weight=0.5)]
    held_out = [Source(str(FIXTURES / "conversations_held_out.json"))]
    made = prepare(sources, tokenizer, 512, tmp_path, held_out_sources=held_out, progress=False)
    assert set(made.held_out.sources) == {2} and set(made.train.sources) == {0, 1} and len(made.held_out) == 120
    loader = Loader(made, 512, 2, seed=0)
    rows = [len(loader._plan(epoch)) for epoch in range(4)]
    assert loader.place(sum(rows[:3]) + 1) == (3, 1) and loader.place(rows[0] - 1) == (0, rows[0] - 1)
    assert loader.batch(40)["tokens"].shape == (2, 512)


def test_nothing_to_learn_from_is_told(small, tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"data\.sources is empty"):
        prepare([], tokenizer, 64, tmp_path)
    with pytest.raises(UserError, match="no such file"):
        prepare([Source(str(tmp_path / "none.json"))], tokenizer, 64, tmp_path)
    bad = tmp_path / "bad.json"
    bad.write_text('[{"conversations": [{"from": "gpt", "value": "alone"}]}]')
    with pytest.raises(UserError, match="1 x no human turn"):
        prepare([Source(str(bad))], tokenizer, 64, tmp_path / "out", progress=False)
    with pytest.raises(UserError, match="no document"):
        Loader(prepare([Source(str(small))], tokenizer, 64, tmp_path, progress=False), 64, 1, 0, split="held_out")
    assert not list((tmp_path / "out").iterdir())


def test_permute_moves_every_array_alike(prepared):
    batch = Loader(prepared, LENGTH, 2, seed=0).batch(0)
    order = np.arange(LENGTH).reshape(4, -1).T.ravel()
    moved = permute(batch, order)
    for name, array in batch.items():
        for place, origin in enumerate(order):
            assert (moved[name][:, place] == array[:, origin]).all()
    with pytest.raises(ValueError, match="places"):
        permute(batch, order[:-1])
