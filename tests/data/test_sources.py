"""Reading sources: every record of a malformed dump is counted, and each unusable file gives a
one-line error."""

import collections
import datetime
import decimal
import gzip
import json
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import ipc, parquet

from data.clean import SETS, CleanConfig
from data.encode import EncodingRules
from data.errors import UserError
from data.paths import File
from data.prepare import prepare
from data.report import DroppedRecord, Report, SourceReport
from data.sources import FileReader, Source, Sources, read
from data.tables import read_table
from data.tokenizer import Tokenizer


def _read(path, clean=CleanConfig(), **options):
    report = Report()
    return list(read(Source(str(path), **options), report, clean=clean)), report


def test_every_record_of_a_dirty_dump_is_counted(repository):
    entries = []
    report = Report(on_drop=entries.append)
    rules = CleanConfig(**SETS["scraped"])
    source = Source(str(repository / "data/fixtures/dirty.json"), template="vicuna_v1.1")
    conversations = list(read(source, report, clean=rules))
    assert [c.id for c in conversations][:10] == [
        "good",
        "spelling_1",
        "spelling_2",
        "openai",
        "parts",
        "system",
        "leading_answer",
        "unanswered",
        "control_text",
        "surrogate",
    ]
    assert report.records == 30 and report.kept == 14
    # Each record is either kept or dropped.
    assert sorted([c.record for c in conversations] + [entry.record for entry in entries]) == list(
        range(1, 31)
    )
    assert Counter(entry.reason for entry in entries) == report.dropped
    assert entries[3].content == {"id": "empty_list", "conversations": []}
    assert "This one" in entries[-1].content, "the text of the cut record is not reported"
    assert report.dropped == Counter(
        {
            "empty record": 1,
            "no human turn": 1,
            "no answer": 1,
            "roles do not alternate": 2,
            "empty turn": 2,
            "unknown role: narrator": 1,
            "a turn without role or text: `value` is null; it has the fields from": 1,
            "a `function_call` or `tool_call` turn whose text is no call in JSON: a tool call without "
            "a name": 1,
            "system turn in the middle": 1,
            "no known shape of a conversation: it has the fields id, text (`format: text` reads "
            "these)": 1,
            "not a record": 1,
            "cut off or malformed JSON": 1,
            "the only answer is a service's error message": 1,
            "duplicate": 1,
        }
    )
    assert report.repaired == Counter(
        {
            "leading assistant turns dropped": 1,
            "unanswered last turn dropped": 1,
            "broken characters replaced": 1,
            "HTML turned into markdown": 1,
            "cut before a service's error message": 1,
        }
    )
    assert len(report.notes) == 1 and "record 30" in report.notes[0]
    table = report.sources[0].table().splitlines()
    assert len(table) == 1 + len(report.dropped) + len(report.repaired)
    assert table[0].split() == ["kept", "14", "46.67", "%"] and "   3.33 %  duplicate" in "\n".join(
        table
    )
    turns = {c.id: [(m.role, m.content) for m in c.messages] for c in conversations}
    assert turns["system"] == [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello.")]
    assert turns["leading_answer"] == [("user", "Hi there"), ("assistant", "Hello.")]
    assert turns["unanswered"] == [("user", "Hi again"), ("assistant", "Hello.")]
    assert turns["busy"] == [("user", "One"), ("assistant", "Two.")]
    assert turns["page"][1][1] == (
        "Use **this** & snake_case:\n\n```python\nif a_b < 3:\n\n\n    print(a_b)\n```\n\n- one\n- two"
    )
    assert turns["about_html"][1][1].startswith("<div class='box'>"), (
        "an answer that is an HTML file is changed"
    )
    assert turns["surrogate"][0][1] == "A half pair \ufffd here"


@pytest.mark.parametrize("keep", range(0, 400, 7))
def test_a_list_cut_anywhere_gives_its_complete_records(tmp_path, keep):
    record = {
        "id": "é😀",
        "conversations": [{"from": "human", "value": 'a]}\\"é'}, {"from": "gpt", "value": "b😀"}],
    }
    full = json.dumps([record] * 3, ensure_ascii=False).encode()
    cut = full[:keep]
    complete = sum(
        end <= len(cut) for end in _ends(full, json.dumps(record, ensure_ascii=False).encode())
    )
    path = tmp_path / "cut.json"
    path.write_bytes(cut)
    if complete == 0:
        with pytest.raises(UserError, match=r"cut\.json"):
            _read(path, CleanConfig(duplicates=False))
    else:
        conversations, report = _read(path, CleanConfig(duplicates=False))
        assert len(conversations) == complete
        assert bool(report.notes) == (len(cut) < len(full))


def _ends(whole, record):
    ends, offset = [], 0
    while (offset := whole.find(record, offset)) >= 0:
        offset += len(record)
        ends.append(offset)
    return ends


def test_records_may_cross_chunks_in_lists_and_lines(tmp_path, monkeypatch):
    # So small that every record and some characters cross chunks.
    monkeypatch.setattr("data.records.CHUNK", 37)
    records = [
        {
            "id": i,
            "messages": [
                {"role": "user", "content": "é" * i},
                {"role": "assistant", "content": "ü" * 50},
            ],
        }
        for i in range(1, 60)
    ]
    as_list, lines = tmp_path / "a.json", tmp_path / "a.jsonl"
    as_list.write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8")
    lines.write_text(
        "\n\n".join(json.dumps(r, ensure_ascii=False) for r in records) + '\n{"id": 3, "mess',
        "utf-8",
    )
    first, _ = _read(as_list)
    second, report = _read(lines)
    assert first == second and [c.messages[0].content for c in first] == [
        "é" * i for i in range(1, 60)
    ]
    assert report.dropped == {"cut off or malformed JSON": 1}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such file"),
        (b"", "empty"),
        (b" \n ", "empty"),
        (b"[]", "data.json: holds no records; records with `messages`"),
        (b"hello", "not JSON"),
        (b'[{"conversations": []}, 3]', "1 x empty record"),
        (b'[{"conversations": [{"from": "human", "value": "\xff"}]}]', "UTF-8"),
        (b'{\n "a": 1\n}', "its only record is not a usable"),
        (
            b'[{"text": "a"}, {"text": "b"}]\n[{"text": "c"}]',
            "text follows the JSON list after record 2, and all of it",
        ),
        (
            b'[{"text": "a"}]' + b" " * 70_000 + b"x",
            "text follows the JSON list after record 1, and all of it",
        ),
        (
            b'[{"text": "a"}, {"text": "b" "id": 2}, {"text": "c"}, {"text": "d"}]',
            "record 2 is malformed (Expecting ','",
        ),
        (
            b'[{"text": "a"}, {"text": "b}, {"text": "c"}, {"text": "d"}]',
            "record 2 is malformed (Expecting ','",
        ),
        (
            b'[{"text": "a"}, {text: "b"}, {"text": "c"}, {"text": "d"}]',
            "record 2 is malformed (Expecting property name",
        ),
    ],
)
def test_a_useless_file_is_a_one_line_error(tmp_path, content, reason):
    path = tmp_path / "data.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        _read(path)
    message = str(caught.value)
    assert (
        str(path) in message
        and reason in message
        and "would work" in message
        and "\n" not in message
    )


