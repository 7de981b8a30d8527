"""Records to conversations: every record of a dirty dump accounted for, and one clear line for each unusable file."""

import json
from collections import Counter

import pytest

from data.errors import UserError
from data.report import Report
from data.sources import Source, read


def _read(path, **options):
    report = Report()
    return list(read(Source(str(path), **options), report)), report


def test_dirty_dump_is_counted_record_by_record(repository):
    conversations, report = _read(repository / "data/fixtures/dirty.json")
    assert [c.id for c in conversations][:10] == [
        "good", "spelling_1", "spelling_2", "openai", "parts", "system", "leading_answer", "unanswered", "control_text",
        "surrogate",
    ]  # fmt: skip
    assert report.records == 24 and report.kept == 11
    assert report.dropped == Counter(
        {
            "empty record": 1,
            "no human turn": 1,
            "no answer": 1,
            "roles do not alternate": 2,
            "empty turn": 2,
            "unknown role": 1,
            "a turn without role or text": 1,
            "system turn in the middle": 1,
            "no conversations or messages": 1,
            "not a record": 1,
            "cut off or malformed JSON": 1,
        }
    )
    assert report.repaired == Counter(
        {"leading assistant turns dropped": 1, "unanswered last turn dropped": 1, "broken characters replaced": 1}
    )
    assert len(report.notes) == 1 and "record 24" in report.notes[0]
    said = {c.id: [(m.role, m.content) for m in c.messages] for c in conversations}
    assert said["system"] == [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello.")]
    assert said["leading_answer"] == said["unanswered"] == [("user", "Hi"), ("assistant", "Hello.")]
    assert said["surrogate"][0][1] == "A half pair \ufffd here"


@pytest.mark.parametrize("keep", range(0, 400, 7))
def test_a_list_cut_anywhere_gives_its_whole_records(tmp_path, keep):
    one = {"id": "é😀", "conversations": [{"from": "human", "value": "a]}\\\"é"}, {"from": "gpt", "value": "b😀"}]}
    whole = json.dumps([one] * 3, ensure_ascii=False).encode()
    part = whole[:keep]
    complete = sum(end <= len(part) for end in _ends(whole, json.dumps(one, ensure_ascii=False).encode()))
    path = tmp_path / "cut.json"
    path.write_bytes(part)
    if complete == 0:
        with pytest.raises(UserError, match=r"cut\.json"):
            _read(path)
    else:
        conversations, report = _read(path)
        assert len(conversations) == complete
        assert bool(report.notes) == (len(part) < len(whole))


def _ends(whole, record):
    ends, at = [], 0
    while (at := whole.find(record, at)) >= 0:
        at += len(record)
        ends.append(at)
    return ends


def test_records_longer_than_a_chunk_and_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("data.records.CHUNK", 37)  # so that every record crosses chunks, and characters are split
    records = [
        {"id": i, "messages": [{"role": "user", "content": "é" * i}, {"role": "assistant", "content": "ü" * 50}]}
        for i in range(1, 60)
    ]
    as_list, lines = tmp_path / "a.json", tmp_path / "a.jsonl"
    as_list.write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8")
    lines.write_text("\n\n".join(json.dumps(r, ensure_ascii=False) for r in records) + '\n{"id": 3, "mess', "utf-8")
    first, _ = _read(as_list)
    second, report = _read(lines)
    assert first == second and [c.messages[0].content for c in first] == ["é" * i for i in range(1, 60)]
    assert report.dropped == {"cut off or malformed JSON": 1}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such file"),
        (b"", "empty"),
        (b" \n ", "empty"),
        (b"[]", "without records"),
        (b"hello", "no JSON"),
        (b'[{"conversations": []}, 3]', "1 x empty record"),
        (b'[{"conversations": [{"from": "human", "value": "\xff"}]}]', "UTF-8"),
        (b'{\n "a": 1\n}', "none of its"),
    ],
)
def test_a_useless_file_is_told_in_one_line(tmp_path, content, says):
    path = tmp_path / "data.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        _read(path)
    message = str(caught.value)
    assert str(path) in message and says in message and "would work" in message and "\n" not in message
