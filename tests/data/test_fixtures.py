"""The fixtures: made by their script, held-out data separate, keys and numbers of one token."""

import json

import numpy as np
import yaml

from data.conversation import Message
from data.templates import render
from data.tokenizer import Tokenizer
from scripts import make_fixtures
from tests.conftest import REPOSITORY

FIXTURES = REPOSITORY / "data/fixtures"


def _turns(name):
    records = json.loads((FIXTURES / name).read_text())
    return [turn["value"] for record in records for turn in record["conversations"]]


def test_the_script_writes_what_is_committed(tmp_path):
    make_fixtures.main(tmp_path)
    names = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert len(names) == 9
    for name in names:
        if name.name != "tiny.model":  # sentencepiece's trainer writes its version's fields
            assert (tmp_path / name).read_bytes() == (FIXTURES / name).read_bytes(), name


def test_held_out_shares_no_question_and_no_answer():
    train, held_out = set(_turns("conversations.json")), _turns("conversations_held_out.json")
    assert len(held_out) > 240 and not train & set(held_out)
    cases = [json.loads(line) for line in (FIXTURES / "line_cases.jsonl").read_text().splitlines()]
    assert len(cases) == 200
    for case in cases:
        assert case["prompt"] not in train and case["correct_line"].strip() not in train
        assert (
            case["correct_line"] in case["prompt"]
            and case["prompt"].count("\nline ") == case["num_lines"]
        )
        assert case["correct_line"] == f"line {case['random_idx'][0]}: {case['expected_number']}\n"


def test_proportion_and_single_tokens():
    records = json.loads((FIXTURES / "conversations.json").read_text())
    assert (
        sum(record["id"].startswith("lines_") for record in records) == 0.9 * len(records) == 6300
    )
    tokenizer = Tokenizer.load(FIXTURES / "tiny_tokenizer")
    for key in make_fixtures.KEYS:
        assert len(tokenizer.encode(f" {key}")) == 1, key
    for value in make_fixtures.NUMBERS:
        assert len(tokenizer.encode(f" {make_fixtures.KEYS[0]}: {value}")) == 2, value


def test_no_conversation_is_cut():
    """The second part of a cut one would ask about missing lines, and so train the model to
    guess."""
    context_length = yaml.safe_load((REPOSITORY / "configs/quickstart.yaml").read_text())["data"][
        "context_length"
    ]
    tokenizer = Tokenizer.load(FIXTURES / "tiny_tokenizer")
    records = json.loads((FIXTURES / "conversations.json").read_text())
    letters = [sum(len(turn["value"]) for turn in record["conversations"]) for record in records]
    longest = np.argsort(letters)[-500:]  # tokens and letters correlate by 0.998
    for record in (records[number] for number in longest):
        messages = [
            Message(("user", "assistant")[i % 2], turn["value"])
            for i, turn in enumerate(record["conversations"])
        ]
        segments = render(messages, "vicuna_v1.1", tokenizer)
        assert sum(len(segment.ids) for segment in segments) <= context_length, record["id"]
