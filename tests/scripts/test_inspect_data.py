"""scripts.inspect_data: rows as text with the trained parts in colour, lengths and padding, for
known records."""

import json
import re

import numpy as np
import yaml

from data.conversation import Message
from data.encode import EncodingRules
from data.loader import Loader
from data.prepare import prepare
from data.sources import Source, Sources
from data.templates import render
from data.tokenizer import Tokenizer
from scripts import inspect_data as inspect
from tests.conftest import REPOSITORY

TINY = REPOSITORY / "data/fixtures/tiny_tokenizer"
TALKS = [
    [("human", f"Say {n}."), ("gpt", f"It is {n}, é."), ("human", "More?"), ("gpt", "No.")]
    for n in range(6)
]


def write(folder):
    path = folder / "talks.json"
    path.write_text(
        json.dumps(
            [{"conversations": [{"from": f, "value": v} for f, v in talk]} for talk in TALKS]
        )
    )
    return path


def test_a_row_reads_as_its_conversations_and_only_answers_are_coloured(tmp_path):
    tokenizer = Tokenizer.load(TINY)
    made = prepare(
        Sources((Source(str(write(tmp_path))),)),
        tokenizer,
        EncodingRules(512),
        tmp_path / "prepared",
        progress=False,
    )
    [text] = [inspect.row_text(Loader(made, 512, 1, 0).row(0), tokenizer, 512)]
    coloured = sorted(
        text.plain[span.start : span.end] for span in text.spans if span.style == inspect.IN_LOSS
    )
    assert coloured == sorted([f" It is {n}, é.</s>" for n in range(6)] + [" No.</s>"] * 6)
    messages = [
        Message({"human": "user", "gpt": "assistant"}[role], content) for role, content in TALKS[3]
    ]
    ids = [token for segment in render(messages, "vicuna_v1.1", tokenizer) for token in segment.ids]
    assert tokenizer.decode(ids, skip_special=False) in text.plain
    assert (
        all(f"── document {number} ──" in text.plain for number in range(1, 7))
        and "document 7" not in text.plain
    )
    padding = 512 - int(made.train.lengths.sum())
    assert (
        f"{made.train.lengths.sum()} tokens, {padding} of padding ──" in text.plain and padding > 0
    )
    bracketed = inspect.row_text(
        Loader(made, 512, 1, 0).row(0), tokenizer, 512, brackets=True
    ).plain
    assert (
        sorted(re.findall("⟦(.*?)⟧", bracketed)) == coloured
        and re.sub("[⟦⟧]", "", bracketed) == text.plain
    )
    short = inspect.row_text(Loader(made, 512, 1, 0).row(0), tokenizer, 20)
    assert "the first 20 are shown" in short.plain and len(short.plain) < len(text.plain) / 3


def test_histogram_counts_each_document_once():
    lines = inspect.histogram(np.array([1, 2, 3, 4, 7, 8, 1000])).splitlines()
    assert [int(line.split("documents")[0].split()[-1]) for line in lines] == [
        1,
        2,
        2,
        1,
        0,
        0,
        0,
        0,
        0,
        1,
    ]
    shares = [float(line.split("documents")[1].split("%")[0]) for line in lines]
    assert abs(sum(shares) - 100) < 0.5 and max(shares) == shares[-1] == 97.6


def test_both_completions_of_a_pair_are_shown(tmp_path, capsys):
    pair = {"prompt": "How far is it?", "chosen": " It is far.", "rejected": " No."}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    recipe = {
        "model": {"tokenizer": str(TINY), "preset": "tiny"},
        "preference": {"loss": "orpo"},
        "data": {
            "sources": [{"path": str(tmp_path / "pairs.jsonl"), "format": "preference"}],
            "prepared": str(tmp_path / "prepared"),
            "held_out_fraction": 0.0,
            "context_length": 128,
        },
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    assert inspect.main([str(tmp_path / "mine.yaml")]) == 0
    output = capsys.readouterr().out
    assert "⟦ It is far." in output and "⟦ No." in output


def test_the_command_describes_a_recipes_data(tmp_path, capsys):
    recipe = {
        "model": {"tokenizer": str(TINY), "preset": "tiny"},
        "data": {
            "path": str(write(tmp_path)),
            "prepared": str(tmp_path / "prepared"),
            "held_out_fraction": 0.0,
        },
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    recipe = str(tmp_path / "mine.yaml")
    command = [recipe, "--rows", "1", "--tokens", "50", "--data.context_length", "128"]
    assert inspect.main(command) == 0
    output = capsys.readouterr().out
    assert "ASSISTANT:⟦ It is" in output and "tokens in the loss are in ⟦ ⟧" in output, (
        "captured: no terminal, no colours"
    )
    assert (
        "train: 6 documents" in output
        and "6 records, 6 kept" in output
        and "train: 6 documents" in output
    )
    assert "row 0" in output and "row 1" not in output
    assert "rows of 128 in the first epoch" in output and "% padding" in output
    assert inspect.main([*command[:3], "--data.context_length", "4K"]) == 0
    assert "\n1 row of 4,096 in the first epoch" in capsys.readouterr().out
    assert inspect.main([str(tmp_path / "gone.yaml")]) == 2
    assert "gone.yaml" in capsys.readouterr().err
    for flag, meant in (
        ("--row", "--rows"),
        ("--token", "--tokens"),
        ("--data.context_lenght", "--data.context_length"),
    ):
        assert inspect.main([command[0], flag, "1"]) == 2
        assert f"unknown field {flag} (did you mean {meant}?)" in capsys.readouterr().err