@pytest.mark.parametrize("format", ["sharegpt", "text", "tokens"])
def test_several_paths_in_one_are_sources_of_their_own(tmp_path, format):
    """As other trainers take them."""
    for names in ("a.json,b.json", "a.csv,b.csv"):
        with pytest.raises(UserError, match=r"each of several paths is an entry of data\.so"):
            _read(f"{tmp_path}/{names}", format=format)
    with pytest.raises(UserError, match="no such file; "):
        _read(f"{tmp_path}/a.json", format=format)


def _lines(*values):
    return "\n".join(map(json.dumps, values))


def test_lines_may_be_lists_or_texts(tmp_path):
    path = tmp_path / "data.jsonl"
    talks = [
        [{"role": "user", "content": f"Q{i}"}, {"role": "assistant", "content": "A" * 1_500_000}]
        for i in range(2)
    ]
    path.write_text(_lines(*talks))
    records, _ = _read(path)
    assert [record.messages[0].content for record in records] == ["Q0", "Q1"]
    path.write_text(_lines([1, 2, 3], [4, 5])[:-1])
    records, report = _read(path, format="tokens")
    assert [record.tokens.tolist() for record in records] == [[1, 2, 3]]
    assert report.dropped == {"cut off or malformed JSON": 1}
    for texts in (["one text", "two\nlines"], ["one text"]):
        path.write_text(_lines(*texts))
        assert [record.text for record in _read(path, format="text")[0]] == texts
    path.write_text(_lines([[1, 2, 3], [4, 5]]) + "\n\n")
    assert len(_read(path, format="tokens")[0]) == 2
    path.write_text('"Q","A"\n"Hi","Ho"')
    with pytest.raises(UserError, match="a table of separated values under a name that ends"):
        _read(path)


@pytest.mark.parametrize("name", ["empty.parquet", "empty.npy"])
def test_a_table_or_array_without_rows_is_named(tmp_path, name):
    if name == "empty.npy":
        np.save(tmp_path / name, np.zeros((0, 5), np.int32))
    else:
        parquet.write_table(
            pyarrow.table({"tokens": pyarrow.array([], pyarrow.list_(pyarrow.int32()))}),
            tmp_path / name,
        )
    with pytest.raises(
        UserError,
        match=rf"^{tmp_path / name}: holds no records; a \.npy array of integers, or .* would work$",
    ):
        _read(tmp_path / name, format="tokens")


@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_white_space_may_follow_a_list(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("data.records.CHUNK", chunk)
    (tmp_path / "data.json").write_text(
        json.dumps([{"conversations": _CONVERSATION}]) + " \r\n\t" * 20
    )
    conversations, report = _read(tmp_path / "data.json")
    assert len(conversations) == 1 and report.notes == []


@pytest.mark.parametrize("end", [".json.gz", ".jsonl.gz", ".parquet"])
def test_compressed_and_parquet_files_give_the_same_records(tmp_path, end):
    records = [
        {
            "id": str(i),
            "conversations": [
                {"from": "human", "value": f"é {i}"},
                {"from": "gpt", "value": "ü" * i},
            ],
        }
        for i in range(1, 600)
    ]
    (tmp_path / "plain.json").write_text(json.dumps(records), "utf-8")
    path = tmp_path / "in" / f"data{end.upper() if end == '.json.gz' else end}"
    path.parent.mkdir()
    if end == ".parquet":
        # Merged data sets have the columns and fields of both kinds, with None in empty ones.
        rows = [{**record, "messages": None, "system": None} for record in records]
        rows[0]["conversations"] = [
            {**turn, "role": None, "weight": None} for turn in rows[0]["conversations"]
        ]
        rows.append(
            {
                "id": "other",
                "conversations": [
                    {"from": None, "value": None, "role": role, "content": "x", "weight": 0}
                    for role in ("user", "assistant")
                ],
            }
        )
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=100)
    else:
        lines = "\n".join(map(json.dumps, records)) if "jsonl" in end else json.dumps(records)
        path.write_bytes(gzip.compress(lines.encode()))
    expected, _ = _read(tmp_path / "plain.json")
    for source in (path, path.parent):
        conversations, _ = _read(source)
        assert conversations[:599] == expected
        assert [item.messages[1].train for item in conversations[599:]] == [False] * (
            end == ".parquet"
        )
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(UserError, match=r"cannot be (decompressed|read as Parquet)"):
        _read(path)
    path.write_bytes(b"neither")
    with pytest.raises(UserError, match=r"cannot be (decompressed|read as Parquet)"):
        _read(path)


