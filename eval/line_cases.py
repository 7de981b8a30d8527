"""Line-retrieval cases, read from LongChat's files or generated in the same form.

A case asks for the number in one line of a long record. Every line has a key in one of three
styles:

- "adjective_noun", as in LongChat's files of up to 680 lines, whose prompts end with a space;
- "noun_noun", as in LongChat's files from 700 lines on, whose prompts do not;
- "short", for models with a tiny vocabulary: a short word and a number of two digits, with the
  lines in the order of their keys. Generated cases may occur in training data; held-out ones for
  the quickstart's model are in data/fixtures/line_cases.jsonl.

The wording of generated cases is ours, so their scores are not comparable with LongChat's, or that
of a given file.
"""

import dataclasses
import json
import pathlib

import numpy as np

from data.errors import UserError, first_line
from data.synthetic import words
from data.synthetic.split import draw_keys, draw_values
from data.synthetic.tasks import OWN_LINES
from data.synthetic.wording import Wording, wording_like
from data.untrusted_files import parse_json, read_text

__all__ = ["KEY_STYLES", "LineCase", "Wording", "generate", "read", "wording_like", "write"]
FORM = (
    'a case is one line of JSON: {"prompt": "...", "expected_number": 7, "num_lines": 20, '
    '"correct_line": "..."}'
)
LARGEST = 10**9  # most lines a case may claim to have
KEY_STYLES = ("adjective_noun", "noun_noun", "short")
# The wording and the keys of data/fixtures, for the style "short".
SHORT_HEAD = "Remember these lines.\n\n"
SHORT_LINE = "line {key}: {number}\n"
SHORT_TAIL = (
    "\nNow the record is over. Tell me what is the number in line {key}? I need the number."
)

MOST_LINES = 44_999  # most lines for which 50,000 numbers suffice
SHORT_KEYS = "bee cat dog elk fox hen owl pig".split()  # noqa: SIM905


@dataclasses.dataclass(frozen=True)
class LineCase:
    """One question."""

    prompt: str
    expected_number: int
    num_lines: int
    correct_line: str
    """The line that contains the expected number."""
    source: str = "generated"
    """Name of the file that the case was read from; a path if another file has the same name."""
    key_style: str = ""
    """One of KEY_STYLES, or "" if the file does not say."""

    @property
    def depth(self) -> float:
        """The position in the prompt of the requested line, from 0 to 1; 0 if it does not occur."""
        return max(self.prompt.find(self.correct_line), 0) / max(len(self.prompt), 1)

    @property
    def family(self) -> str:
        """The style of keys and wording; accuracies of different families are not comparable."""
        if self.key_style:
            return self.key_style
        return "adjective-noun keys" if self.num_lines <= 680 else "other keys, from 700 lines"


def read(path: str | pathlib.Path) -> list[LineCase]:
    """Returns the cases of a JSONL file in LongChat's form.

    Raises:
        UserError: the file cannot be read, contains no case, or a line is not a case.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read the line cases ({first_line(error)})") from error
    name = pathlib.Path(path).name
    # Not splitlines(), which would also split at U+2028.
    cases = [
        _parse(line, f"{path}:{number}", name)
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not cases:
        raise UserError(f"{path}: no line cases in it")
    return cases


def _parse(line: str, location: str, source: str) -> LineCase:
    """Returns the case in a line of a file; messages name its `location`."""
    try:
        record = parse_json(line)
    except ValueError as error:
        message = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(f"{location}: not valid JSON ({message}); {FORM}") from error
    if not isinstance(record, dict):
        raise UserError(f"{location}: expected an object, found {type(record).__name__}; {FORM}")
    for field, kind in (
        ("prompt", str),
        ("expected_number", int),
        ("num_lines", int),
        ("correct_line", str),
    ):
        if not isinstance(record.get(field), kind) or isinstance(record.get(field), bool):
            raise UserError(
                f"{location}: {field} should be {kind.__name__}, found "
                f"{short(record.get(field))}; {FORM}"
            )
    key_style = record.get("key_style", "")
    if not isinstance(key_style, str):
        raise UserError(f"{location}: key_style should be str, found {short(key_style)}")
    if not 1 <= record["num_lines"] <= LARGEST:
        raise UserError(
            f"{location}: num_lines: found {short(record['num_lines'])}; 1 to {LARGEST:,} would "
            "work"
        )
    return LineCase(
        record["prompt"],
        record["expected_number"],
        record["num_lines"],
        record["correct_line"],
        source=source,
        key_style=key_style,
    )


def short(value: object) -> str:
    """Returns a value as shown in messages."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} characters)"


