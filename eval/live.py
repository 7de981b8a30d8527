"""Tests of long contexts and answers to prompts during training: the loop hands over its parameters every so many steps."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import jax

from data.errors import UserError
from eval import coreference, line_cases, needle, ruler, runner, suite
from trainer.config.schema import LiveEvaluationConfig, RunConfig
from trainer.evaluation import Evaluation
from trainer.model_source import chat_templates
from trainer.objective import Objective, Params
from trainer.step import StepBuilder

if TYPE_CHECKING:
    from trainer.text import TextObjective


def _respondent(run: RunConfig, objective: Objective, rows: int = 0, chunk: int = 4096) -> runner.Respondent:
    """Returns the run's model on its own mesh as one that answers greedily, in the template of the run's conversations."""
    from model.decode import Sampling

    text = cast("TextObjective", objective)
    templates = chat_templates(run.data)
    template = templates[0] if templates else "tokenizer" if text.tokenizer.chat_template else None
    stops = runner.stop_ids(text.source.config, text.tokenizer, template)
    return runner.Respondent(text.model, text.tokenizer, template, stops, run.data.context_length,
                             rows or run.mesh.data * run.mesh.fsdp, chunk, Sampling())


def _answers(respondent: runner.Respondent, params: Params, prompts: list[runner.Prompt]) -> list[runner.Answer]:
    """Returns the answers of these parameters; those that are trained in the host's memory are brought to the devices."""
    return respondent.answer(jax.device_put(params, dict(respondent.model.shardings)), prompts)


class LiveEvaluation:
    """An `Evaluation` of the trainer that asks questions. It returns mean scores by NAME/TASK/TOKENS, for needles by
    NAME/TASK/TOKENS/DEPTH."""

    def __init__(self, config: LiveEvaluationConfig, run: RunConfig) -> None:
        """Takes an entry of the recipe's list `evaluations`.

        Raises:
          UserError: the run trains on no text, or a task is unknown.
        """
        if run.trajectories.path:
            raise UserError("evaluations: found some in a run on trajectories, which answers no questions; leave them out")
        if unknown := sorted(set(config.tasks) - set(ruler.TASKS)):
            raise UserError(f"evaluations.tasks: found {unknown[0]!r}; RULER's tasks are {', '.join(ruler.TASKS)}")
        self.config, self.run_config = config, run
        self.name, self.every = config.file, config.every

    def prepare(self, objective: Objective, builder: StepBuilder) -> None:
        """Makes the cases; programs are compiled by the first measurement."""
        config = self.config
        self.respondent = _respondent(self.run_config, objective, config.rows, config.chunk)
        lengths = list(config.tokens or (self.run_config.data.context_length,))
        self.cases = _CASES[config.test](self.respondent.length, config, lengths)

    def run(self, params: Params, step: int) -> dict[str, float]:
        """Answers all questions with these parameters."""
        answers = _answers(self.respondent, params, [case.prompt for case in self.cases])
        results = suite.results_of(self.cases, answers, self.respondent.trained_length)
        depth = {result: "" if result.depth is None else f"/{result.depth:g}" for result in results}
        return {f"{self.name}/{result.task}/{result.tokens}{depth[result]}": result.score for result in results}


class Samples:
    """An `Evaluation` of the trainer that answers the recipe's prompts; what it returns are the answers by their prompts."""

    name = "samples"

    def __init__(self, run: RunConfig) -> None:
        """Takes the recipe's section `samples`.

        Raises:
          UserError: the run trains on no text.
        """
        if run.trajectories.path:
            raise UserError("samples.prompts: found some in a run on trajectories, which answers none; leave them out")
        self.run_config, self.every = run, run.samples.every
        self.prompts = [runner.Prompt(prompt, run.samples.new_tokens) for prompt in run.samples.prompts]

    def prepare(self, objective: Objective, builder: StepBuilder) -> None:
        """Takes the model; programs are compiled by the first answers."""
        self.respondent = _respondent(self.run_config, objective)

    def run(self, params: Params, step: int) -> dict[str, str]:
        """Returns the answers of these parameters."""
        answers = _answers(self.respondent, params, self.prompts)
        return {prompt: answer.generated for prompt, answer in zip(self.run_config.samples.prompts, answers, strict=True)}


Count = Callable[[runner.Prompt], int]


def _lines(count: Count, config: LiveEvaluationConfig, lengths: list[int]) -> list[suite.Case]:
    wording = line_cases.wording_like(config.like) if config.like else None
    # All cases of a number of lines are generated together, so that the lines in question are evenly spread.
    together = functools.lru_cache(maxsize=2)(lambda lines: line_cases.generate(lines, config.count, wording=wording))
    cases = []
    for tokens in lengths:
        def make(lines: int, sample: int | None = None, tokens=tokens) -> suite.Case:
            # The one that the number of lines is fitted with is generated alone, which is quicker.
            case = line_cases.generate(lines, 1, wording=wording)[0] if sample is None else together(lines)[sample]
            return suite.Case("lines", runner.Prompt(case.prompt, config.max_new_tokens), (str(case.expected_number),), tokens,
                              scoring="integer")

        cases += suite.cases_of(make, tokens, count, config.count, line_cases.MOST_LINES)
    return cases


_CASES: dict[str, Callable[[Count, LiveEvaluationConfig, list[int]], list[suite.Case]]] = {
    "lines": _lines,
    "needle": lambda count, config, lengths: needle.make_cases(count, lengths, config.depths, each=config.count),
    "ruler": lambda count, config, lengths: ruler.make_cases(count, lengths, config.tasks, config.count),
    "coreference": lambda count, config, lengths: coreference.make_cases(count, lengths, each=config.count),
}


def evaluations_of(config: RunConfig) -> list[Evaluation]:
    """Returns the recipe's evaluations, and its samples."""
    return [*map(functools.partial(LiveEvaluation, run=config), config.evaluations),
            *([Samples(config)] if config.samples.prompts else [])]