def test_texts_and_tokens_are_read_from_files_and_folders(tmp_path):
    books = tmp_path / "books"
    (books / "more").mkdir(parents=True)
    (books / "b.txt").write_bytes("\ufeffOne\r\nbook é".encode())
    (books / "more/a.jsonl").write_text(
        '{"id": 7, "text": "Two"}\n{"text": " "}\n{"txt": "x"}\n{"TEXT": 5}\n{"Prompt": "x"}\n'
    )
    (books / "more/c.txt.gz").write_bytes(gzip.compress(b"Three"))
    parquet.write_table(
        pyarrow.Table.from_pylist([{"id": 9, "text": "Four"}]), books / "more/d.parquet"
    )
    (books / "notes.pdf").write_text("not read")
    texts, report = _read(books, format="text")
    assert [item.text for item in texts] == ["One\nbook é", "Two", "Three", "Four"] and texts[
        1
    ].id == "7"
    unknown = "no `text`, nor `prompt` and `completion`: it"
    assert report.dropped == {
        "empty text": 1,
        f"{unknown} has the fields txt": 1,
        f"{unknown}s `TEXT` is of type int": 1,
        f"{unknown} has the fields Prompt": 1,
    }
    assert report.records == 8
    records = [
        {"id": "all", "tokens": [5, 6, 7]},
        {"id": "mask", "input_ids": [5, 6, 7], "loss_mask": [0, 1, True]},
        {"id": "labels", "input_ids": [5, 6, 7], "labels": [-100, -100, 7]},
        {"id": "null", "tokens": None, "input_ids": [5, 6]},
        {"id": "short mask", "tokens": [5, 6, 7], "loss_mask": [1]},
        {"tokens": [5, "6"]},
        {"tokens": [1.5]},
        {"tokens": []},
        {"tokens": [True]},
        {"tokens": [2**40]},
    ]
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(records))
    ready, report = _read(path, format="tokens")
    assert [(item.id, item.tokens.tolist(), item.loss_mask.tolist()) for item in ready] == [
        ("all", [5, 6, 7], [True] * 3),
        ("mask", [5, 6, 7], [False, True, True]),
        ("labels", [5, 6, 7], [False, False, True]),
        ("null", [5, 6], [True] * 2),
    ]
    assert (
        sum(report.dropped.values()) == 6
        and report.dropped["`loss_mask` that does not match the tokens"] == 1
    )
    for array, documents in ((np.arange(6, dtype=np.uint16), 1), (np.arange(6).reshape(2, 3), 2)):
        np.save(tmp_path / "tokens.npy", array)
        ready, _ = _read(tmp_path / "tokens.npy", format="tokens")
        assert len(ready) == documents and np.concatenate(
            [item.tokens for item in ready]
        ).tolist() == list(range(6))
    (tmp_path / "none").mkdir()
    for path, format, reason in (
        (tmp_path / "none", "text", r"no \.txt or \.md"),
        (tmp_path / "gone.txt", "text", "no such file"),
        (tmp_path / "tokens.npy", "text", "not UTF-8"),
        (books / "b.txt", "tokens", r"cannot be read as \.npy"),
    ):
        with pytest.raises(UserError, match=reason):
            _read(path, format=format)


@pytest.mark.parametrize(
    "values",
    [
        [5, -(2**63)],
        [-(2**63)],
        [5, -(2**31) - 1],
        [5, 2**31],
        [5, 2**63],
        [5, 2**63 + 5],
        [-1, 2**63],
        [5, 2**64],
        [5, 1.0],
        [5, float("nan")],
        [5, float("inf")],
        [5, True],
        [False, 5],
        [True, True],
        [5, None],
        [5, "6"],
        [[5, 6]],
    ],
)
def test_tokens_that_are_not_32_bit_integers_are_dropped(tmp_path, values):
    """Whatever numpy would convert them to."""
    records = [{"id": "good", "tokens": [5, 6]}, {"id": "bad", "tokens": values}]
    for number, suffix in enumerate((".json", ".jsonl")):
        path = tmp_path / f"{number}{suffix}"
        path.write_text(
            json.dumps(records) if suffix == ".json" else "\n".join(map(json.dumps, records))
        )
        items, report = _read(path, format="tokens")
        assert [item.id for item in items] == ["good"] and sum(report.dropped.values()) == 1


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.float32, np.bool_])
@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_tokens_of_binary_files_must_be_32_bit_integers(tmp_path, dtype, suffix):
    """The lowest int64 is its own absolute value; the highest uint64 is -1 as int32."""
    value = {"i": np.iinfo(np.int64).min, "u": np.iinfo(np.uint64).max, "f": np.nan, "b": True}[
        np.dtype(dtype).kind
    ]
    bad, path = np.array([1, value], dtype), tmp_path / f"tokens{suffix}"
    if suffix == ".npy":
        np.save(path, bad)
    else:
        parquet.write_table(pyarrow.table({"tokens": [bad]}), path)
    with pytest.raises(
        UserError, match=r"its only record is not a usable tokens .*no list of integers"
    ):
        _read(path, format="tokens")


def test_labels_and_masks_that_are_not_32_bit_integers_are_dropped(tmp_path):
    path = tmp_path / "tokens.json"
    masks = [
        {"labels": [5, -(2**63)]},
        {"loss_mask": [1, -(2**63)]},
        {"labels": [True, 6]},
        {"loss_mask": [True, 0]},
    ]
    path.write_text(json.dumps([{"tokens": [5, 6], **mask} for mask in masks]))
    items, report = _read(path, format="tokens")
    assert [item.record for item in items] == [4] and report.dropped == {
        "`labels` that does not match the tokens": 2,
        "`loss_mask` that does not match the tokens": 1,
    }


def test_labels_are_the_tokens_at_their_own_places(tmp_path):
    """As transformers takes them: its models shift labels themselves. A loss mask has no ids."""
    path = tmp_path / "tokens.json"
    masks = [
        {"labels": [-100, 30, 40, 50, -100]},
        {"labels": [20, 30, 40, 50, -100]},
        {"labels": [-100, -100, 30, -100, 50]},
        {"loss_mask": [-100, 20, 30, 40, 50]},
    ]
    records = [{"input_ids": [10, 20, 30, 40, 50], **mask} for mask in masks]
    path.write_text(json.dumps(records))
    (item,), report = _read(path, format="tokens")
    assert item.loss_mask.tolist() == [False, False, True, False, True]
    assert report.dropped == {
        "`labels` that differ from the tokens (shifted by one?)": 2,
        "`loss_mask` with numbers other than 0 and 1": 1,
    }


_OTHER_MASK = (
    "a field that may say which tokens are trained on (`fields: {NAME: loss_mask}` would read one "
    "with 1 for those that are): "
)


