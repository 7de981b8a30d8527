"""The wording of line retrieval, taken from a file in LongChat's format."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re

from data.errors import UserError
from data.untrusted_files import parse_json, read_text


@dataclasses.dataclass(frozen=True)
class Wording:
    """The text around keys and numbers.

    Attributes:
      head: before the lines; line: of one {key} and {number}; tail: the question about a {key}.
      name: the wording's source; accuracies of different wordings are not comparable.
    """

    head: str
    line: str
    tail: str
    name: str = ""

    @property
    def answer(self) -> str:
        """The answer to train on, with {key} and {number}: LongChat's, or the line."""
        if "REGISTER_CONTENT" in self.line:
            return "The <REGISTER_CONTENT> in line {key} is <{number}>."
        return self.line.strip()


def wording_like(path: str | pathlib.Path) -> Wording:
    """Returns header, lines and question as the first case of a file in LongChat's form words them.

    Raises:
      UserError: the file cannot be read, or its first case does not show the form of its lines.
    """
    prompt, correct_line, expected_number = _first_case(path)
    lines = re.findall(r"[^\n]*\n|[^\n]+\Z", prompt)
    before, number, after = correct_line.rpartition(str(expected_number))
    record = [line for line in lines if _number_in(line, after) is not None]
    begins = [line[: line.rindex(str(_number_in(line, after)))] for line in record]
    if correct_line not in record or len(record) < 3 or not number:
        raise UserError(
            f"{path}: the lines of its first case cannot be distinguished from the rest; cases of "
            "at least 3 lines that end like their correct_line would work"
        )
    start = re.sub(r"[\w-]*$", "", _common_prefix(begins))
    end = re.sub(r"^[\w-]*", "", _common_prefix([begin[::-1] for begin in begins])[::-1])
    key = before[len(start) : len(before) - len(end)]
    first, last = lines.index(record[0]), len(lines) - lines[::-1].index(record[-1])
    tail = "".join(lines[last:])
    if not key or key not in tail or lines[first:last] != record:
        raise UserError(
            f"{path}: the question of its first case does not name the key {key!r} after the "
            "lines; another file, or no --like, would work"
        )
    line = _escape(start) + "{key}" + _escape(end) + "{number}" + _escape(after)
    return Wording(
        "".join(lines[:first]),
        line,
        _escape(tail).replace(_escape(key), "{key}"),
        pathlib.Path(path).name,
    )


def _first_case(path: str | pathlib.Path) -> tuple[str, str, int]:
    """Returns prompt, line in question and its number of a file's first case."""
    try:
        case = parse_json(next(line for line in read_text(path).split("\n") if line.strip()))
        return str(case["prompt"]), str(case["correct_line"]), int(case["expected_number"])
    except (OSError, StopIteration, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: no line cases in LongChat's form ({type(error).__name__}: {error}); its "
            'first line should be like {"prompt": "...", "expected_number": 7, "num_lines": 20, '
            '"correct_line": "..."}'
        ) from None


def _common_prefix(texts: list[str]) -> str:
    letters = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(first for first, *_ in letters)


def _number_in(line: str, after: str) -> str | None:
    """The digits of a line before `after`, which ends it; None for other lines."""
    match = re.search(r"([0-9]+)" + re.escape(after) + r"\Z", line)
    return match[1] if match and match.start() else None


def _escape(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
