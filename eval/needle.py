"""Needle in a haystack: does the model find a sentence hidden at some depth of a long text?

    python -m eval.needle --checkpoint DIR_OR_HF --tokens 4096 8192 [--depths 0 0.25 0.5 0.75 1]
    [--needles 1 4] --output DIR

The text is RULER's noise, or --text FILE, a book or essays. With several needles the first is at
that depth and the others are evenly spread after it; the score is the share found. Writes
results.json, cases.jsonl and needle.png into --output.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from data.errors import UserError, first_line
from data.synthetic.tasks import Haystack, needles
from data.untrusted_files import read_text
from eval import runner, suite
from eval.live_test import LiveTest
from eval.prompts import Count, Prompt
from trainer import entry
from trainer.config.require import require
from trainer.options import AtLeastOne, AtLeastZero, EachOnce, Tokens, option

NEW_TOKENS = 64
MOST_CHARACTERS = 8  # per token, of the part of a text that cases hold


def read_haystack(path: str | None) -> Haystack:
    """Returns the haystack of a text file, or the noise without one.

    Raises:
      UserError: the file cannot be read, or has no sentence.
    """
    if path is None:
        return Haystack()
    try:
        haystack = Haystack.of_text(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text: {path} cannot be read ({first_line(error)})") from None
    if not "".join(haystack.sentences):
        raise UserError(
            f"--text: {path} has no sentence; a book or essays as plain text would work"
        )
    return haystack


def check_sentences(path: str, haystack: Haystack, lengths: Sequence[int], count: Count) -> None:
    """Raises UserError if one of a text's sentences fills half of the shortest case: needles are
    hidden between sentences."""
    ends = itertools.accumulate(map(len, haystack.sentences))
    reached = [
        sentence
        for sentence, end in zip(haystack.sentences, ends, strict=True)
        if end - len(sentence) <= MOST_CHARACTERS * max(lengths)
    ]
    longest = max(reached, key=len)
    tokens = count(Prompt(longest, 0)) - count(Prompt("?", 0))
    if 2 * tokens > min(lengths):
        raise UserError(
            f"--text: {path} has a sentence of {tokens} tokens, {longest[:30]!r}..., and "
            f"--tokens of {min(lengths)}; {2 * tokens} or more, or a text whose sentences end "
            "with . ! ? and a space, or with 。！？, would work"
        )


def make_cases(
    count: Count,
    lengths: Sequence[int],
    depths: Sequence[float],
    numbers: Sequence[int] = (1,),
    each: int = 5,
    seed: int = 0,
    haystack: Haystack = Haystack(),  # noqa: B008
) -> list[suite.Case]:
    """Returns `each` cases for each number of needles, length and depth."""
    cases = []
    for hidden in numbers:
        for tokens in lengths:
            for depth in depths:
                spread = [depth + (1 - depth) * i / hidden for i in range(hidden)]

                def make(
                    units: int,
                    sample: int = 0,
                    hidden=hidden,
                    tokens=tokens,
                    depth=depth,
                    spread=spread,
                ) -> suite.Case:
                    rng = np.random.default_rng([seed, sample, hidden, tokens, round(depth * 1000)])
                    exercise = needles(
                        rng,
                        units,
                        True,
                        keys=hidden,
                        queries=hidden,
                        haystack=haystack,
                        depths=spread,
                    )
                    prompt = Prompt(exercise.text, NEW_TOKENS * hidden, exercise.prefix)
                    name = "one needle" if hidden == 1 else f"{hidden} needles"
                    return suite.Case(name, prompt, exercise.expected, tokens, depth)

                cases += suite.cases_of(make, tokens, count, each)
    return cases


@dataclasses.dataclass(frozen=True)
class LiveNeedles(LiveTest):
    """One needle in noise, during training."""

    depths: tuple[float, ...] = (0.0, 0.5, 1.0)
    """Depths of the needle, 0 to 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            all(0 <= depth <= 1 for depth in self.depths),
            "evaluations.depths",
            self.depths,
            "shares from 0 to 1",
        )

    def cases(self, count: Count, lengths: Sequence[int]) -> list[suite.Case]:
        """Returns the cases of these lengths."""
        return make_cases(count, lengths, self.depths, each=self.count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's own options."""

    tokens: tuple[Tokens, ...] = option("lengths, answers included, such as 16K", action=EachOnce)
    depths: tuple[float, ...] = option(
        "depths, from 0 to 1", (0, 0.25, 0.5, 0.75, 1), action=EachOnce
    )
    needles: tuple[AtLeastOne, ...] = option("numbers of needles", (1,), action=EachOnce)
    count: AtLeastOne = option("cases of each length and depth", 5)
    text: str | None = option(
        "a text to hide the needles in, instead of noise", None, metavar="FILE"
    )
    seed: AtLeastZero = option("seed of the cases", 0)


parse = functools.partial(runner.parse_evaluation, Options)


def evaluate(args: argparse.Namespace) -> list[suite.Result]:
    """Makes and answers the cases, and writes the results."""
    if not all(0 <= depth <= 1 for depth in args.depths):
        raise UserError(f"--depths: found {args.depths}; each needs to be from 0 to 1")
    runner.check_flags(args)
    haystack = read_haystack(args.text)
    suite.results_folder(args.output, "needle")
    opened = runner.open_respondent(args)
    if args.text:
        check_sentences(args.text, haystack, args.tokens, opened.respondent.length)
    cases = make_cases(
        opened.respondent.length,
        args.tokens,
        args.depths,
        args.needles,
        args.count,
        args.seed,
        haystack,
    )
    return suite.run(
        "needle",
        opened,
        cases,
        args.output,
        {"haystack": args.text or haystack.name, "seed": args.seed},
    )


main = runner.command(parse, evaluate)


if __name__ == "__main__":
    entry.leave(main())