@pytest.mark.parametrize(
    ("masks", "trained", "unread"),
    [
        ({"completion_mask": [0, 0, 1, 1]}, [0, 0, 1, 1], set()),
        ({"assistant_masks": [0, 1, 1, 0]}, [0, 1, 1, 0], set()),
        # As TRL's collator, which sets the labels of either to -100.
        ({"completion_mask": [0, 0, 1, 1], "assistant_masks": [0, 1, 1, 0]}, [0, 0, 1, 0], set()),
        ({"completion_mask": [0, 0, 1, 1], "assistant_masks": None}, [0, 0, 1, 1], set()),
        (
            {"completion_mask": [0, 0, 1, 1], "loss_mask": [1, 1, 1, 0]},
            [1, 1, 1, 0],
            {"completion_mask"},
        ),
        ({"Loss_Mask": [1, 1, 1, 0], "Level": 3}, [1, 1, 1, 0], {"Level"}),
        ({"completion_mask": [0, 1]}, None, "`completion_mask` that does not match the tokens"),
        (
            {"assistant_masks": [0, 2, 0, 0]},
            None,
            "`assistant_masks` with numbers other than 0 and 1",
        ),
        ({"label_mask": [False, False, True, True]}, [0, 0, 1, 1], set()),  # OLMo's
        ({"loss_mask": [0.0, 0.0, 1.0, 1.0]}, [0, 0, 1, 1], set()),
        ({"loss_mask": [0.0, 0.5, 1.0, 1.0]}, None, "`loss_mask` that does not match the tokens"),
        # ms-swift's; the labels say what is trained on.
        (
            {"labels": [-100, -100, 7, 9], "loss_scale": [0.0, 0.0, 1.0, 1.0]},
            [0, 0, 1, 1],
            {"loss_scale"},
        ),
        ({"mask": [True, True, False, False]}, None, f"{_OTHER_MASK}`mask`"),  # torchtune's
        ({"Prompt_Mask": [1, 1, 0, 0]}, None, f"{_OTHER_MASK}`Prompt_Mask`"),
        ({"loss_weights": [0, 0.5, 1, 1]}, None, f"{_OTHER_MASK}`loss_weights`"),
        ({"special_tokens_mask": [1, 0, 0, 1]}, [1, 1, 1, 1], {"special_tokens_mask"}),
        ({"global_attention_mask": [1, 0, 0, 1]}, [1, 1, 1, 1], {"global_attention_mask"}),
        ({"mask": "User"}, [1, 1, 1, 1], {"mask"}),
    ],
)
def test_every_mask_of_tokens_is_read_or_named(tmp_path, masks, trained, unread):
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps([{"input_ids": [5, 6, 7, 8]}, {"Input_ids": [5, 6, 7, 9], **masks}]))
    items, report = _read(path, format="tokens")
    if trained is None:
        assert report.dropped == {unread: 1}
        return
    assert items[1].loss_mask.tolist() == list(map(bool, trained))
    assert report.sources[0].unread == {f"record field `{name}`": 1 for name in unread}


_PACKED = "several packed documents in a record (the data before packing would work): "


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"attention_mask": [1, 1, 1, 1, 1, 1]}, slice(6)),
        ({"attention_mask": [1, 1, 1, 1, 0, 0]}, slice(4)),
        ({"attention_mask": [0, 0, 1, 1, 1, 1]}, slice(2, 6)),
        ({"attention_mask": [1, 1, 1, 1, 0, 0], "position_ids": [0, 1, 2, 3, 1, 1]}, slice(4)),
        ({"attention_mask": [1, 1, 1, 1, 0, 0], "labels": [-100, 5, 6, 7, -100, -100]}, slice(4)),
        ({"position_ids": [0, 1, 2, 3, 4, 5], "seq_lengths": [6]}, slice(6)),
        ({"position_ids": [2, 3, 4, 5, 6, 7]}, slice(6)),
        ({"attention_mask": [1.0, 1.0, 1.0, 1.0, 0.0, 0.0], "seq_lengths": [4]}, slice(4)),
        ({"attention_mask": [1, 1, 1, 1, 0, 0], "seq_lengths": [6]}, slice(4)),
        ({"attention_mask": [], "position_ids": [], "seq_lengths": []}, slice(6)),
        ({"seq_lens": [6], "input_pos": [0, 1, 2, 3, 4, 5]}, slice(6)),
        ({"seq_start_id": [0]}, slice(6)),
        ({"cu_seqlens": [0, 6], "seq_idx": [1, 1, 1, 1, 1, 1]}, slice(6)),
        ({"attention_mask": [1, 1, 1, 1, 0, 0], "segment_ids": [1, 1, 1, 1, 0, 0]}, slice(4)),
        ({"seq_start_id": [0, 3]}, f"{_PACKED}`seq_start_id`"),
        ({"seq_start_id": [3]}, "`seq_start_id` that does not match the tokens"),
        ({"cu_seqlens": [0, 3, 6]}, f"{_PACKED}`cu_seqlens`"),
        ({"cu_seq_lens_q": [0, 3]}, "`cu_seq_lens_q` that does not match the tokens"),
        ({"segment_ids": [1, 1, 1, 2, 2, 2]}, f"{_PACKED}`segment_ids`"),
        ({"seq_idx": [0, 0]}, "`seq_idx` that does not match the tokens"),
        ({"seq_lens": [3, 3]}, f"{_PACKED}`seq_lens`"),
        ({"input_pos": [0, 1, 2, 0, 1, 2]}, f"{_PACKED}`input_pos`"),
        ({"seq_lengths": [3]}, "`seq_lengths` that do not add up to the number of tokens"),
        ({"seq_lengths": [3, 2]}, "`seq_lengths` that do not add up to the number of tokens"),
        (
            {"attention_mask": [1, 1, 1, 0.5, 0, 0]},
            "`attention_mask` that does not match the tokens",
        ),
        ({"attention_mask": [1, 1, 1, 2, 2, 2]}, f"{_PACKED}`attention_mask`"),
        ({"position_ids": [0, 1, 2, 0, 1, 2]}, f"{_PACKED}`position_ids`"),
        ({"seq_lengths": [3, 3]}, f"{_PACKED}`seq_lengths`"),
        ({"position_ids": [0, 2, 3, 4, 5, 6]}, "`position_ids` that are not consecutive"),
        ({"attention_mask": [1, 0, 1, 1, 1, 1]}, "`attention_mask` with a gap between tokens"),
        ({"attention_mask": [0, 0, 0, 0, 0, 0]}, "`attention_mask` without a token"),
        ({"attention_mask": [1, 1]}, "`attention_mask` that does not match the tokens"),
    ],
)
def test_padding_and_packing_of_tokens_are_read_as_by_transformers(tmp_path, fields, kept):
    """Its collator sets the labels of padding to -100; a model attends to no padding, nor to
    another document of a packed record."""
    ids = [4, 5, 6, 7, 8, 9]
    padding = [i for i, x in enumerate(fields.get("attention_mask", ())) if x == 0]
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps([{"input_ids": [1, 2, 3]}, {"input_ids": ids, **fields}]))
    items, report = _read(path, format="tokens")
    (source,) = report.sources
    if isinstance(kept, str):
        assert report.dropped == {kept: 1}
        return
    labels = np.array(fields.get("labels", ids))
    labels[padding] = -100
    assert items[1].tokens.tolist() == ids[kept]
    assert items[1].loss_mask.tolist() == (labels != -100)[kept].tolist()
    assert not source.unread
    expected = {"padding cut off, by `attention_mask`": 1} if padding else {}
    assert source.repaired == expected


