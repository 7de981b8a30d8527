"""Multi-round co-reference: asks for the reply to the i-th of several equal requests.

    python -m eval.coreference --checkpoint DIR_OR_HF --tokens 4096 8192 [--alike 2 4 8] --output
    DIR

The form is that of MRCR (Vodrahalli et al. 2024, "Michelangelo") and OpenAI's data set of that
name: the answer must begin with given letters, and is scored by similarity to the reply. The
wording of requests and replies is ours; without a chat template the turns are plain text. Writes
results.json, cases.jsonl and coreference.png into --output.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import string
from collections.abc import Sequence

import numpy as np

from data.conversation import Message
from data.synthetic import words
from eval import runner, suite
from eval.live_test import LiveTest
from eval.prompts import Count, Prompt
from trainer import entry
from trainer.options import AtLeastOne, AtLeastZero, EachOnce, Tokens, option

# Arrays, since a draw from a list turns it into one each time.
ADJECTIVES, NOUNS = np.array(words.ADJECTIVES), np.array(words.NOUNS)
FORMS = ("poem", "riddle", "letter", "story", "speech", "song", "recipe", "prayer")
NEW_TOKENS = 160
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def make_cases(
    count: Count,
    lengths: Sequence[int],
    alike: Sequence[int] = (2, 4, 8),
    each: int = 20,
    seed: int = 0,
) -> list[suite.Case]:
    """Returns `each` cases for each length and number of equal requests."""
    cases = []
    for requests in alike:
        for tokens in lengths:

            def make(units: int, sample: int = 0, requests=requests, tokens=tokens) -> suite.Case:
                rng = np.random.default_rng([seed, sample, requests, tokens])
                turns, beginning, reply = conversation(rng, requests, units, sample % requests)
                return suite.Case(
                    f"{requests} alike",
                    Prompt(turns, NEW_TOKENS),
                    (beginning, reply),
                    tokens,
                    scoring="similarity",
                )

            cases += suite.cases_of(make, tokens, count, each)
    return cases


def conversation(
    rng: np.random.Generator, requests: int, others: int, target: int
) -> tuple[tuple[Message, ...], str, str]:
    """Returns the turns, the letters that must begin the answer, and the expected reply.

    Args:
      requests: number of equal requests.
      others: number of requests of another form or topic, mixed in.
      target: which of the equal ones to ask for, from 0.
    """
    form, topic = str(rng.choice(FORMS)), str(rng.choice(NOUNS))
    subjects = [(form, topic)] * requests
    while len(subjects) < requests + others:
        other = str(rng.choice(FORMS)), str(rng.choice(NOUNS))
        if other != (form, topic):
            subjects.append(other)
    turns, replies = [], []
    for number in rng.permutation(len(subjects)):
        kind, about = subjects[number]
        reply = _reply(rng, about)
        turns += [Message("user", f"Write a {kind} about a {about}."), Message("assistant", reply)]
        if (kind, about) == (form, topic):
            replies.append(reply)
    beginning = "".join(rng.choice(list(string.ascii_letters + string.digits), 10))
    turns.append(
        Message(
            "user",
            f"Write {beginning} and then repeat the {ORDINALS[target]} {form} about a {topic} of "
            "this conversation, word for word. Write nothing else.",
        )
    )
    return tuple(turns), beginning, replies[target]


def _reply(rng: np.random.Generator, about: str) -> str:
    """Returns four lines of random words about a topic."""

    def line() -> str:
        first, second = rng.choice(ADJECTIVES, 2, replace=False)
        return f"the {first} {about} and the {second} {rng.choice(NOUNS)}"

    return ",\n".join(line() for _ in range(4)) + "."


@dataclasses.dataclass(frozen=True)
class LiveCoreference(LiveTest):
    """Multi-round co-reference, during training."""

    def cases(self, count: Count, lengths: Sequence[int]) -> list[suite.Case]:
        """Returns the cases of these lengths."""
        return make_cases(count, lengths, each=self.count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's own options."""

    tokens: tuple[Tokens, ...] = option("lengths, answers included, such as 16K", action=EachOnce)
    alike: tuple[int, ...] = option(
        "numbers of equal requests", (2, 4, 8), choices=range(2, len(ORDINALS) + 1), action=EachOnce
    )
    count: AtLeastOne = option("cases of each length and number", 20)
    seed: AtLeastZero = option("seed of the cases", 0)


parse = functools.partial(runner.parse_evaluation, Options)


def evaluate(args: argparse.Namespace) -> list[suite.Result]:
    """Makes and answers the cases, and writes the results."""
    runner.check_flags(args)
    suite.results_folder(args.output, "coreference")
    opened = runner.open_respondent(args)
    cases = make_cases(opened.respondent.length, args.tokens, args.alike, args.count, args.seed)
    return suite.run("coreference", opened, cases, args.output, {"seed": args.seed})


main = runner.command(parse, evaluate)


if __name__ == "__main__":
    entry.leave(main())
