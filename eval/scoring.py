"""Scoring of line retrieval: right or wrong, and accuracy with its interval for each number of lines."""

import dataclasses
import math
import re
from collections.abc import Iterable

from eval.line_cases import LineCase

Z95 = 1.959963984540054  # standard normal quantile of 0.975


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One case answered."""

    case: LineCase
    generated: str
    prompt_tokens: int
    beyond_trained_length: bool = False

    @property
    def answer(self) -> int | None:
        """The last integer generated."""
        return last_integer(self.generated)

    @property
    def right(self) -> bool:
        """Whether it is the expected one."""
        return self.answer == self.case.expected_number


@dataclasses.dataclass(frozen=True)
class Score:
    """Accuracy over the cases of one source and one number of lines, trained and beyond-trained lengths apart."""

    source: str
    family: str
    num_lines: int
    beyond_trained_length: bool
    cases: int
    right: int
    accuracy: float
    low: float
    high: float
    mean_prompt_tokens: float

    @property
    def chance(self) -> float:
        """What naming any line's number gives."""
        return 1 / self.num_lines

    @property
    def above_chance(self) -> bool:
        """Whether the interval lies above chance, over enough cases to say so."""
        return self.cases >= 100 and self.low > self.chance


def last_integer(text: str) -> int | None:
    """The last run of digits in `text`; None without one."""
    found = re.findall(r"[0-9]+", text)
    # Longer than any expected number can be: a model that repeats a digit is wrong, not a reason to overflow.
    return int(found[-1]) if found and len(found[-1]) <= 100 else None


def wilson(right: int, cases: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's interval (95%) of an accuracy; (0, 1) without cases."""
    if not 0 <= right <= cases:
        raise ValueError(f"{right} right of {cases} cases")
    if not cases:
        return 0.0, 1.0
    share, square = right / cases, z * z / cases
    middle = (share + square / 2) / (1 + square)
    half = z * math.sqrt(share * (1 - share) / cases + square / (4 * cases)) / (1 + square)
    # The bounds at 0 and at all right are exact; rounding would leave 1e-17.
    return (0.0 if right == 0 else middle - half), (1.0 if right == cases else middle + half)


def outcome(case: LineCase, generated: str, prompt_tokens: int, trained_length: int, new_tokens: int) -> Outcome:
    """An answered case; it is beyond the trained length where prompt and answer do not fit in `trained_length`."""
    return Outcome(case, generated, prompt_tokens, prompt_tokens + new_tokens > trained_length)


def score(outcomes: Iterable[Outcome]) -> list[Score]:
    """Outcomes grouped by key family, source, number of lines and whether they are beyond the trained length."""
    groups: dict[tuple, list[Outcome]] = {}
    for one in outcomes:
        key = (one.case.family, one.case.num_lines, one.case.source, one.beyond_trained_length)
        groups.setdefault(key, []).append(one)
    scores = []
    for (family, num_lines, source, beyond), group in sorted(groups.items()):
        right = sum(one.right for one in group)
        low, high = wilson(right, len(group))
        tokens = sum(one.prompt_tokens for one in group) / len(group)
        accuracy = right / len(group)
        scores.append(Score(source, family, num_lines, beyond, len(group), right, accuracy, low, high, tokens))
    return scores
