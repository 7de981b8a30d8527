"""Long-context tests and answers to prompts during training, with the loop's parameters."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, cast

import jax

from data.errors import UserError
from eval import coreference, line_retrieval, needle, ruler, runner, suite, thoughts
from eval.live_test import LiveTest
from trainer.config.parsing import section
from trainer.config.schema import RunConfig
from trainer.evaluation import Evaluation
from trainer.model_source import chat_templates
from trainer.objective import Objective, Params
from trainer.options import check_each_once
from trainer.run.preemption import end_if_noticed
from trainer.source_kinds import ModelSource
from trainer.step import StepBuilder
from trainer.text_checks import known_length, longest_document
from trainer.trained_length import trained_length

if TYPE_CHECKING:
    from trainer.text import TextObjective


def _respondent(
    run: RunConfig, objective: Objective, rows: int = 0, chunk: int = 4096
) -> runner.Respondent:
    """Returns the run's model on its mesh as a greedy respondent, with the run's chat template."""
    from model.decode import Sampling

    text = cast("TextObjective", objective)
    templates = chat_templates(run.data)
    template = templates[0] if templates else "tokenizer" if text.tokenizer.chat_template else None
    stops = runner.stop_ids(text.source.config, text.tokenizer, template)
    return runner.Respondent(
        text.model,
        text.tokenizer,
        template,
        stops,
        trained_length(text.source, run.data.context_length),
        rows or run.mesh.rows,
        chunk,
        Sampling(),
    )


def _answers(
    respondent: runner.Respondent, params: Params, prompts: list[runner.Prompt]
) -> list[runner.Answer]:
    """Returns these parameters' answers; moves parameters in host memory to the devices."""
    return respondent.answer(
        jax.device_put(params, dict(respondent.model.shardings)),
        prompts,
        on_answer=lambda _: end_if_noticed(),
    )


TESTS: dict[str, type[LiveTest]] = {
    "lines": line_retrieval.LiveLines,
    "needle": needle.LiveNeedles,
    "ruler": ruler.LiveRuler,
    "coreference": coreference.LiveCoreference,
}
"""A test's name in recipes -> its section, which generates the cases."""


def tests_of(config: RunConfig) -> list[LiveTest]:
    """Returns the entries of the recipe's list `evaluations`, each as the section of its test.

    Raises:
      UserError: an unknown test or field, or a wrong value.
    """
    tests = []
    for index, entry in enumerate(config.evaluations):
        field = f"evaluations[{index}]"
        if "test" not in entry:
            raise UserError(f"{field}.test: missing; one of {', '.join(TESTS)} would work")
        if entry["test"] not in TESTS:
            raise UserError(
                f"{field}.test: found {entry['test']}, expects one of {', '.join(TESTS)}"
            )
        test = section(TESTS[entry["test"]], entry, field)
        for name, value in vars(test).items():
            if isinstance(value, tuple):
                check_each_once(f"{field}.{name}", value)
        tests.append(test)
    return tests


def with_tests(config: RunConfig) -> RunConfig:
    """Returns the configuration with its evaluations' defaults filled in; errors as `tests_of`."""
    return dataclasses.replace(
        config, evaluations=tuple(dataclasses.asdict(test) for test in tests_of(config))
    )


def known_tokens(config: RunConfig, source: ModelSource, longest: int = 0) -> int | None:
    """Returns the context length that a pretrained model's positions support, by its files or its
    training documents; None for a model from scratch, or if its RoPE rule or the recipe's
    rope_theta supports any length.

    Args:
      source: the model with the recipe's positions.
      longest: tokens of the longest training document; rows hold several.
    """
    known = known_length(source, config.model)
    return None if known is None else max(known, longest)


