"""Line retrieval: asks for a number in a long record, which shows whether a model uses its context.

    python -m eval.line_retrieval --checkpoint DIR_OR_HF [--cases FILE.jsonl ...] [--lines 20 50
    ...] --output DIR

The test is LongChat's: the model answers greedily, and the last integer of at most 100 new tokens
must be the number. Generated cases have our wording, or a file's with --like; scores are comparable
only with LongChat's. Prompts are processed by the same distributed attention as in training
(model/decode.py). Writes results.json, cases.jsonl, line_retrieval.png and line_depth.png into
--output.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from data.errors import UserError
from data.outputs import results_folder
from eval import line_cases, line_report, pictures, runner, scoring, suite, thoughts
from eval.live_test import LiveTest
from eval.prompts import Count, Prompt
from model.attention.names import Tokens
from trainer import entry, options
from trainer.config.require import require
from trainer.options import AtLeastZero, EachOnce, check_each_once, option

MOST_TOKENS = 1_100_000  # in a generated case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's own options."""

    cases: tuple[str, ...] = option(
        "case files in LongChat's format", (), metavar="FILE.jsonl", action=EachOnce
    )
    lines: tuple[int, ...] = option("generate cases with this many lines", (), action=EachOnce)
    tokens: tuple[options.Tokens, ...] = option(
        "generate cases that fill this many of the model's tokens, including the answer",
        (),
        action=EachOnce,
    )
    count: int = option("number of generated cases for each number of lines", 50)
    questions: int = option(
        "number of generated cases about the same lines, which are then processed once", 1
    )
    limit: AtLeastZero = option("use only the first N cases of each file; 0 uses all", 0)
    keys: str = option(
        "style of the keys of generated cases", "adjective_noun", choices=line_cases.KEY_STYLES
    )
    unseen: bool = option(
        "use only keys and numbers that are reserved for evaluation; by default both may occur in "
        "generated training data, but never together"
    )
    like: str | None = option(
        "use this file's wording for generated cases: its header, lines and question",
        None,
        metavar="FILE.jsonl",
    )
    seed: AtLeastZero = option("seed of the generated cases", 0)
    beside: tuple[str, ...] = option(
        "folders of other evaluations, drawn in the same plot", (), metavar="DIR"
    )


parse = functools.partial(runner.parse_evaluation, Options, max_new_tokens=100)


def gather_cases(args: argparse.Namespace) -> list[line_cases.LineCase]:
    """Returns the cases selected by the command line, except those of --tokens.

    Args:
        args: of `parse`.

    Raises:
        UserError: an option is wrong, as far as can be told without the model.
    """
    if not args.cases and not args.lines and not args.tokens:
        raise UserError(
            "nothing to evaluate: give --cases FILE.jsonl, --lines 20 50 or --tokens 4096"
        )
    runner.check_flags(args)
    _check_used(args)
    if args.count < 1:
        raise UserError(f"--count: {args.count} cases of each length; 1 or more would work")
    for tokens in args.tokens:
        if tokens > MOST_TOKENS:
            raise UserError(f"--tokens: found {tokens}; up to {MOST_TOKENS} would work")
    cases, names = [], _source_names(args.cases)
    for path in args.cases:
        if path.isdecimal() and not Path(path).exists():
            raise UserError(
                f"--cases: found {path}, which is not a file of cases; --count {path} would "
                "generate that many for each of --lines or --tokens"
            )
        file_cases = [
            dataclasses.replace(case, source=names[path]) for case in line_cases.read(path)
        ]
        cases += file_cases[: args.limit] if args.limit else file_cases
    return cases + [case for lines in args.lines for case in _generate(args, lines)]


def _source_names(paths: Sequence[str]) -> dict[str, str]:
    """Returns the files' names, with as much of their paths as tells equal names apart.

    Raises:
        UserError: two paths are the same file.
    """
    check_each_once("--cases", list(map(os.path.realpath, paths)))
    names = {path: Path(path).name for path in paths}
    repeated = [path for path in paths if list(names.values()).count(names[path]) > 1]
    return names | pictures.short_names(repeated)


def _check_used(args: argparse.Namespace) -> None:
    """Raises UserError if a flag is for cases of a kind that the command line does not ask for."""
    if runner.is_given(args, "--limit") and not args.cases:
        raise UserError(
            "--limit: is for the files of --cases, and there are none; --count sets the number of "
            "generated cases"
        )
    for flag in ("--count", "--questions", "--keys", "--unseen", "--like", "--seed"):
        if runner.is_given(args, flag) and not (args.lines or args.tokens):
            raise UserError(
                f"{flag}: is for generated cases, and there are none; with --lines or --tokens it "
                "would work"
            )


def _generate(args: argparse.Namespace, lines: int) -> list[line_cases.LineCase]:
    wording = line_cases.wording_like(args.like) if args.like else None
    return line_cases.generate(
        lines, args.count, args.seed, args.keys, wording, args.questions, args.unseen
    )


