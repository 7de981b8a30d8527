"""Folders of prepared data: too many documents are refused, sources are listed once."""

import json
from dataclasses import dataclass

import pytest

from data import index, source_files
from data.encode import EncodingRules
from data.engine import PROCESSES, Processes
from data.errors import UserError
from data.prepare import prepare
from data.sources import Source, Sources
from data.tokenizer import Tokenizer
from tests.data.test_fixtures import FIXTURES


@dataclass(frozen=True)
class InParts(Processes):
    """Prepares in parts and shards, as Beam does, in this process."""

    in_parts = True


def _prepare(folder, target, engine):
    tokenizer = Tokenizer.load(FIXTURES / "tiny_tokenizer")
    source = Source(str(folder), template="vicuna_v1.1")
    return prepare(
        Sources((source,)), tokenizer, EncodingRules(256), target, progress=False, engine=engine
    )


@pytest.fixture
def chats(tmp_path):
    """Returns a folder of three files with four conversations each, whose first one is always the
    same."""
    folder = tmp_path / "in"
    folder.mkdir()
    for file in range(3):
        questions = ["Who?", *(f"What is {file} and {number}?" for number in range(3))]
        records = [
            {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": "That."}]}
            for q in questions
        ]
        (folder / f"{file}.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


@pytest.mark.parametrize("engine", [PROCESSES, InParts()])
def test_too_many_documents_are_refused(chats, tmp_path, monkeypatch, capsys, engine):
    """By hand: 12 conversations, 2 of them repeated."""
    monkeypatch.setattr(index, "MOST_DOCUMENTS", 9)
    with pytest.raises(UserError, match=r"found 10 documents, but a prepared .* at most 9 docu"):
        _prepare(chats, tmp_path / "made", engine)
    files = [path.name for path in (tmp_path / "made").rglob("*") if path.is_file()]
    assert not any("array_record" in name for name in files), "refused after writing shards"
    errors = capsys.readouterr().err
    assert ("warning: data.sources: found 10 conversations" in errors) == engine.in_parts
    monkeypatch.setattr(index, "MOST_DOCUMENTS", 10)
    assert len(_prepare(chats, tmp_path / "made", engine).train) == 10
    assert not capsys.readouterr().err and len(list((tmp_path / "made").glob("[!.]*"))) == 1


def test_a_named_folder_missing_in_a_store_is_not_prepared(chats, tmp_path, monkeypatch):
    """Another process has prepared it, so reading the sources again would hide that it is gone."""
    monkeypatch.setenv("LONGSTRIPE_CACHE", str(tmp_path / "cache"))
    tokenizer = Tokenizer.load(FIXTURES / "tiny_tokenizer")
    source, target = Source(str(chats), template="vicuna_v1.1"), "memory://bucket/prepared"
    with pytest.raises(UserError, match="not found on this machine"):
        prepare(
            Sources((source,)),
            tokenizer,
            EncodingRules(256),
            target,
            progress=False,
            engine=InParts(),
            key="0123456789",
        )


@pytest.mark.parametrize("engine", [PROCESSES, InParts()])
def test_a_source_is_listed_once_and_files_that_are_not_read_are_in_the_report_once(
    chats, tmp_path, monkeypatch, engine
):
    """In report.json and in what a start prints, whether or not it prepares the data."""
    (chats / "more.json.bak").write_text("[]")
    listed, find = [], source_files.find
    monkeypatch.setattr(source_files, "find", lambda *given: listed.append(given) or find(*given))
    for _ in range(2):
        opened = _prepare(chats, tmp_path / "prepared", engine)
        assert len(listed) == 1
        listed.clear()
        assert opened.report.summary().count("not read: more.json.bak; files whose names") == 1
        (written,) = json.loads((opened.folder / "report.json").read_text())
        assert written["path_notes"] == opened.report.notes
