"""RULER's tasks that need no download: needles, variable tracking, common and frequent words.

    python -m eval.ruler --checkpoint DIR_OR_HF --tokens 4096 16384 [--tasks niah_single_1 vt ...]
    --output DIR

Tasks, wording, answer lengths and scoring are RULER's (Hsieh et al. 2024; github.com/NVIDIA/RULER);
so are the solved examples before the questions of vt and cwe. The random words are ours. Tasks that
RULER hides in essays take --text FILE; without it they are hidden in noise, so scores are not
comparable. Questions about documents take --qa FILE. Writes results.json, cases.jsonl and ruler.png
into --output.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from data.errors import UserError, first_line
from data.synthetic import tasks
from data.synthetic.tasks import Exercise, Haystack
from data.untrusted_files import parse_json, read_text
from eval import runner, suite
from eval.live_test import LiveTest
from eval.needle import check_sentences, read_haystack
from eval.prompts import Count, Prompt
from trainer import entry
from trainer.options import AtLeastOne, AtLeastZero, EachOnce, Tokens, option

NEEDLES = Haystack("needles")
LEAST_WORDS = 53
"""In fewer words of fwe the fourth most frequent may be as rare as the fifth, or absent."""


class Task(NamedTuple):
    """One of RULER's tasks.

    Attributes:
      exercise: makes one from a generator of random numbers and a number of units.
      new_tokens: tokens of an answer, `tokens_to_generate` in RULER's
        scripts/data/synthetic/constants.py.
      in_text: whether RULER hides it in essays, so that `exercise` takes a `haystack`.
      least_units: units of its shortest case.
    """

    exercise: Callable[..., Exercise]
    new_tokens: int
    in_text: bool = False
    least_units: int = 1


def _needles(in_text: bool = False, **options: Any) -> Task:
    return Task(functools.partial(tasks.needles, **options), 128, in_text)


# RULER's scripts/synthetic.yaml.
TASKS = {
    "niah_single_1": _needles(),
    "niah_single_2": _needles(in_text=True),
    "niah_single_3": _needles(in_text=True, value_kind="uuids"),
    "niah_multikey_1": _needles(in_text=True, keys=4),
    "niah_multikey_2": _needles(haystack=NEEDLES),
    "niah_multikey_3": _needles(haystack=NEEDLES, key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": _needles(in_text=True, values=4),
    "niah_multiquery": _needles(in_text=True, queries=4),
    "vt": Task(tasks.variables, 30),
    "cwe": Task(tasks.common_words, 120),
    "fwe": Task(tasks.frequent_words, 50, least_units=LEAST_WORDS),
}
SHORT = 4096  # below, RULER repeats the words of cwe less often
EXAMPLE_TOKENS = 500  # of vt's example without its answer, or more with LEAST_EXAMPLE_UNITS
LEAST_EXAMPLE_UNITS = 5
QA_TOKENS = 32
QA_FORM = (
    'a line of JSON for each question: {"question": "...", "answers": ["..."], "documents": '
    '["the one with the answer", "..."]}'
)


def make_cases(
    count: Count,
    lengths: Sequence[int],
    names: Sequence[str] = tuple(TASKS),
    each: int = 20,
    seed: int = 0,
    haystack: Haystack = Haystack(),  # noqa: B008
) -> list[suite.Case]:
    """Returns `each` cases for each task and length.

    Args:
      haystack: for the tasks that RULER hides in essays.
    """
    cases = []
    for name in names:
        for tokens in lengths:
            options = _options(name, tokens, haystack, count)
            make = functools.partial(_case, name, tokens, options, seed)
            cases += suite.cases_of(make, tokens, count, each)
    return cases


def _options(name: str, tokens: int, haystack: Haystack, count: Count) -> dict[str, Any]:
    """Returns the arguments of a task's exercise that depend on its text, length or tokenizer."""
    if TASKS[name].in_text:
        return {"haystack": haystack}
    if name == "vt":
        return {"example_units": _example_units(count)}
    if name == "cwe" and tokens < SHORT:
        return {
            "often": 6,
            "seldom": 1,
            "example_units": 10,
            "example_often": 3,
            "example_seldom": 1,
        }
    return {}