def write(cases: list[LineCase], path: str | pathlib.Path) -> None:
    """Writes the cases into a file that `read` can read."""
    fields = ("expected_number", "num_lines", "correct_line", "prompt", "key_style")
    lines = [json.dumps({field: getattr(case, field) for field in fields}) + "\n" for case in cases]
    pathlib.Path(path).write_text("".join(lines), encoding="utf-8")


SHORT = Wording(SHORT_HEAD, SHORT_LINE, SHORT_TAIL)


def generate(
    lines: int,
    count: int,
    seed: int = 0,
    key_style: str = "adjective_noun",
    wording: Wording | None = None,
    questions: int = 1,
    reserved: bool = False,
) -> list[LineCase]:
    """Generates cases, as a pure function of the arguments.

    Within a case all keys are distinct, and so are all numbers, so a right answer identifies one
    line. Over the cases, the index of the requested line is uniformly distributed. Except in the
    style "short", no line has a key and a number that occur together in generated training data.

    Args:
        lines: number of lines of each case.
        count: number of cases.
        seed: seed of the keys, numbers and requested lines.
        key_style: one of KEY_STYLES.
        wording: of another test.
        questions: number of cases that ask about the same lines.
        reserved: use only keys and numbers that no generated training text has; not for the style
          "short".

    Raises:
        UserError: the style is unknown, or has too few keys or numbers for that many lines.
    """
    _check(lines, key_style, questions, reserved)
    draw = _reserved_lines if reserved else _short_lines if key_style == "short" else _drawn_lines
    family = (
        key_style
        + (", never trained on" if reserved else "")
        + (f", worded as {wording.name}" if wording else "")
    )
    ours = dataclasses.replace(
        OWN_LINES, tail=OWN_LINES.tail + (" " if key_style == "adjective_noun" else "")
    )
    wording = wording or (SHORT if key_style == "short" else ours)
    rng = np.random.default_rng([seed, lines, KEY_STYLES.index(key_style)])
    cases: list[LineCase] = []
    records = -(-count // questions)
    for first in rng.permutation(np.arange(records) * lines // max(records, 1)):
        keys, numbers = draw(rng, lines, key_style)
        record = [
            wording.line.format(key=key, number=number)
            for key, number in zip(keys, numbers, strict=True)
        ]
        head = wording.head + "".join(record)
        for question in range(min(questions, count - len(cases))):
            target = (int(first) + question * lines // questions) % lines
            prompt = head + wording.tail.format(key=keys[target])
            cases.append(LineCase(prompt, numbers[target], lines, record[target], key_style=family))
    return cases


def _check(lines: int, key_style: str, questions: int, reserved: bool) -> None:
    """Raises UserError for cases that cannot be generated."""
    if key_style not in KEY_STYLES:
        raise UserError(f"key_style {key_style!r} is not known; valid: {', '.join(KEY_STYLES)}")
    most = len(SHORT_KEYS) if key_style == "short" else MOST_LINES
    if not 1 <= lines <= most:
        raise UserError(
            f"{lines} lines cannot be generated; {key_style} has keys for 1 to {most} lines"
        )
    if not 1 <= questions <= lines:
        raise UserError(
            f"--questions: {questions} about {lines} lines cannot be generated; 1 to {lines} "
            "would work"
        )
    if key_style == "short" and reserved:
        raise UserError(
            "--unseen: keys of the style short occur in training data; --keys adjective_noun "
            "would work"
        )


def _short_lines(
    rng: np.random.Generator, lines: int, key_style: str
) -> tuple[list[str], list[int]]:
    """Returns keys of the style "short", in their order, and numbers."""
    chosen = sorted(rng.choice(len(SHORT_KEYS), size=lines, replace=False))
    numbers = rng.choice(np.arange(10, 100), size=lines, replace=False)
    return [SHORT_KEYS[index] for index in chosen], numbers.tolist()


def _drawn_lines(
    rng: np.random.Generator, lines: int, key_style: str
) -> tuple[list[str], list[int]]:
    """Returns keys and numbers that do not occur together in generated training texts."""
    every = words.keys(key_style, lines)
    keys = [every[index] for index in rng.choice(len(every), size=lines, replace=False)]
    return keys, draw_values(rng, keys, 1, 50_000, evaluation=True)


def _reserved_lines(
    rng: np.random.Generator, lines: int, key_style: str
) -> tuple[list[str], list[int]]:
    """Returns keys and numbers that no generated training text has.

    Raises:
        UserError: there are fewer than `lines` of them.
    """
    try:
        keys = draw_keys(rng, key_style, lines, reserved=True)
        return keys, draw_values(rng, keys, 1, 50_000, evaluation=True, reserved=True)
    except ValueError as error:
        raise UserError(f"--unseen: {error}; fewer lines, or no --unseen, would work") from None
