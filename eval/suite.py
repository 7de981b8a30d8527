"""Long-context tests, from cases to results: scoring, averages, and pictures."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from data import outputs, printable
from data.errors import UserError
from eval import pictures, thoughts
from eval.journal import Answer
from eval.prompts import Count, Prompt
from eval.runner import LoadedModel
from eval.scoring import last_integer, wilson


@dataclasses.dataclass(frozen=True)
class Case:
    """A question and its expected answer.

    Attributes:
      task: the test's name; scores of different tasks are never averaged.
      expected: texts, as `scoring` takes them.
      tokens: intended length, answer included.
      depth: position of the answer in the context, 0 to 1; None if it is in several places.
      scoring: a name in SCORINGS.
    """

    task: str
    prompt: Prompt
    expected: tuple[str, ...]
    tokens: int
    depth: float | None = None
    scoring: str = "all"


def clean(text: str) -> str:
    """Cleans a generated text as RULER does: stripped, control characters as line ends."""
    return re.sub(r"[\x00-\x1f]", "\n", text.strip()).strip()


def match_all(text: str, expected: Sequence[str]) -> float:
    """Returns the share of expected texts that occur, ignoring case (RULER's string_match_all)."""
    text = clean(text).lower()
    return sum(item.lower() in text for item in expected) / len(expected)


def match_any(text: str, expected: Sequence[str]) -> float:
    """Returns 1 if any expected text occurs, ignoring case (RULER's string_match_part), else 0."""
    text = clean(text).lower()
    return float(any(item.lower() in text for item in expected))


def match_integer(text: str, expected: Sequence[str]) -> float:
    """Returns 1 if the text's last integer is the expected one (LongChat's test), else 0."""
    return float(last_integer(text) == int(expected[0]))


def similarity(text: str, expected: Sequence[str]) -> float:
    """Returns how similar an answer is to the expected one, 0 to 1, as OpenAI's MRCR does.

    It is difflib's ratio of what follows the required beginning; 0 without that beginning. White
    space around the answer and after the beginning, which MRCR counts, is ignored.

    Args:
      text: the answer.
      expected: the required beginning, and what should follow it.
    """
    beginning, rest = expected
    text = text.strip()
    if not text.startswith(beginning):
        return 0.0
    return difflib.SequenceMatcher(
        None, text.removeprefix(beginning).strip(), rest, autojunk=False
    ).ratio()


SCORINGS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "all": match_all,
    "any": match_any,
    "integer": match_integer,
    "similarity": similarity,
}


@dataclasses.dataclass(frozen=True)
class Result:
    """The mean score of cases that differ only in keys and values.

    Attributes:
      low, high: bounds of its 95% interval.
      prompt_tokens: mean length of the prompts.
      beyond_trained_length: whether any prompt with its answer exceeds the trained length.
    """

    task: str
    tokens: int
    depth: float | None
    cases: int
    score: float
    low: float
    high: float
    prompt_tokens: float
    beyond_trained_length: bool


def results_of(
    cases: Sequence[Case], answers: Sequence[Answer], trained_length: int
) -> list[Result]:
    """Returns the mean scores by task, length and depth, in order of first occurrence."""
    groups: dict[tuple[str, int, float | None], list[tuple[Case, Answer]]] = {}
    for case, answer in zip(cases, answers, strict=True):
        groups.setdefault((case.task, case.tokens, case.depth), []).append((case, answer))
    results = []
    for (task, tokens, depth), group in groups.items():
        scores = [score_of(case, answer) for case, answer in group]
        longest = max(answer.prompt_tokens + case.prompt.new_tokens for case, answer in group)
        results.append(
            Result(
                task,
                tokens,
                depth,
                len(group),
                sum(scores) / len(scores),
                *wilson(sum(scores), len(scores)),
                sum(answer.prompt_tokens for _, answer in group) / len(group),
                longest > trained_length,
            )
        )
    return results


def score_of(case: Case, answer: Answer) -> float:
    """Returns the score of an answer, 0 to 1."""
    return SCORINGS[case.scoring](
        case.prompt.prefix + answer.generated if case.scoring == "similarity" else answer.generated,
        case.expected,
    )


MOST_CUTS = 8
"""Steps that the search for the largest text may take along a wrong slope before it bisects."""
LEAST_FILLED = 0.9
"""The share of the requested tokens that the longest possible case needs to have."""


def largest_within(length: Callable[[int], int], limit: int, most: int) -> int:
    """Returns a number of units whose text is within the limit.

    It is the largest number, or one whose text fills 99% of the limit; 0 if even one unit is too
    long. The length should grow about linearly.
    """
    low, high, shortest = 0, most + 1, length(0)
    low_length, units, cuts = shortest, min(16, most), 0
    while high - low > 1:
        size = length(units)
        if size <= limit:
            low, low_length = units, size
            if size >= 0.99 * limit:
                break
        else:
            high = units
        per_unit = max(size - shortest, 1) / units
        wanted = low + int((limit - low_length) / per_unit)
        cuts += wanted >= high
        if cuts > MOST_CUTS:  # one unit less at a time would take long
            wanted = (low + high) // 2
        units = min(max(wanted, low + 1), high - 1)
    return low


