"""Makes two short lm-eval tasks from a book: python -m scripts.make_short_tasks BOOK.txt

`book_next_sentence` asks which of four sentences of similar length follows three given ones (like
HellaSwag); `book_last_word` asks for the last word of a passage, which also occurs earlier in it
(like LAMBADA, Paperno et al. 2016). They test, without a download, whether a model keeps its
abilities when trained for long contexts:

    python -m eval.harness --checkpoint DIR --tasks book_last_word --include-path DIR --output OUT

Writes a JSON file and a YAML file per task; the same book, count and seed always give the same
files.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import UserError, first_line
from data.outputs import output_files
from data.synthetic.tasks import sentences_of
from data.untrusted_files import read_text
from trainer.options import AtLeastOne, AtLeastZero, command, option

SENTENCES = 3  # per context
FEWEST, MOST = 30, 300  # characters per sentence
AWAY = 50  # minimum distance, in sentences, between a context and a wrong answer
TASKS = {
    "book_next_sentence": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    },
    # lm-eval puts its delimiter before choices, but not before a log-likelihood target.
    "book_last_word": {
        "output_type": "loglikelihood",
        "doc_to_target": "{{' ' + word}}",
        "metric_list": [{"metric": "acc"}],
    },
}


def next_sentences(
    sentences: list[str], count: int, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Returns at most `count` next-sentence questions: context, four choices, the correct label.

    The three wrong answers are the closest in length among 30 sentences drawn from elsewhere.
    """
    questions = []
    for start in rng.permutation(len(sentences) - SENTENCES).tolist():
        right = sentences[start + SENTENCES]
        if not all(map(_is_usable, sentences[start : start + SENTENCES + 1])):
            continue
        elsewhere = [
            sentences[i]
            for i in rng.choice(len(sentences), 30)
            if abs(i - start) > AWAY and _is_usable(sentences[i])
        ]
        wrong = sorted(
            set(elsewhere) - {right},
            key=lambda sentence: (abs(len(sentence) - len(right)), sentence),
        )[:3]
        if len(wrong) == 3:
            label = int(rng.integers(4))
            questions.append(
                {
                    "context": " ".join(sentences[start : start + SENTENCES]),
                    "label": label,
                    "choices": [*wrong[:label], right, *wrong[label:]],
                }
            )
        if len(questions) == count:
            break
    return questions


def last_words(sentences: list[str], count: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Returns at most `count` passages and their last words, which also occur earlier in them."""
    questions = []
    for start in rng.permutation(len(sentences) - SENTENCES).tolist():
        passage = sentences[start : start + SENTENCES + 1]
        end = re.fullmatch(r"(.*) ([a-z]{4,})[.!?][”\"]?", passage[-1])
        if end and all(map(_is_usable, passage)):
            before = " ".join([*passage[:-1], end[1]])
            if end[2] in re.findall(r"[a-z]+", before):
                questions.append({"context": before, "word": end[2]})
        if len(questions) == count:
            break
    return questions


def _is_usable(sentence: str) -> bool:
    return FEWEST <= len(sentence) <= MOST


def write(folder: Path, name: str, questions: list[dict[str, Any]]) -> None:
    """Writes a task's questions and its lm-eval description (JSON, which is valid YAML)."""
    file = folder.resolve() / f"{name}.json"
    file.write_text(
        "".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8"
    )
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "doc_to_text": "{{context}}",
        "target_delimiter": " ",
        **TASKS[name],
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task, indent=1) + "\n", encoding="utf-8")


def work(args: Options) -> None:
    """Writes both tasks.

    Raises:
      UserError: the book cannot be read, or is too short.
    """
    try:
        text = read_text(args.book)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{args.book}: cannot read the book ({first_line(error)})") from error
    sentences = sentences_of(text)
    files = {f"{name}.json": b'"context"' for name in TASKS}
    files |= {f"{name}.yaml": b'"doc_to_text": "{{context}}"' for name in TASKS}
    folder = output_files(args.output, files)
    for number, (name, make) in enumerate(
        {"book_next_sentence": next_sentences, "book_last_word": last_words}.items()
    ):
        questions = make(sentences, args.count, np.random.default_rng([args.seed, number]))
        if len(questions) < args.count:
            fewer = f" or --count {len(questions)}" if questions else ""
            raise UserError(
                f"{args.book}: gives {len(questions)} questions for {name}, but {args.count} are "
                f"needed; use a longer book{fewer}"
            )
        write(folder, name, questions)
        print(f"{folder / name}.yaml: {args.count} questions from {args.book.name}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    book: Path = option("a UTF-8 text", positional=True, metavar="BOOK.txt")
    count: AtLeastOne = option("number of questions per task", 200)
    seed: AtLeastZero = option("seed for drawing the questions", 0)
    output: str = option("folder for the tasks")


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