class LiveEvaluation:
    """An `Evaluation` that asks questions and returns mean scores by NAME/TASK/TOKENS[/DEPTH]."""

    def __init__(self, test: LiveTest, run: RunConfig) -> None:
        """Takes an entry of the recipe's list `evaluations`.

        Raises:
          UserError: the run does not train on text.
        """
        if run.trajectories.path:
            raise UserError(
                "evaluations: found some in a run on trajectories, which answers no questions; "
                "leave them out"
            )
        self.test, self.run_config, self.noted = test, run, False
        self.name, self.every = test.name or test.test, test.every

    def prepare(self, objective: Objective, builder: StepBuilder) -> None:
        """Makes the cases; the first measurement compiles the programs."""
        self.respondent = _respondent(self.run_config, objective, self.test.rows, self.test.chunk)
        self.cases = self.test.cases(self.respondent.length, self._lengths(objective))

    def _lengths(self, objective: Objective) -> tuple[int, ...]:
        """Returns the lengths of the cases; a line says which are not those of a row, or exceed
        what the model has positions for."""
        text, rows = cast("TextObjective", objective), self.run_config.data.context_length
        known = known_tokens(self.run_config, text.source, longest_document(text.prepared))
        lengths, line = self.test.tokens or (min(rows, known or rows),), None
        if known is not None and max(lengths) > known:
            line = (
                f"warning: evaluations: {self.name} has cases of {max(lengths):,} tokens, but the "
                f"model is trained for {known:,} and no training document is longer; tokens of at "
                f"most {known:,} would measure what it learns"
            )
        elif not self.test.tokens and lengths != (rows,):
            line = (
                f"evaluations: {self.name} has cases of {lengths[0]:,} tokens, not of {rows:,} as "
                "the rows: neither the model nor a training document is longer; tokens chooses "
                "other lengths"
            )
        if line and jax.process_index() == 0:
            print(line, file=sys.stderr, flush=True)
        return lengths

    def run(self, params: Params, step: int) -> dict[str, float]:
        """Answers all questions with these parameters."""
        prompts = [case.prompt for case in self.cases]
        answers = _answers(self.respondent, params, prompts)
        scored, counts = self.respondent.without_thoughts(prompts, answers)
        self._note(thoughts.line(counts, "data.chat_template_kwargs with enable_thinking: false"))
        results = suite.results_of(self.cases, scored, self.respondent.trained_length)
        return {self._metric(result): result.score for result in results}

    def _note(self, line: str) -> None:
        """Prints a line about the answers, once."""
        if line and not self.noted and jax.process_index() == 0:
            print(line, file=sys.stderr, flush=True)
        self.noted = self.noted or bool(line)

    @property
    def metrics(self) -> list[str]:
        """The names of what `run` measures; after `prepare`."""
        return list(dict.fromkeys(map(self._metric, self.cases)))

    def _metric(self, group: suite.Case | suite.Result) -> str:
        depth = "" if group.depth is None else f"/{group.depth:g}"
        return f"{self.name}/{group.task}/{group.tokens}{depth}"


class Samples:
    """An `Evaluation` that returns the answers to the recipe's prompts, by prompt."""

    name = "samples"

    def __init__(self, run: RunConfig) -> None:
        """Takes the recipe's section `samples`.

        Raises:
          UserError: the run does not train on text.
        """
        if run.trajectories.path:
            raise UserError(
                "samples.prompts: found some in a run on trajectories, which answers none; leave "
                "them out"
            )
        self.run_config, self.every = run, run.samples.every
        self.prompts = [
            runner.Prompt(prompt, run.samples.new_tokens) for prompt in run.samples.prompts
        ]

    def prepare(self, objective: Objective, builder: StepBuilder) -> None:
        """Takes the model; the first answers compile its programs."""
        self.respondent = _respondent(self.run_config, objective)

    def run(self, params: Params, step: int) -> dict[str, str]:
        """Returns the answers of these parameters."""
        answers = _answers(self.respondent, params, self.prompts)
        return {
            prompt: answer.generated
            for prompt, answer in zip(self.run_config.samples.prompts, answers, strict=True)
        }


def evaluations_of(config: RunConfig) -> list[Evaluation]:
    """Returns the recipe's evaluations, and its samples."""
    samples = [Samples(config)] if config.samples.prompts else []
    return [*(LiveEvaluation(test, config) for test in tests_of(config)), *samples]


def measured_names(config: RunConfig, objective: Objective, builder: StepBuilder) -> dict[str, int]:
    """Prepares the recipe's evaluations and samples; returns the names of what they measure, and
    the steps between measurements."""
    names: dict[str, int] = {}
    for evaluation in evaluations_of(config):
        evaluation.prepare(objective, builder)
        if isinstance(evaluation, LiveEvaluation):
            names |= dict.fromkeys(evaluation.metrics, evaluation.every)
    return names
