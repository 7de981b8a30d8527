"""Intervals of scores; line retrieval's right answers and accuracies by number of lines."""

import dataclasses
import math
import re
from collections.abc import Iterable

import numpy as np
from jaxtyping import Float

from eval.line_cases import LineCase

Z95 = 1.959963984540054  # quantile 0.975 of the standard normal distribution
RESAMPLES = 10_000  # of the bootstrap


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The answer to one case."""

    case: LineCase
    generated: str
    """The generated text."""
    prompt_tokens: int
    beyond_trained_length: bool = False
    """Whether the prompt with the longest possible answer exceeds the trained length."""
    scored: str | None = None
    """What follows a thought in the generated text; None without one."""

    @property
    def answer(self) -> int | None:
        """The last integer of the generated text, or of what follows its thought."""
        return last_integer(self.generated if self.scored is None else self.scored)

    @property
    def right(self) -> bool:
        """Whether the answer is the expected number."""
        return self.answer == self.case.expected_number


ENOUGH = 100  # fewest cases for calling a score above chance


@dataclasses.dataclass(frozen=True)
class Score:
    """The accuracy over one source's cases of equal line count, all within or all beyond the
    trained length.
    """

    source: str
    family: str
    num_lines: int
    beyond_trained_length: bool
    cases: int
    right: int
    accuracy: float
    low: float
    """Lower bound of the accuracy's 95% interval."""
    high: float
    """Upper bound of the accuracy's 95% interval."""
    mean_prompt_tokens: float

    @property
    def chance(self) -> float:
        """The accuracy of naming the number of any line."""
        return 1 / self.num_lines

    @property
    def above_chance(self) -> bool | None:
        """Whether the interval is above chance; None with fewer than ENOUGH cases."""
        return self.low > self.chance if self.cases >= ENOUGH else None

    @property
    def above_chance_reason(self) -> str | None:
        """Why `above_chance` is None, else None."""
        return (
            f"{self.cases} cases; at least {ENOUGH} are needed"
            if self.above_chance is None
            else None
        )


def last_integer(text: str) -> int | None:
    """Returns the last run of digits in `text` as an unsigned integer ("x-7" gives 7), or None."""
    runs = re.findall(r"[0-9]+", text)
    # A model that keeps repeating a digit is wrong; the number must not exceed Python's conversion
    # limit.
    return int(runs[-1]) if runs and len(runs[-1]) <= 100 else None


def wilson(right: float, cases: int) -> tuple[float, float]:
    """Returns the bounds of an accuracy's 95% Wilson interval; (0, 1) without cases.

    Scores between 0 and 1 vary no more than right and wrong answers with their mean do, so that
    mean's Wilson interval holds too, and may be wider than needed.

    Args:
        right: number of right answers, or the sum of the scores.
        cases: number of cases.

    Raises:
        ValueError: `right` is not in 0..cases.
    """
    if not 0 <= right <= cases:
        raise ValueError(f"{right} right of {cases} cases")
    if not cases:
        return 0.0, 1.0
    share, square = right / cases, Z95 * Z95 / cases
    middle = (share + square / 2) / (1 + square)
    half = Z95 * math.sqrt(share * (1 - share) / cases + square / (4 * cases)) / (1 + square)
    # If no or all answers are right, a bound is exactly 0 or 1; rounding would leave 1e-17.
    return (0.0 if right == 0 else middle - half), (1.0 if right == cases else middle + half)


def bootstrap(values: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Returns the bounds of the mean's 95% interval by percentile bootstrap with a fixed seed."""
    generator = np.random.default_rng(0)
    means = generator.choice(values, (RESAMPLES, len(values))).mean(1)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def paired_interval(
    before: Float[np.ndarray, " n"], after: Float[np.ndarray, " n"]
) -> tuple[float, float]:
    """Returns the bounds of the 95% interval of the mean of `after - before`, paired by case.

    It is the interval of Bonett and Price (2012, "Adjusted Wald confidence interval for a
    difference of binomial proportions based on paired data"): as if one more case were better by 1,
    and one worse, so that it also holds if no case differs. Scores may be any from 0 to 1.
    """
    differences = np.concatenate([after - before, [1.0, -1.0]])
    middle = float(differences.mean())
    half = Z95 * math.sqrt(float(differences.var()) / len(differences))
    return max(middle - half, -1.0), min(middle + half, 1.0)


def outcome(
    case: LineCase,
    generated: str,
    prompt_tokens: int,
    trained_length: int,
    new_tokens: int,
    scored: str | None = None,
) -> Outcome:
    """Returns the outcome of a case.

    Args:
        case, generated, prompt_tokens, scored: as in `Outcome`.
        trained_length: number of tokens of the contexts in training.
        new_tokens: number of tokens that may be generated.
    """
    is_beyond = prompt_tokens + new_tokens > trained_length
    return Outcome(case, generated, prompt_tokens, is_beyond, scored)


def group_of(item: Outcome) -> tuple[str, int, str, bool]:
    """Returns family, lines, source and beyond_trained_length of an outcome; each combination gets
    its own accuracy."""
    return item.case.family, item.case.num_lines, item.case.source, item.beyond_trained_length


def score(outcomes: Iterable[Outcome]) -> list[Score]:
    """Returns the accuracies of outcomes by `group_of`."""
    groups: dict[tuple[str, int, str, bool], list[Outcome]] = {}
    for item in outcomes:
        groups.setdefault(group_of(item), []).append(item)
    scores = []
    for (family, num_lines, source, beyond), group in sorted(groups.items()):
        right = sum(item.right for item in group)
        low, high = wilson(right, len(group))
        mean_tokens = sum(item.prompt_tokens for item in group) / len(group)
        scores.append(
            Score(
                source,
                family,
                num_lines,
                beyond,
                len(group),
                right,
                right / len(group),
                low,
                high,
                mean_tokens,
            )
        )
    return scores
