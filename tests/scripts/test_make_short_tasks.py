"""Short tasks from a book: the continuation is the right answer, and a book always gives the same
questions."""

import json
import re

import numpy as np
import pytest

from scripts import make_short_tasks

TEXT = " ".join(
    f"The {word} of chapter {number} was seen beside the {word}, said the keeper, and nobody "
    f"doubted the {word}."
    for number, word in enumerate(
        np.random.default_rng(0).choice(["whale", "ship", "harbour", "captain"], 400)
    )
)


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def questions_of(folder, name):
    return [
        json.loads(line)
        for line in (folder / f"{name}.json").read_text(encoding="utf-8").splitlines()
    ]


def test_answers_come_from_the_book(book, tmp_path):
    assert (
        make_short_tasks.main([str(book), "--count", "40", "--output", str(tmp_path / "out")]) == 0
    )
    for question in questions_of(tmp_path / "out", "book_next_sentence"):
        follows = [f"{question['context']} {choice}" in TEXT for choice in question["choices"]]
        assert follows == [number == question["label"] for number in range(4)]
    words = questions_of(tmp_path / "out", "book_last_word")
    assert len(words) == 40
    for question in words:
        assert f"{question['context']} {question['word']}." in TEXT
        assert question["word"] in re.findall("[a-z]+", question["context"])


def test_the_task_description_has_lm_evals_format(book, tmp_path):
    make_short_tasks.main([str(book), "--count", "5", "--output", str(tmp_path / "out")])
    task = json.loads((tmp_path / "out" / "book_last_word.yaml").read_text(encoding="utf-8"))
    assert task["output_type"] == "loglikelihood" and task["doc_to_target"] == "{{' ' + word}}"
    assert task["dataset_kwargs"]["data_files"]["test"] == str(
        (tmp_path / "out" / "book_last_word.json").resolve()
    )


def test_the_same_book_gives_the_same_questions(book, tmp_path):
    for name in ("a", "b"):
        make_short_tasks.main([str(book), "--count", "10", "--output", str(tmp_path / name)])
    make_short_tasks.main(
        [str(book), "--count", "10", "--seed", "1", "--output", str(tmp_path / "c")]
    )
    first, second, other = (questions_of(tmp_path / name, "book_next_sentence") for name in "abc")
    assert first == second != other


def test_a_short_book_and_a_missing_one_are_named(book, tmp_path, capsys):
    assert make_short_tasks.main([str(book), "--count", "5000", "--output", str(tmp_path)]) != 0
    assert "a longer book or --count" in capsys.readouterr().err
    assert make_short_tasks.main([str(tmp_path / "none.txt"), "--output", str(tmp_path)]) != 0
    assert "none.txt: cannot read the book (No such file" in capsys.readouterr().err