def test_names_of_a_texts_fields_are_not_case_sensitive(tmp_path):
    path = tmp_path / "texts.json"
    path.write_text(json.dumps([{"Text": "One", "Label": 3}, {"PROMPT": "T", "Completion": "wo"}]))
    texts, report = _read(path, format="text")
    assert [(item.text, item.prompt) for item in texts] == [("One", 0), ("Two", 1)]
    assert report.sources[0].unread == {"record field `Label`": 1}


def test_a_text_under_another_name_is_refused_with_what_would_work(tmp_path):
    path = tmp_path / "code.jsonl"
    path.write_text('{"content": "int main"}\n')
    with pytest.raises(UserError, match=r"the fields content\).*`fields`, such as {content: text}"):
        _read(path, format="text")
    [text], _ = _read(path, format="text", fields={"content": "text"})
    assert text.text == "int main"


_CONVERSATION = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


def _text_that_is_not_utf8():
    offsets, text = np.arange(3, dtype=np.int32), pyarrow.py_buffer(b"\xffb")
    return pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, pyarrow.py_buffer(offsets), text])


@pytest.mark.parametrize(
    ("column", "dropped", "note"),
    [
        (pyarrow.array([datetime.date(2020, 1, 2)] * 2), "2020-01-02", None),
        (pyarrow.array([decimal.Decimal("1.50")] * 2), "1.50", None),
        (pyarrow.array([b"\xffa"] * 2), "\\xffa", None),
        (pyarrow.array([10**17] * 2, pyarrow.timestamp("us")), "5138-11-16 09:46:40", None),
        (
            pyarrow.array([10**18] * 2, pyarrow.timestamp("us")),
            None,
            "2 values of the column x cannot be read",
        ),
        (
            pyarrow.array([2**62] * 2, pyarrow.duration("s")),
            None,
            "2 values of the column x cannot be read",
        ),
        (_text_that_is_not_utf8(), "b", "1 values of the column x cannot be read"),
    ],
    ids=[
        "date",
        "decimal",
        "bytes",
        "far time",
        "time out of range",
        "duration out of range",
        "not UTF-8",
    ],
)
def test_columns_without_json_or_python_values_do_not_stop_reading(tmp_path, column, dropped, note):
    path, lines = tmp_path / "a.parquet", []
    parquet.write_table(pyarrow.table({"conversations": [_CONVERSATION, []], "x": column}), path)
    report = Report(on_drop=lambda record: lines.append(json.loads(record.to_json())))
    assert len(list(read(Source(str(path)), report))) == 1
    assert [(line["reason"], line["content"].get("x")) for line in lines] == [
        ("empty record", dropped)
    ]
    assert len(report.notes) == (note is not None) and (note or "") in "".join(report.notes)


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_parquet_file_is_named(tmp_path, seed):
    path, generator = tmp_path / "a.parquet", np.random.default_rng(seed)
    rows = [
        [{"from": "human", "value": str(generator.random())}, {"from": "gpt", "value": "b"}]
        for _ in range(200)
    ]
    parquet.write_table(pyarrow.table({"conversations": rows}), path, use_dictionary=False)
    data = bytearray(path.read_bytes())
    start = generator.integers(len(data) - 40)
    data[start : start + 30] = generator.bytes(30)
    path.write_bytes(data)
    try:
        _, report = _read(path)
    except UserError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
    else:  # without checksums Parquet does not detect damage within a text
        assert report.records == 200


def test_a_record_with_a_broken_id_or_a_very_long_number_is_dropped(tmp_path):
    records = [
        {"id": name, "conversations": [{"from": "human", "value": name}, _CONVERSATION[1]]}
        for name in "abc"
    ]
    lines = [json.dumps(record) for record in records]
    lines[1:1] = [lines[0].replace('"a"', r'"\ud83d"', 1), lines[0].replace('"a"', "9" * 5000, 1)]
    for name, text in {"a.jsonl": "\n".join(lines), "a.json": "[" + ", ".join(lines) + "]"}.items():
        (tmp_path / name).write_text(text)
        kept, report = _read(tmp_path / name)
        assert [conversation.id for conversation in kept] == ["a", "b", "c"]
        assert report.dropped == {
            "an `id` with broken characters": 1,
            "a number with more digits than Python reads": 1,
        }
    (tmp_path / "a.jsonl").write_text('{"id": "\\ud83d", "text": "a"}\n{"id": 7, "text": "b"}')
    kept, report = _read(tmp_path / "a.jsonl", format="text")
    assert [text.id for text in kept] == ["7"] and report.dropped == {
        "an `id` with broken characters": 1
    }


def test_a_malformed_list_is_refused_without_reading_further(tmp_path, monkeypatch):
    monkeypatch.setattr("data.records.CHUNK", 1000)
    path, read_bytes = tmp_path / "a.json", []
    path.write_text('[{"text": "a" "b"}' + ", {}" * 100_000 + "]")
    with pytest.raises(UserError, match="record 1 is malformed"):
        list(read(Source(str(path)), Report(), advance=read_bytes.append))
    assert sum(read_bytes) == 1000


def test_a_dropped_record_nested_as_deeply_as_python_reads_is_reported():
    nested = []
    for _ in range(5000):
        nested = [nested]
    line = json.loads(DroppedRecord(0, 7, "not a record", nested).to_json())
    assert line == {
        "source": 0,
        "record": 7,
        "reason": "not a record",
        "content": None,
        "file": "",
        "line": 0,
    }


def test_an_npz_named_npy_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.arange(3))
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    with pytest.raises(
        UserError,
        match=r"a\.npy: is an \.npz archive, not a single array; a \.npy array of integers, or",
    ):
        _read(tmp_path / "a.npy", format="tokens")