def _example_units(count: Count) -> int:
    """Returns the noise of vt's example: as much as fits into EXAMPLE_TOKENS, as in RULER."""

    def tokens(units: int) -> int:
        exercise = tasks.variables(np.random.default_rng(0), units, True, letters=3)
        text = exercise.text + exercise.prefix
        # Of the text alone, without the chat template's: what a second copy adds.
        return count(Prompt(text + text, 0)) - count(Prompt(text, 0))

    units = LEAST_EXAMPLE_UNITS
    while tokens(units + 1) <= EXAMPLE_TOKENS:
        units += 1
    return units


def _case(
    name: str, tokens: int, options: dict[str, Any], seed: int, units: int, sample: int = 0
) -> suite.Case:
    """Returns a task's case, meant to have this many tokens.

    Args:
      units: 1 is the shortest case.
      options: of the task's exercise.
    """
    task = TASKS[name]
    rng = np.random.default_rng([seed, sample, tokens, list(TASKS).index(name)])
    exercise = task.exercise(rng, units - 1 + task.least_units, True, **options)
    prompt = Prompt(exercise.text, task.new_tokens, exercise.prefix)
    return suite.Case(name, prompt, exercise.expected, tokens)


class Question(NamedTuple):
    """A question about documents."""

    text: str
    answers: tuple[str, ...]
    """Any of which is right."""
    documents: tuple[str, ...]
    """Those that hold the answer."""
    location: str
    """Its file and line, for messages."""