def cases_that_fill(
    tokens: int, args: argparse.Namespace, respondent: runner.Respondent
) -> list[line_cases.LineCase]:
    """Returns generated cases that take at most `tokens`, answers included, with equal line counts.

    Raises:
        UserError: not even one line fits, or there are too few keys for as many lines.
    """

    def length(case: line_cases.LineCase) -> int:
        return respondent.length(Prompt(case.prompt, args.max_new_tokens)) + args.max_new_tokens

    def first_length(lines: int) -> int:
        (case,) = line_cases.generate(max(lines, 1), 1, args.seed, args.keys, wording)
        return length(case)

    wording = line_cases.wording_like(args.like) if args.like else None
    most = len(line_cases.SHORT_KEYS) if args.keys == "short" else line_cases.MOST_LINES
    lines = suite.largest_within(first_length, tokens, most)
    while lines:
        cases = _generate(args, lines)
        longest = max(map(length, cases))
        if lines == most and longest < suite.LEAST_FILLED * tokens:
            raise UserError(
                f"--tokens: found {tokens}, but a case of {most} lines, the most that --keys "
                f"{args.keys} has keys for, takes {longest} tokens with its answer; {longest} or "
                "less would work"
            )
        if longest <= tokens:
            return cases
        lines -= max(1, lines * (longest - tokens) // longest)
    raise UserError(
        f"--tokens: a case of one line takes {first_length(1)} tokens with its answer, found "
        f"{tokens}; more would work"
    )


def _cases_of_tokens(
    args: argparse.Namespace, respondent: runner.Respondent
) -> list[line_cases.LineCase]:
    """Returns the cases of --tokens.

    Raises:
        UserError: as `cases_that_fill`; or cases of another length have as many lines, so that they
          are the same.
    """
    cases = []
    given = {lines: f"--lines {lines}" for lines in args.lines}
    for tokens in args.tokens:
        filled = cases_that_fill(tokens, args, respondent)
        lines = filled[0].num_lines
        if lines in given:
            raise UserError(
                f"--tokens: {tokens} tokens hold {lines} lines, as many as {given[lines]}: the "
                "same cases would be counted twice; either without the other would work"
            )
        given[lines] = f"--tokens {tokens}"
        cases += filled
    return cases


@dataclasses.dataclass(frozen=True)
class LiveLines(LiveTest):
    """Line retrieval, during training."""

    like: str | None = None
    """Case file whose wording to use; ours by default."""
    max_new_tokens: Tokens = 32
    """Tokens of an answer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.max_new_tokens >= 1,
            "evaluations.max_new_tokens",
            self.max_new_tokens,
            "at least 1",
        )

    def cases(self, count: Count, lengths: Sequence[int]) -> list[suite.Case]:
        """Returns the cases of these lengths."""
        wording = line_cases.wording_like(self.like) if self.like else None
        # Cases with equal line counts are generated together, so that requested lines are evenly
        # spread.
        together = functools.lru_cache(maxsize=2)(
            lambda lines: line_cases.generate(lines, self.count, wording=wording)
        )
        cases = []
        for tokens in lengths:

            def make(lines: int, sample: int | None = None, tokens=tokens) -> suite.Case:
                # To fit the number of lines, one case at a time is generated, which is faster.
                case = (
                    line_cases.generate(lines, 1, wording=wording)[0]
                    if sample is None
                    else together(lines)[sample]
                )
                prompt = Prompt(case.prompt, self.max_new_tokens)
                return suite.Case(
                    "lines", prompt, (str(case.expected_number),), tokens, scoring="integer"
                )

            cases += suite.cases_of(make, tokens, count, self.count, line_cases.MOST_LINES)
        return cases


def evaluate(args: argparse.Namespace) -> list[scoring.Score]:
    """Answers all cases and returns a score for each source and number of lines.

    Writes results.json, cases.jsonl and the pictures to args.output.

    Args:
      args: the parsed flags of this command.
    """
    cases = gather_cases(args)
    others = {str(folder): line_report.read(folder) for folder in args.beside}
    results_folder(args.output, '"within_trained_length"', "line_retrieval.png", "line_depth.png")
    opened = runner.open_respondent(args)
    respondent = opened.respondent
    cases += _cases_of_tokens(args, respondent)
    prompts = [Prompt(case.prompt, args.max_new_tokens) for case in cases]
    answers = opened.answer(prompts, args.output)
    scored, counts = respondent.without_thoughts(prompts, answers)
    outcomes = [
        scoring.outcome(
            case,
            answer.generated,
            answer.prompt_tokens,
            respondent.trained_length,
            args.max_new_tokens,
            said.generated,
        )
        for case, answer, said in zip(cases, answers, scored, strict=True)
    ]
    about = opened.about | {"seed": args.seed, "max_new_tokens": args.max_new_tokens} | counts
    scores = line_report.write(outcomes, args.output, about, others)
    if note := thoughts.line(counts):
        print(note, file=sys.stderr)
    print(f"wrote {args.output}/results.json, cases.jsonl, line_retrieval.png and line_depth.png")
    return scores


main = runner.command(parse, evaluate)


if __name__ == "__main__":
    entry.leave(main())