@pytest.mark.parametrize(
    ("name", "format"),
    [("a.txt.gz", "text"), ("a.json.gz", "sharegpt"), ("a.jsonl.gz", "sharegpt")],
)
def test_a_text_or_record_beyond_memory_is_refused_while_reading(
    tmp_path, monkeypatch, name, format
):
    monkeypatch.setattr("data.records.CHUNK", 1000)
    monkeypatch.setattr("data.records.MAX_BYTES", 1 << 20)
    monkeypatch.setattr("data.sources.MAX_BYTES", 1 << 20)
    begin = b"" if format == "text" else b'{"a": "' if name == "a.jsonl.gz" else b'[{"a": "'
    (tmp_path / name).write_bytes(gzip.compress(begin + b"a" * (8 << 20)))
    read_bytes = []
    with pytest.raises(UserError, match=r"more than 1 MiB"):
        list(read(Source(str(tmp_path / name), format), Report(), advance=read_bytes.append))
    assert sum(read_bytes) <= 1 << 20


def test_dropped_records_are_listed_with_file_and_line(tmp_path, monkeypatch):
    """For lines, a list and a table, and for records that the template refuses; the listing is
    bounded in number and length."""
    good, empty = (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": text}]}
        for text in ("b", "")
    )
    tool = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "c"},
            {"role": "tool", "content": "1"},
            {"role": "assistant", "content": "d"},
        ]
    }
    lines = [json.dumps(good), "", json.dumps(empty), "{cut", json.dumps(tool)]
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "b.json").write_text(json.dumps([{**empty, "more": "x" * 500}, 3]))
    parquet.write_table(pyarrow.Table.from_pylist([tool, {"messages": []}]), folder / "c.parquet")
    tokenizer = Tokenizer.load(Path(__file__).parents[2] / "data/fixtures/tiny_tokenizer")
    monkeypatch.setattr("data.report.LONGEST_CONTENT", 400)

    def listed(name):
        prepared = prepare(
            Sources((Source(str(folder)),)),
            tokenizer,
            EncodingRules(64),
            tmp_path / name,
            progress=False,
        )
        dropped = [
            json.loads(line) for line in prepared.report.dropped_file.read_text().splitlines()
        ]
        return prepared.report.summary(), dropped

    summary, dropped = listed("prepared")
    reported = [(Path(record["file"]).name, record["line"], record["reason"]) for record in dropped]
    assert sorted(reported) == [
        ("a.jsonl", 3, "empty turn"),
        ("a.jsonl", 4, "cut off or malformed JSON"),
        ("a.jsonl", 5, "the chat template refuses: vicuna_v1.1 has no tool turn"),
        ("b.json", 1, "empty turn"),
        ("b.json", 2, "not a record"),
        ("c.parquet", 1, "duplicate"),
        ("c.parquet", 2, "empty record"),
    ]
    assert "dropped records, each with its file, line and reason: " in summary
    cut = next(
        record["content"]
        for record in dropped
        if record["file"].endswith("b.json") and record["line"] == 1
    )
    assert cut.startswith('{"conversations": [') and cut.endswith(" characters)") and len(cut) < 450
    monkeypatch.setattr("data.report.MOST_DROPPED", 2)
    summary, dropped = listed("bounded")
    assert len(dropped) == 2 and "the first 2 of 7 dropped records" in summary


def _talks(count):
    return [
        {"conversations": [{"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": f"{n}."}]}
        for n in range(count)
    ]


@pytest.mark.parametrize(
    "kind",
    [
        "a.jsonl.zst",
        "a.jsonl.bz2",
        "a.json.xz",
        "a.arrow",
        "a.feather",
        "pretty.json",
        "data.json",
        "line.json",
        "a.csv",
        "a.tsv",
        "semicolons.csv",
    ],
)
def test_every_kind_of_file_gives_the_same_records(tmp_path, kind):
    import bz2
    import lzma

    talks, path = _talks(5), tmp_path / kind
    lines = "\n".join(map(json.dumps, talks)).encode()
    if kind.endswith((".csv", ".tsv")):
        separator = {"a.csv": ",", "a.tsv": "\t", "semicolons.csv": ";"}[kind]
        path.write_text(
            separator.join(["instruction", "input", "output"])
            + "\n"
            + "".join(f'"{n}?"{separator}{separator}{n}.\n' for n in range(5)),
            encoding="utf-8",
        )
    elif kind.endswith((".arrow", ".feather")):
        table = pyarrow.Table.from_pylist(talks)
        new_writer = pyarrow.ipc.new_stream if kind == "a.arrow" else pyarrow.ipc.new_file
        with pyarrow.OSFile(str(path), "wb") as sink, new_writer(sink, table.schema) as writer:
            writer.write_table(table)
    elif kind.endswith(".zst"):
        path.write_bytes(pyarrow.compress(lines, codec="zstd", asbytes=True))
    elif kind.endswith(".bz2"):
        path.write_bytes(bz2.compress(lines))
    elif kind.endswith(".xz"):
        path.write_bytes(lzma.compress(json.dumps(talks).encode()))
    elif kind == "pretty.json":
        path.write_text("\n".join(json.dumps(talk, indent=1) for talk in talks))
    else:
        path.write_text(
            json.dumps({"version": 1, "data": talks}, indent=1 if kind == "data.json" else None)
        )
    kept, report = _read(path)
    assert [[turn.content for turn in record.messages] for record in kept] == [
        [f"{n}?", f"{n}."] for n in range(5)
    ]
    assert report.records == 5 and ("not read: the fields version" in report.summary()) == (
        kind in ("data.json", "line.json")
    )
    if kind.endswith((".zst", ".bz2", ".xz")):
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(UserError, match="cannot be decompressed"):
            _read(path)


def test_metadata_files_of_a_folder_are_skipped_by_content(tmp_path):
    (tmp_path / "train.json").write_text(json.dumps(_talks(2)))
    (tmp_path / "one.json").write_text(json.dumps(_talks(3)[2], indent=1))
    (tmp_path / "dataset_info.json").write_text(
        json.dumps({"mine": {"file_name": "train.json"}}, indent=1)
    )
    (tmp_path / "state.json").write_text('{"_data_files": []}')
    kept, report = _read(tmp_path)
    assert len(kept) == report.records == 3
    assert (
        sum(
            "skipped: it holds a single object that is not a record" in note
            for note in report.notes
        )
        == 2
    )
    with pytest.raises(UserError, match="it has the fields mine"):
        _read(tmp_path / "dataset_info.json")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# Card\n")
    (tmp_path / "a.txt").write_text("A text.")
    texts, report = _read(tmp_path, format="text")
    assert [text.text for text in texts] == [
        "A text."
    ] and "the card of a data set" in report.summary()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a,a\n1,2\n", "two columns are called 'a'"),
        ('a,b\n"1,2\n', "cannot be read as a text table"),
        (b"a,b\n\xff,1\n", "is not UTF-8"),
    ],
)
def test_a_broken_text_table_is_a_one_line_error(tmp_path, content, words):
    path = tmp_path / "a.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=words):
        _read(path)