def read_questions(path: str) -> list[Question]:
    """Reads questions from a file of JSON lines.

    Raises:
      UserError: the file cannot be read, has no question, or a line has another form.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--qa: {path} cannot be read ({first_line(error)})") from None
    questions = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            question = _question(line, f"{path}:{number}")
            if question is None:
                raise UserError(f"{path}:{number}: not a question; the form is {QA_FORM}")
            questions.append(question)
    if not questions:
        raise UserError(f"--qa: {path} has no question; the form is {QA_FORM}")
    return questions


def _question(line: str, location: str) -> Question | None:
    """Returns the question in a line of JSON; None if the line has another form."""
    try:
        row = parse_json(line)
        text, answers, documents = row["question"], row["answers"], row["documents"]
    except (ValueError, KeyError, TypeError):
        return None
    if not (isinstance(text, str) and text):
        return None
    if not (_is_list_of_texts(answers) and _is_list_of_texts(documents)):
        return None
    return Question(text, tuple(answers), tuple(documents), location)


def _is_list_of_texts(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(entry, str) for entry in value)


def qa_cases(
    path: str, count: Count, lengths: Sequence[int], each: int, seed: int
) -> list[suite.Case]:
    """Returns RULER's questions about documents: the answer's document among others from the file.

    Each case has another question. A line says of each length which questions are too long for it,
    and whether the file has fewer than `each` others, or too few documents to fill it once.

    Raises:
      UserError: the file cannot be read, or a line has another form.
    """
    questions = read_questions(path)
    documents = list(dict.fromkeys(document for q in questions for document in q.documents))
    cases = []
    for tokens in lengths:
        made, too_long, repeat = list[suite.Case](), list[str](), False
        for sample, question in enumerate(questions):
            if len(made) == each:
                break
            others = [document for document in documents if document not in question.documents]
            make = functools.partial(_qa_case, question, others, (seed, sample, tokens))
            try:
                shown = suite.units_to_fill(make, tokens, count)
            except UserError as error:
                too_long.append(f"{question.location}: {error}")
                continue
            repeat |= shown > len(question.documents) + len(others)
            made.append(make(shown))
        _say_what_differs(path, tokens, each, len(made), too_long, repeat)
        cases += made
    return cases


def _say_what_differs(
    path: str, tokens: int, each: int, made: int, too_long: Sequence[str], repeat: bool
) -> None:
    """Prints how the cases of a file and length differ from what was asked for."""
    if too_long:
        others = f" (and {len(too_long) - 1} others)" if len(too_long) > 1 else ""
        print(f"warning: skipped: {too_long[0]}{others}", file=sys.stderr)
    if made < each:
        fit = " that fit" if too_long else ""
        print(
            f"note: --qa: cases of {tokens:,} tokens: {made}, not {each}, since {path} has no more "
            f"questions{fit}",
            file=sys.stderr,
        )
    if repeat:
        print(
            f"note: --qa: all documents of {path} take fewer than {tokens:,} tokens; they are "
            "repeated, as in RULER",
            file=sys.stderr,
        )


def _qa_case(
    question: Question, others: Sequence[str], seed: tuple[int, int, int], shown: int
) -> suite.Case:
    """Returns a case with `shown` documents, but always the question's; if there are fewer, they
    are repeated.

    Args:
      question: the question.
      others: documents without the answer.
      seed: of the documents' order; ends with the case's length in tokens.
      shown: how many documents the case shows.
    """
    rng = np.random.default_rng(seed)
    chosen = [*question.documents, *(others[i] for i in rng.permutation(len(others)))]
    shown = max(shown, len(question.documents))
    chosen = (chosen * -(-shown // len(chosen)))[:shown]
    shuffled = [chosen[i] for i in rng.permutation(len(chosen))]
    context = "\n\n".join(
        f"Document {number}:\n{document}" for number, document in enumerate(shuffled, 1)
    )
    instruction = (
        "Answer the question based on the given documents. Only give me the answer and do not "
        "output any other words."
    )
    text = (
        f"{instruction}\n\nThe following are given documents.\n\n{context}\n\n"
        f"{instruction}\n\nQuestion: {question.text}"
    )
    prompt = Prompt(text, QA_TOKENS, " Answer:")
    return suite.Case("qa", prompt, question.answers, seed[-1], scoring="any")


@dataclasses.dataclass(frozen=True)
class LiveRuler(LiveTest):
    """RULER's tasks, during training."""

    tasks: tuple[str, ...] = ("niah_single_1", "niah_multikey_2", "vt")
    """Their names."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := sorted(set(self.tasks) - set(TASKS)):
            raise ValueError(
                f"evaluations.tasks: found {unknown[0]!r}; RULER's tasks are {', '.join(TASKS)}"
            )

    def cases(self, count: Count, lengths: Sequence[int]) -> list[suite.Case]:
        """Returns the cases of these lengths."""
        return make_cases(count, lengths, self.tasks, self.count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's own options."""

    tokens: tuple[Tokens, ...] = option("lengths, answers included, such as 16K", action=EachOnce)
    tasks: tuple[str, ...] = option(
        "tasks (default: all)", tuple(TASKS), choices=list(TASKS), action=EachOnce
    )
    count: AtLeastOne = option("cases of each task and length", 20)
    text: str | None = option(
        "the text for tasks that RULER hides in essays (default: its noise)", None, metavar="FILE"
    )
    qa: str | None = option(f"questions about documents; {QA_FORM}", None, metavar="FILE.jsonl")
    seed: AtLeastZero = option("seed of the cases", 0)


parse = functools.partial(runner.parse_evaluation, Options)


def evaluate(args: argparse.Namespace) -> list[suite.Result]:
    """Makes and answers the cases, and writes the results."""
    runner.check_flags(args)
    if args.text and not any(TASKS[name].in_text for name in args.tasks):
        in_text = ", ".join(name for name, task in TASKS.items() if task.in_text)
        raise UserError(f"--text: none of --tasks takes a text; {in_text} would")
    haystack = read_haystack(args.text)
    suite.results_folder(args.output, "ruler")
    opened = runner.open_respondent(args)
    length = opened.respondent.length
    if args.text:
        check_sentences(args.text, haystack, args.tokens, length)
    cases = make_cases(length, args.tokens, args.tasks, args.count, args.seed, haystack)
    cases += qa_cases(args.qa, length, args.tokens, args.count, args.seed) if args.qa else []
    about = {"haystack": args.text or "noise, where RULER takes essays", "seed": args.seed}
    return suite.run("ruler", opened, cases, args.output, about)


main = runner.command(parse, evaluate)


if __name__ == "__main__":
    entry.leave(main())
