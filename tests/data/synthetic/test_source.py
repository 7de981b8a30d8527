"""Generated exercises: deterministic, correct, of all sizes, and without any key-value pair of the
evaluation."""

import collections
import itertools
import os
import re
from pathlib import Path

import pytest

from data.conversation import Message
from data.errors import UserError
from data.synthetic.source import TASKS, Spec, exercise_of, generate, write
from data.synthetic.split import is_evaluation, is_reserved
from data.synthetic.tasks import MOST_TRAINING_LINES
from data.templates import render
from data.tokenizer import Tokenizer
from eval import line_cases


def count(text):
    """Counts words and punctuation marks as tokens."""
    return len(re.findall(r"\w+|[^\w\s]", text))


@pytest.mark.parametrize("task", TASKS)
def test_exercises_are_deterministic_and_of_all_sizes(task):
    path = f"synthetic:{task}?count=60&seed=3"
    records = generate(path, 3000, count)
    assert records == generate(path, 3000, count) != generate(path.replace("=3", "=4"), 3000, count)
    assert len({record["id"] for record in records}) == 60
    sizes = []
    for record in records:
        question, answer = record["conversations"]
        assert (question["from"], answer["from"]) == ("human", "gpt")
        sizes.append(count(question["value"] + answer["value"]))
    assert max(sizes) <= 3000 and sorted(sizes)[-6] > 2400 and sorted(sizes)[6] < 900


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_in_the_text_and_no_pair_is_for_evaluation(task):
    for number in range(5):
        exercise = exercise_of(Spec(task, 5, 0, None), None, number, 20)
        assert all(item in exercise.text for item in exercise.expected)
        assert all(item in exercise.prefix + exercise.rest for item in exercise.expected)
        pairs = {
            "lines": r"line (\S+): REGISTER_CONTENT is <(\d+)>",
            "needles": r"magic \w+ for (\S+) is: (\d+)\.",
            "key_values": r'"([0-9a-f-]{36})": "([0-9a-f-]{36})"',
            "variables": r"VAR (\w+) = (\d+)",
            "copying": r"(?i)(paragraph \d+): .* (\d+)\.",
        }[task]
        answers = re.findall(pairs, exercise.text)
        assert answers and not any(
            is_evaluation(key.lower() if task == "copying" else key, value)
            for key, value in answers
        )
        assert task not in ("lines", "needles") or not any(
            map(is_reserved, itertools.chain(*answers))
        )


def test_the_answer_belongs_to_the_key():
    for number in range(8):
        exercise = exercise_of(Spec("lines", 5, 0, None), None, number, 30)
        key = re.search(r"in line (\S+)\?", exercise.text)[1]
        record = dict(re.findall(r"line (\S+): REGISTER_CONTENT is <(\d+)>", exercise.text))
        assert (
            exercise.expected == (record[key],)
            and f"<{record[key]}>" in exercise.rest
            and len(record) == 30
        )
        paragraphs = exercise_of(Spec("copying", 5, 0, None), None, number, 9)
        repeated = re.search(r"Repeat paragraph (\d+)", paragraphs.text)[1]
        assert f"Paragraph {repeated}:{paragraphs.rest}" in paragraphs.text


def test_lines_use_the_wording_of_a_file(tmp_path):
    strange = line_cases.Wording("Learn:\n", "* {key} = {number}\n", "What is {key}?")
    line_cases.write(line_cases.generate(5, 1, wording=strange), tmp_path / "like.jsonl")
    record, *_ = generate(f"synthetic:lines?count=3&like={tmp_path}/like.jsonl", 500, count)
    assert re.fullmatch(
        r"Learn:\n(\* \S+ = \d+\n)+What is \S+\?", record["conversations"][0]["value"]
    )


def test_a_number_of_tokens_determines_the_count():
    records = generate("synthetic:lines?tokens=60000", 3000, count)
    assert len(records) == 40
    tokens = sum(count(turn["value"]) for record in records for turn in record["conversations"])
    assert 0.8 * 60000 < tokens < 1.2 * 60000
    assert Spec.parse("synthetic:lines?tokens=4M").tokens == 4 << 20