def test_a_compressed_file_without_its_suffix_is_named(tmp_path):
    (tmp_path / "a.json").write_bytes(gzip.compress(b"[]"))
    with pytest.raises(
        UserError, match=r"a\.json: is compressed with gzip; its name must end in \.gz"
    ):
        _read(tmp_path / "a.json")


@pytest.mark.parametrize("format", ["sharegpt", "text"])
def test_an_archive_is_named(tmp_path, format):
    """One with a text in ASCII is UTF-8 itself."""
    (tmp_path / "0.txt").write_text("A text.")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "0.txt", "0.txt")
    with pytest.raises(UserError, match=r"a\.tar: is a tar archive; unpack it first"):
        _read(tmp_path / "a.tar", format=format)


def test_token_ids_without_a_header_are_named(tmp_path):
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match=r"it does not begin as one.*\.npy array of int") as caught:
        _read(tmp_path / "train.bin", format="tokens")
    assert "pickle" not in str(caught.value)


def test_json_lines_under_another_name_are_a_text_with_a_warning(tmp_path):
    """As Spark names its files: one text, as it stands."""
    for name in ("part-00000", "corpus.txt", "a.jsonl"):
        (tmp_path / name).write_text('{"text": "One"}\n{"text": "Two"}\n')
    for name in ("part-00000", "corpus.txt"):
        [text], report = _read(tmp_path / name, format="text")
        assert text.text.startswith('{"text"')
        assert "begins with a record in JSON" in report.summary()
    texts, report = _read(tmp_path / "a.jsonl", format="text")
    assert len(texts) == 2 and not report.sources[0].notes
    (tmp_path / "b.txt").write_text('{"a": 1} is an object.\n{"text": "Two"}')
    assert not _read(tmp_path / "b.txt", format="text")[1].sources[0].notes


def test_broken_characters_of_a_text_are_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud83d"}\n{"prompt": "a", "completion": "\\ude00"}\n"b"\n')
    texts, report = _read(path, format="text")
    assert [item.text for item in texts] == ["\ufffd", "a\ufffd", "b"]
    assert report.sources[0].repaired == {"broken characters replaced": 2}


@pytest.mark.parametrize("empty", [b"", gzip.compress(b"")], ids=["plain", "gzip"])
def test_an_empty_file_among_others_is_skipped(tmp_path, empty):
    """As by datasets; Spark writes such files."""
    from datasets import load_dataset

    name = "a.jsonl.gz" if empty.startswith(b"\x1f") else "a.jsonl"
    (tmp_path / name).write_bytes(empty)
    (tmp_path / "b.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    files = [str(tmp_path / name), str(tmp_path / "b.jsonl")]
    loaded = load_dataset("json", data_files=files, split="train", cache_dir=tmp_path / "cache")
    kept, report = _read(f"{tmp_path}/*.jsonl*")
    assert len(kept) == len(loaded) == 1
    assert report.sources[0].notes == [f"{files[0]}: skipped: the file is empty"]
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(UserError, match="holds no records"):
        _read(f"{tmp_path}/*.jsonl*")


@pytest.mark.parametrize("field", ["images", "history", "system", "tools", "input", "source"])
def test_nan_is_no_value(tmp_path, field):
    """Python writes a missing cell of a table of pandas so; pandas itself writes null."""
    path, turns = tmp_path / "a.jsonl", {"instruction": "a", "output": "b"}
    found = []
    for value in (float("nan"), None):
        path.write_text(json.dumps({**turns, field: value}))
        [record], report = _read(path)
        found.append((record.messages, record.tools, report.sources[0].repaired))
        assert not report.sources[0].unread
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("format", "columns"),
    [
        ("sharegpt", {"question": ["a", None, None], "answer": "bcd", "n": [1, 2, None]}),
        ("text", {"text": ["a", None, None], "n": [1, 2, None]}),
    ],
)
def test_a_null_is_named_where_a_record_lacks_a_field(tmp_path, format, columns):
    """A table's row has all columns; whichever of the others are null, the reason is the same."""
    table = pyarrow.table({name: list(values) for name, values in columns.items()})
    parquet.write_table(table, tmp_path / "a.parquet")
    [_], report = _read(tmp_path / "a.parquet", format=format)
    [(reason, count)] = report.sources[0].dropped.items()
    assert count == 2 and ("its `text` is null" if format == "text" else "some are null") in reason


def test_a_sources_fields_and_add_bos_are_validated():
    for options, words in (
        ({"fields": {"a": "usr"}}, "'a' stands for 'usr'"),
        ({"weight": float("inf")}, "weight inf of .* must be a number above 0, up to 1,000,000"),
        ({"weight": 1e300}, "weight 1e.300 of .* must be a number above 0, up to 1,000,000"),
        ({"add_bos": True}, "is for format: text"),
        ({"control_tokens": True}, "is for format: text"),
    ):
        with pytest.raises(UserError, match=words):
            Source("a.json", **options)