def units_to_fill(make: Callable[[int], Case], tokens: int, count: Count, most: int = 10**7) -> int:
    """Returns the number of units with which `make`'s case fills `tokens`, answer included.

    Raises:
      UserError: the shortest case is longer.
    """

    def length(units: int) -> int:
        return _length(make(max(units, 1)), count)

    units = largest_within(length, tokens, most)
    if not units:
        raise UserError(
            f"{make(1).task}: its shortest case takes {length(1)} tokens, found {tokens}; "
            f"{length(1)} or more would work"
        )
    return units


def cases_of(
    make: Callable[..., Case], tokens: int, count: Count, each: int, most: int = 10**7
) -> list[Case]:
    """Returns `each` cases of at most `tokens` tokens, answers included.

    All have as many units as fill `tokens` in the case of `make(units)`; a longer sample gets fewer
    units. If even the shortest case is too long, or the longest far too short, a warning names it
    and the remaining cases are skipped.

    Args:
      make: returns a case of `units` units; a second argument, `sample`, numbers the cases from 0.
      most: units a case may have.
    """
    cases: list[Case] = []
    try:
        units = units_to_fill(make, tokens, count, most)
        if units == most and (longest := _length(make(units), count)) < LEAST_FILLED * tokens:
            raise UserError(
                f"{make(1).task}: its longest case takes {longest} tokens, found {tokens}; "
                f"{longest} or less would work"
            )
        for sample in range(each):
            make_sample = functools.partial(make, sample=sample)
            case = make_sample(units)
            if _length(case, count) > tokens:
                case = make_sample(units_to_fill(make_sample, tokens, count, units - 1))
            cases.append(case)
    except UserError as error:
        left = "" if not cases else f"; {len(cases)} of {each} cases are left"
        print(f"warning: skipped: {error}{left}", file=sys.stderr)
    return cases


def _length(case: Case, count: Count) -> int:
    """Returns the tokens of a case's prompt and of its longest answer."""
    return count(case.prompt) + case.prompt.new_tokens


def results_folder(path: str | Path, name: str) -> Path:
    """Makes the folder for the results of the evaluation `name`; returns it.

    Raises:
      UserError: as `data.outputs.results_folder`, also if it has another evaluation's results.
    """
    return outputs.results_folder(path, f'"evaluation": "{name}"', f"{name}.png")


def run(
    name: str,
    opened: LoadedModel,
    cases: Sequence[Case],
    output: str | Path,
    options: dict[str, Any],
) -> list[Result]:
    """Answers the cases; writes and prints the results, and returns them.

    The folder receives results.json, cases.jsonl and a picture.

    Args:
      name: of the evaluation and of its picture.
      options: how the cases were made, for results.json.

    Raises:
      UserError: there are no cases; or as `Respondent.answer`.
    """
    if not cases:
        raise UserError(
            f"{name}: no task has cases of --tokens; the warnings say which lengths would work"
        )
    answers = opened.answer([case.prompt for case in cases], output)
    scored, counts = opened.respondent.without_thoughts([case.prompt for case in cases], answers)
    results = results_of(cases, scored, opened.respondent.trained_length)
    folder = Path(output)
    content = {
        "evaluation": name,
        "about": opened.about | options | counts,
        "interval": "95%: Wilson, of the mean score",
        "results": [dataclasses.asdict(result) for result in results],
    }
    rows = [
        _case_row(case, answer, score_of(case, scored_answer))
        for case, answer, scored_answer in zip(cases, answers, scored, strict=True)
    ]
    outputs.write_texts(
        folder,
        {
            "cases.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
            "results.json": json.dumps(content, indent=2) + "\n",
        },
    )
    pictures.scores(results, str(opened.about.get("checkpoint", ""))).savefig(
        folder / f"{name}.png", dpi=120, metadata=outputs.PICTURE_METADATA
    )
    print_table(results)
    if note := thoughts.line(counts):
        print(note, file=sys.stderr)
    print(f"wrote {folder}/results.json, cases.jsonl and {name}.png")
    return results


def _case_row(case: Case, answer: Answer, score: float) -> dict[str, Any]:
    """Returns a line of cases.jsonl."""
    return {
        "task": case.task,
        "tokens": case.tokens,
        "depth": case.depth,
        "prompt": case.prompt.key,
        "expected": case.expected,
        "generated": answer.generated,
        "score": score,
        "prompt_tokens": answer.prompt_tokens,
    }


def print_table(results: Iterable[Result]) -> None:
    """Prints a line for each result."""
    table = printable.plain_table()
    for name, justify in (
        ("task", "left"),
        ("tokens", "right"),
        ("depth", "right"),
        ("cases", "right"),
        ("score", "right"),
        ("interval", "right"),
        ("length", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for result in results:
        table.add_row(
            result.task,
            f"{result.tokens:,}",
            "" if result.depth is None else f"{result.depth:.0%}",
            str(result.cases),
            f"{result.score:.2f}",
            f"{result.low:.2f}-{result.high:.2f}",
            "beyond trained" if result.beyond_trained_length else "within",
        )
    printable.console().print(table)