def test_a_second_question_repeats_its_share_of_the_lines():
    path = "synthetic:lines?count=20&share=0.25&like=data/fixtures/line_cases.jsonl"
    for record in generate(path, 600, count):
        text, first, *further = [turn["value"] for turn in record["conversations"]]
        written = re.findall(r"line \S+: \d+", text)
        if not further:
            assert len(written) < 3
            continue
        question, answer = further
        repeated = answer.split(", ")
        assert first in written and set(repeated) < set(written) and first not in repeated
        assert len(repeated) == round(0.25 * len(written))
        assert question == f"And {', '.join(re.findall(r'line (.+?):', answer))}?"


@pytest.mark.parametrize("template", ["vicuna_v1.1", "koala"])
def test_short_contexts_have_several_lines_and_room_for_the_template(repository, template):
    tokenizer = Tokenizer.load(repository / "data/fixtures/lines_tokenizer")
    path = f"synthetic:lines?count=200&seed=1&share=1.0&like={repository}/data/fixtures/line_cases.jsonl"
    records = generate(path, 128, lambda text: len(tokenizer.encode(text)))
    lengths = []
    for record in records:
        messages = [
            Message({"human": "user", "gpt": "assistant"}[turn["from"]], turn["value"])
            for turn in record["conversations"]
        ]
        lengths.append(sum(len(segment.ids) for segment in render(messages, template, tokenizer)))
    assert max(lengths) <= 128
    # The question contains it once.
    assert max(record["conversations"][0]["value"].count("line ") for record in records) > 2


def test_files_are_cached_by_everything_that_changes_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LONGSTRIPE_CACHE", "~/own")
    calls = collections.Counter()

    def counted(text):
        calls["count"] += 1
        return count(text)

    path = "synthetic:lines?count=4"
    first = write(path, 500, counted, "a")
    assert first.parent == tmp_path / "own/synthetic"
    before = calls["count"]
    assert write(path, 500, counted, "a") == first and calls["count"] == before
    others = {
        write(path, 600, counted, "a"),
        write(path, 500, counted, "b"),
        write(f"{path}&seed=1", 500, counted, "a"),
    }
    assert len(others | {first}) == 4 and len(first.read_text().splitlines()) == 4


def test_a_file_is_synced_before_it_is_renamed(tmp_path, monkeypatch):
    """After a power loss it is complete or does not exist."""
    monkeypatch.setenv("LONGSTRIPE_CACHE", str(tmp_path))
    events, rename = [], os.replace

    def replace(scratch, file):
        events.append(("rename", Path(scratch)))
        rename(scratch, file)

    monkeypatch.setattr("data.synthetic.source.os.replace", replace)
    monkeypatch.setattr("data.synthetic.source.sync", lambda path: events.append(("sync", path)))
    file = write("synthetic:lines?count=4", 500, count, "a")
    (first, scratch), renamed, last = events
    assert first == "sync" and renamed == ("rename", scratch) and last == ("sync", file.parent)
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("synthetic:line", "with a TASK of lines, needles, key_values, variables, copying"),
        ("synthetic:lines?number=3", "synthetic:TASK?count=2000&seed=0"),
        ("synthetic:needles?like=x", "for lines &like=FILE"),
        ("synthetic:lines?count=many", "numbers are needed"),
        ("synthetic:lines?count=0", "a count of 1 or more"),
        ("synthetic:lines?count=3&tokens=3", "in place of count"),
        ("synthetic:lines?share=1.5", "a share of 0 to 1"),
        ("synthetic:lines?like=gone.jsonl", "gone.jsonl: no line cases"),
    ],
)
def test_invalid_paths_are_refused(path, words):
    with pytest.raises(UserError) as error:
        generate(path, 500, count)
    assert words in str(error.value)
    with pytest.raises(UserError, match="its shortest exercise takes about"):
        generate("synthetic:lines", 50, count)


def test_lines_of_a_million_tokens_are_limited_by_the_available_numbers():
    records = generate("synthetic:lines?count=2", 1_000_000, lambda text: len(text) // 5)
    lines = [
        record["conversations"][0]["value"].count("REGISTER_CONTENT is <") for record in records
    ]
    assert 10_000 < max(lines) <= MOST_TRAINING_LINES < 45_000