def test_a_saved_data_set_is_read_without_its_caches_and_warns_of_its_test_split(tmp_path):
    """As datasets.DatasetDict.save_to_disk writes it, with the caches that `map` leaves there."""
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    names = (
        "train/data-00000-of-00001",
        "train/cache-0123456789abcdef",
        "test/data-00000-of-00001",
    )
    for number, name in enumerate(names):
        table = pyarrow.table({"question": [f"{number}?"], "answer": ["!"]})
        file = tmp_path / f"{name}.arrow"
        file.parent.mkdir(exist_ok=True)
        with pyarrow.OSFile(str(file), "wb") as sink, ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    source = Source(str(tmp_path))
    records = list(read(source, Report()))
    assert [record.messages[0].content for record in records] == ["2?", "0?"]
    assert [note.partition(";")[0] for note in source.notes(is_held_out=False)] == [
        "also reads test/data-00000-of-00001.arrow"
    ]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_data_set_saved_again_has_the_records_of_the_later_save(tmp_path, shards):
    """The later save leaves the shards of the earlier one; load_from_disk reads those that
    state.json lists."""
    from datasets import Dataset, load_from_disk

    def questions(numbers):
        return [{"question": f"{number}?", "answer": "!"} for number in numbers]

    Dataset.from_list(questions(range(40))).save_to_disk(tmp_path, num_shards=4)
    Dataset.from_list(questions(range(100, 110))).save_to_disk(tmp_path, num_shards=shards)
    source = Source(str(tmp_path))
    records = list(read(source, Report()))
    loaded = [record["question"] for record in load_from_disk(tmp_path)]
    assert [record.messages[0].content for record in records] == loaded
    left, more = "not read: data-00000-of-00004.arrow and 3 more", "which state.json does not list"
    assert [left in note and more in note for note in source.notes(is_held_out=False)] == [True]


def _one_text_in_many_rows(texts, rows):
    values = pyarrow.array(["a" * (1 << 20)] * texts)
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), values)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("a.parquet", _one_text_in_many_rows(1, 20_000)),
        ("a.arrow", _one_text_in_many_rows(1, 20_000)),
        ("a.parquet", pyarrow.array([[0] * 5_000_000], pyarrow.list_(pyarrow.int32()))),
        ("a.parquet", pyarrow.array(["a" * (1 << 25)])),
        ("a.parquet", pyarrow.nulls(5_000_000, pyarrow.string())),
        ("a.arrow", pyarrow.array(["a" * (1 << 25)])),
    ],
    ids=["dictionary", "dictionary of Arrow", "list", "text", "rows without values", "packed"],
)
def test_a_table_out_of_proportion_to_its_file_is_refused(tmp_path, name, column):
    """A few hundred bytes may stand for terabytes; at most 256 rows are read first."""
    path, table = tmp_path / name, pyarrow.table({"text": column})
    if path.suffix == ".parquet":
        parquet.write_table(table, path, compression="zstd")
    else:
        options = ipc.IpcWriteOptions(compression="zstd")
        with ipc.new_file(path, table.schema, options=options) as file:
            file.write_table(table)
    with pytest.raises(UserError, match=f"{name}: unpacks to more than 200 times its size"):
        collections.deque(read_table(File(str(path)), SourceReport(str(path))), maxlen=0)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_dictionary_in_proportion_is_read(tmp_path, name):
    path, rows = tmp_path / name, 3000
    texts = [np.random.default_rng(number).bytes(200).hex() for number in range(5)]
    indices = pyarrow.array([number % 5 for number in range(rows)], pyarrow.int32())
    table = pyarrow.table({"text": pyarrow.DictionaryArray.from_arrays(indices, texts)})
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        with ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    read = [row["text"] for row in read_table(File(str(path)), SourceReport(str(path)))]
    assert read == [texts[number % 5] for number in range(rows)]


def test_one_record_is_counted_in_the_singular():
    report = Report([SourceReport("a.json", records=1, kept=1), SourceReport("b.json", 2, 2)])
    assert report.summary() == "a.json: 1 record, 1 kept\nb.json: 2 records, 2 kept"


def test_lists_in_the_objects_of_lines_are_noted_once(tmp_path):
    """A dropped record is found at its line."""
    path, exchange = tmp_path / "a.jsonl", {"question": "a", "answer": "b"}
    objects = [
        {"samples": [exchange], "doc": 1},
        {"samples": [{"answer": "c", "question": "d"}, {"x": 1}]},
        {"samples": [{**exchange, "answer": "e"}], "doc": None},
    ]
    path.write_text(_lines(*objects))
    dropped, report = [], SourceReport(str(path))
    report.on_drop = dropped.append
    records = list(FileReader(Source(str(path))).read([File(str(path))], report))
    assert [record.line for record in records] == [1, 2, 3]
    assert [(record.file, record.line) for record in dropped] == [(str(path), 2)]
    note = f"{path}: the records are the list in its field `samples`"
    assert report.notes == [f"{note}; not read: the fields doc", note]


def test_a_list_in_an_object_has_the_sources_fields(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"version": 1, "train": [{"q": "a", "a": "b"}]}))
    records, report = _read(path, fields={"q": "user", "a": "assistant"})
    assert [turn.content for turn in records[0].messages] == ["a", "b"]
    (note,) = report.sources[0].notes
    assert note.endswith("the list in its field `train`; not read: the fields version")


@pytest.mark.parametrize(
    ("format", "record", "fields", "missing"),
    [
        ("sharegpt", {"question": "a", "answer": "b"}, {"sistem": "system"}, "`sistem`"),
        ("sharegpt", {"Question": "a", "Answer": "b"}, {"question": "prompt"}, "`question`"),
        (
            "sharegpt",
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            {"who": "role", "thoughts": "reasoning_content", "role": "role"},
            "`who` or `thoughts`",
        ),
        ("text", {"text": "a"}, {"content": "text"}, "`content`"),
        ("tokens", {"tokens": [1, 2]}, {"prompt_mask": "loss_mask"}, "`prompt_mask`"),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": "c"}, {"x": "tools"}, "`x`"),
    ],
)
def test_a_mapped_name_that_no_record_has_is_refused(
    repository, tmp_path, format, record, fields, missing
):
    """One record with it is enough; a held-out file, which has the same `fields`, may lack it."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(UserError, match=f"none of its 1 records has {missing}; names"):
        _read(path, format=format, fields=fields)
    other = tmp_path / "b.jsonl"
    value = [1, 1] if format == "tokens" else "c"
    named = dict.fromkeys(fields, value)
    turn = {"role": "user", "who": "user", "thoughts": "c", "content": "a"}
    more = {"messages": [turn, *record["messages"][1:]]} if "messages" in record else named
    other.write_text(path.read_text() + json.dumps({**record, **more}) + "\n")
    assert len(_read(other, format=format, fields=fields)[0]) in (1, 2)
    held_out = Sources(
        (Source(str(other), format, "vicuna_v1.1", fields=fields),),
        (Source(str(path), format, "vicuna_v1.1", fields=fields),),
    )
    tokenizer = Tokenizer.load(repository / "data/fixtures/tiny_tokenizer")
    prepare(held_out, tokenizer, EncodingRules(512), tmp_path / "prepared", progress=False)
