"""Jobs as files: what is read equals what was written, and no file runs code or leaves its folder."""

import base64
import dataclasses
import json
from datetime import datetime
from pathlib import Path

import pytest

from data.clean import CleanConfig
from data.encode import EncodingRules
from data.errors import UserError
from data.job import Job
from data.job_file import job_bytes, read_job
from data.sources import Source, Sources
from data.tokenizer import Tokenizer

TOKENIZER = Path(__file__).parents[2] / "data/fixtures/tiny_tokenizer"


@pytest.fixture(scope="module")
def job() -> Job:
    """A job none of whose arguments is the default."""
    tokenizer = (
        Tokenizer.load(TOKENIZER)
        .with_controls(["<think>"])
        .with_text_tokens(["<think>"])
        .with_template_date(datetime(2026, 2, 3))
        .with_template_kwargs({"enable_thinking": False, "depth": [1, {"a": None}]})
    )
    chats, books = (
        Source(
            "gs://bucket/chats",
            template="chatml",
            weight=0.5,
            fields={"human": "user"},
            left_out=("gs://bucket/chats/prepared",),
        ),
        Source("/books", format="text", add_bos=True, control_tokens=True),
    )
    rules = EncodingRules(
        4096,
        clean=CleanConfig(html="always", near_duplicates=0.8, languages=("en", "de")),
        train_on="last",
        cut_prompts=True,
        unpaired=True,
        share_prompts=True,
    )
    return Job(Sources((chats,), (books,), held_out_fraction=0.25), tokenizer, rules)


def test_a_job_is_read_as_it_was_written(job):
    read = read_job(job_bytes(job), "job.json")
    arguments = {field.name for field in dataclasses.fields(Job)} - {"tokenizer"}
    for name in arguments:
        assert getattr(read, name) == getattr(job, name), name
    for name in ("fingerprint", "text_tokens", "template_date", "template_kwargs"):
        assert getattr(read.tokenizer, name) == getattr(job.tokenizer, name), name
    text = "café 123\n\ttwo  <think>spaces"
    assert read.tokenizer.encode(text) == job.tokenizer.encode(text)


def _changed(job: Job, **changes) -> bytes:
    return json.dumps({**json.loads(job_bytes(job)), **changes}).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"sources": None},
        {"sources": {"train": []}},
        {"unknown": 1},
        {"rules": {"context_length": 64, "clean": {"html": "never"}}},
        {"tokenizer": []},
        {"tokenizer": {"files": {"tokenizer.json": "%"}}},
    ],
)
def test_a_file_of_another_form_is_named(job, changes):
    with pytest.raises(UserError, match=r"^work/job\.json: not a job of this version"):
        read_job(_changed(job, **changes), "work/job.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"3", b"\x80\x04K\x03."])
def test_a_file_that_is_not_json_is_named(content):
    with pytest.raises(UserError, match=r"^work/job\.json: not a job of this version"):
        read_job(content, "work/job.json")


def test_no_file_is_written_outside_of_the_tokenizers_folder(job, tmp_path):
    escaped = tmp_path / "escaped"
    tokenizer = json.loads(job_bytes(job))["tokenizer"]
    tokenizer["files"][f"../../..{escaped}"] = base64.b64encode(b"mine").decode()
    tokenizer["files"][str(escaped)] = base64.b64encode(b"mine").decode()
    with pytest.raises(UserError, match="outside of its folder"):
        read_job(_changed(job, tokenizer=tokenizer), "work/job.json")
    assert not escaped.exists()
