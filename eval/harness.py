"""lm-evaluation-harness on a sharded checkpoint: its tasks, answered and scored by our decoding.

    python -m eval.harness --checkpoint DIR_OR_HF --tasks arc_easy,hellaswag [--include-path DIR]
    --output DIR

Tasks are names that lm-eval knows, or YAML files below --include-path, which may read local JSON
files. With --chat questions are asked in the model's chat template. Prompts longer than --length
lose their beginning; their number is printed and written. Answers are as long as a task says, and
greedy: a task that asks for sampling is refused. Needs lm-eval: pip install -r
requirements-eval.txt. Writes results.json, and what lm-eval returns to lm_eval.json.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import difflib
import functools
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from data.conversation import Message
from data.errors import UserError, first_line
from data.outputs import output_files, write_texts
from data.printable import printable
from data.templates import Unfinished, unfinished
from eval import runner
from eval.generation_settings import AnswerForm
from eval.scoring import Z95
from trainer import entry
from trainer.options import (
    AtLeastOne,
    AtLeastZero,
    FreeText,
    JsonObject,
    Tokens,
    check_each_once,
    option,
)

if TYPE_CHECKING:
    from model.decode import Generator, Scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's own options."""

    max_new_tokens: Tokens = option(
        "maximum tokens per answer in a task that does not set max_gen_toks", 256
    )
    tasks: str = option("task names, separated by commas")
    include_path: str | None = option("folder with your own tasks", None, metavar="DIR")
    metadata: JsonObject | None = option(
        "settings for tasks that make their own data, as JSON, such as "
        "'{\"max_seq_lengths\": [4096, 8192]}' for lm-eval's RULER",
        None,
        metavar="JSON",
    )
    system_instruction: FreeText | None = option(
        "a system message before each question", None, metavar="TEXT"
    )
    few_shot: AtLeastZero | None = option(
        "number of examples before a question (default: the task's)", None
    )
    limit: AtLeastOne | None = option("only the first N questions of each task", None)
    length: Tokens | None = option(
        "maximum length of a prompt plus its answer, in tokens (default: the trained length)", None
    )
    chat: bool = option("ask in the model's chat template")


parse = functools.partial(runner.parse_evaluation, Options, journaled=False)


class Asked(NamedTuple):
    """The tokens of a request: of its prompt (None for a rolling likelihood), and of all that the
    model reads and answers."""

    prompt: int | None
    whole: int


@dataclasses.dataclass
class Harness:
    """Answers lm-eval's requests to a model, by token ids.

    Attributes:
      length: tokens of the longest prompt with its answer.
      new_tokens: of the longest answer, unless a task sets it.
      truncated: number of prompts cut so far.
      windowed: number of texts scored in several windows so far.
      continued: contexts continued so far; the numbering makes their samples independent.
      asked: all requests so far, by task.

    Raises:
      UserError: no text of this length can be scored, or it does not fit in memory.
    """

    opened: runner.LoadedModel
    length: int
    new_tokens: int
    truncated: int = 0
    windowed: int = 0
    continued: int = 0
    chats: dict[str, Unfinished] = dataclasses.field(default_factory=dict)
    """Prompts in the chat template, by text: encoding the text again would spell out control
    tokens."""
    chats_sorted: list[str] = dataclasses.field(default_factory=list)
    asked: dict[str, list[Asked]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.length < 2:
            raise UserError(f"--length: found {self.length}; 2 or more would work")
        self._last: Generator | None = None
        # Too little memory is reported before lm-eval reads its data.
        self._generator(self.opened.respondent.capacity(self.length), 0)

    def _generator(self, capacity: int, new_tokens: int) -> Generator:
        """Returns a generator of up to `new_tokens` (0 to score); frees the previous one."""
        generator = self.opened.respondent.generator(
            self.opened.params, capacity, new_tokens, self.length
        )
        if self._last is not None and self._last is not generator:
            self._last.free_cache()  # there is memory for only one cache
        self._last = generator
        return generator

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.opened.respondent.tokenizer

    def _chat_before(self, text: str) -> str | None:
        """Returns the longest prompt in the chat template that a text begins with."""
        start = text
        # The last chat sorted at or before the text is its longest prefix, or differs from it. Then
        # any chat that is a prefix of the text is within their common prefix.
        while position := bisect.bisect_right(self.chats_sorted, start):
            chat = self.chats_sorted[position - 1]
            if start.startswith(chat):
                return chat
            equal = itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(start, chat, strict=False)
            )
            start = start[: sum(1 for _ in equal)]
        return None

    def _encode(self, text: str) -> list[int]:
        chat = self._chat_before(text)
        if chat is not None:
            return self.chats[chat].followed_by(text.removeprefix(chat), self.tokenizer)
        ids = self.tokenizer.encode(text)
        return [self.tokenizer.bos_id, *ids] if self.tokenizer.adds_bos else ids

    def _after_something(self, ids: list[int]) -> list[int]:
        """Returns ids that begin with BOS, or with EOS if there is no BOS: lm-eval puts it before
        texts without a context."""
        tokenizer = self.tokenizer
        first = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        return ids if first is None or ids[:1] == [first] else [first, *ids]

    def _cut(self, ids: list[int], room: int) -> list[int]:
        """Returns the last tokens of a prompt that leave enough room; counts cut prompts."""
        if len(ids) + room <= self.length:
            return ids
        self.truncated += 1
        return ids[len(ids) + room - self.length :]

    @property
    def beyond(self) -> int:
        """The number of requests so far that exceed the trained length."""
        return sum(self._exceeds(asked) for asked in itertools.chain(*self.asked.values()))

    def _exceeds(self, asked: Asked) -> bool:
        return asked.whole > self.opened.respondent.trained_length

    def lengths_of(self, tasks: Iterable[str]) -> dict[str, Any]:
        """Returns the mean length of some tasks' prompts, and whether any request exceeds the
        trained length, for results.json."""
        requests = [asked for task in tasks for asked in self.asked.get(task, ())]
        prompts = [asked.prompt for asked in requests if asked.prompt is not None]
        return {
            "prompt_tokens": sum(prompts) / len(prompts) if prompts else None,
            "beyond_trained_length": any(map(self._exceeds, requests)),
        }

    def likelihoods(
        self, pairs: list[tuple[str, str]], tasks: Sequence[str]
    ) -> list[tuple[float, bool]]:
        """Returns each continuation's log-likelihood, and whether greedy decoding gives it.

        Spaces at a context's end belong to the continuation, as in lm-eval. Together they may have
        `length` + 1 tokens: nothing is generated, and the model does not read the last token.

        Args:
          pairs: contexts and their continuations.
          tasks: of each pair.
        """
        texts, starts = [], []
        for context, continuation in pairs:
            before = self._encode(context.rstrip())
            whole = self._encode(context + continuation)
            if not before:
                whole = self._after_something(whole)
            # A token that spans the end of the context and the start of the continuation is scored.
            start = max(min(len(before), len(whole) - 1), 1)
            texts.append(self._cut(whole, -1))
            starts.append(max(start - (len(whole) - len(texts[-1])), 1))
        for task, text, start in zip(tasks, texts, starts, strict=True):
            self.asked.setdefault(task, []).append(Asked(start, len(text) - 1))
        scores = self._score(texts, starts)
        return [(sum(score.log_likelihoods), all(score.is_greedy)) for score in scores]

    def rolling(self, texts: list[str], tasks: Sequence[str]) -> list[float]:
        """Returns each text's log-likelihood; longer texts are scored in lm-eval's windows, each of
        up to `length` scored tokens.

        Args:
          tasks: of each text.
        """
        totals = []
        for text, task in zip(texts, tasks, strict=True):
            windows = _rolling_windows(self._after_something(self._encode(text)), self.length)
            longest = max((len(before) + len(scored) for before, scored in windows), default=1)
            self.asked.setdefault(task, []).append(Asked(None, longest - 1))
            self.windowed += len(windows) > 1
            scores = self._score(
                [before + scored for before, scored in windows],
                [len(before) for before, _ in windows],
            )
            totals.append(sum(sum(score.log_likelihoods) for score in scores))
        return totals

    def _score(self, texts: list[list[int]], starts: list[int]) -> list[Scores]:
        """Returns the scores of texts; those with a common beginning are scored consecutively."""
        scores: dict[int, Scores] = {}
        for generator, chosen in self._batches(range(len(texts)), texts, 0):
            batch = generator.score(
                self.opened.params, [texts[i] for i in chosen], [starts[i] for i in chosen]
            )
            scores.update(zip(chosen, batch, strict=True))
        return [scores[i] for i in range(len(texts))]

    def _batches(
        self, numbers: Iterable[int], ids: list[list[int]], new_tokens: int
    ) -> Iterator[tuple[Generator, list[int]]]:
        """Yields a generator of up to `new_tokens` (0 to score) and a batch of numbers for it.

        Texts with a common beginning stay in one row of successive batches.
        """
        respondent, groups = self.opened.respondent, dict[int, list[int]]()
        most = respondent.capacity(self.length)
        for number in numbers:
            # The model does not read the last token of a text that is scored.
            tokens = len(ids[number]) + (new_tokens or -1)
            groups.setdefault(respondent.capacity_within(tokens, most), []).append(number)
        for capacity, group in sorted(groups.items()):
            generator = self._generator(capacity, new_tokens)
            order = sorted(group, key=ids.__getitem__)
            run = -(-len(order) // respondent.rows)
            for number in range(run):
                yield generator, order[number::run]

    def continuations(self, contexts: list[str], answers: list[AnswerForm]) -> list[str]:
        """Returns the generated text after each context, up to the first of its ends.

        Args:
          answers: the form of each answer.

        Raises:
          UserError: an answer may take all of `length`, so no room is left for its question.
        """
        most = [answer.new_tokens or self.new_tokens for answer in answers]
        for answer, new_tokens in zip(answers, most, strict=True):
            self._check_room(answer, new_tokens)
        ids = [
            self._cut(self._encode(context) or self._after_something([]), new_tokens)
            for context, new_tokens in zip(contexts, most, strict=True)
        ]
        for answer, prompt, new_tokens in zip(answers, ids, most, strict=True):
            asked = Asked(len(prompt), len(prompt) + new_tokens)
            self.asked.setdefault(answer.task, []).append(asked)
        texts = [""] * len(ids)
        for new_tokens in sorted(set(most)):
            numbers = [i for i, number in enumerate(most) if number == new_tokens]
            for generator, chosen in self._batches(numbers, ids, new_tokens):
                generated = generator(
                    self.opened.params,
                    [ids[i] for i in chosen],
                    [self.continued + i for i in chosen],
                )
                for i, answer_ids in zip(chosen, generated, strict=True):
                    texts[i] = answers[i].cut(self.tokenizer.decode(answer_ids))
        self.continued += len(ids)
        return texts

    def _check_room(self, answer: AnswerForm, new_tokens: int) -> None:
        """Raises UserError if `length` leaves no room for a question with such an answer."""
        if new_tokens < self.length:
            return
        most = (
            f"--max-new-tokens {new_tokens}"
            if answer.new_tokens is None
            else f"its max_gen_toks {new_tokens}"
        )
        raise UserError(
            f"--length: found {self.length}, which leaves no room for a question of {answer.task} "
            f"with an answer of {most}; {new_tokens + 1} or more would work"
        )

    def chat_prompt(self, turns: list[dict[str, str]], generation: bool) -> str:
        """Returns turns in the model's chat template, and the heading of an answer; or, without
        `generation`, up to the end of the last turn, for the model to continue.

        Raises:
          UserError: the model has no chat template.
        """
        if not self.opened.respondent.template:
            raise UserError(
                f"{self.opened.about['checkpoint']}: its tokenizer has no chat template; without "
                "--chat, or with --template, it would work"
            )
        messages = [Message(turn["role"], turn["content"]) for turn in turns]
        template = self.opened.respondent.template
        chat = unfinished(messages, template, self.tokenizer, continue_last=not generation)
        self.add_chat(chat)
        return chat.text

    def add_chat(self, chat: Unfinished) -> None:
        """Keeps a prompt in the chat template, without the white space at its end: what is scored
        begins with it."""
        chat = chat._replace(text=chat.text.rstrip(), tail=chat.tail.rstrip())
        if chat.text not in self.chats:
            bisect.insort(self.chats_sorted, chat.text)
        self.chats[chat.text] = chat


def _rolling_windows(ids: list[int], length: int) -> list[tuple[list[int], list[int]]]:
    """Returns lm-eval's windows of a text: the tokens before, at least one, and those scored.

    The last window is filled up with earlier tokens, which are not scored again. The model does not
    read the last scored token, so a window has up to `length` + 1 tokens.
    """
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    windows = get_rolling_token_windows(
        token_list=ids[1:], prefix_token=ids[0] if ids else 0, max_seq_len=length, context_len=1
    )
    return [make_disjoint_window(window) for window in windows]


def make_model(harness: Harness) -> Any:
    """Returns lm-eval's view of a model."""
    from lm_eval.api.model import LM

    class LongstripeLM(LM):
        """A checkpoint of ours in lm-eval."""

        tokenizer_name = "longstripe"

        def loglikelihood(self, requests, disable_tqdm=False):
            tasks = [request.task_name for request in requests]
            return harness.likelihoods([request.args for request in requests], tasks)

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            tasks = [request.task_name for request in requests]
            return harness.rolling([request.args[0] for request in requests], tasks)

        def generate_until(self, requests, disable_tqdm=False):
            is_greedy = not harness.opened.respondent.sampling.temperature
            answers = [
                AnswerForm.of(request.task_name, request.args[1], is_greedy) for request in requests
            ]
            return harness.continuations([request.args[0] for request in requests], answers)

        def chat_template(self, chat_template=False):
            return harness.opened.respondent.template or ""

        def apply_chat_template(self, chat_history, add_generation_prompt=True):
            return harness.chat_prompt(chat_history, add_generation_prompt)

    return LongstripeLM()


def rows_of(
    results: dict[str, Any], lengths_of: Callable[[list[str]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns lm-eval's metrics for results.json, with normal intervals.

    Where lm-eval has no standard error, as for perplexities and for a single question, both ends of
    the interval are None. Its RULER has a metric per length, -1 at lengths that were not asked for;
    these are left out.

    Args:
      lengths_of: see `Harness`.
    """
    rows = []
    for task, metrics in results["results"].items():
        for name, value in metrics.items():
            metric, _, filtered = name.partition(",")
            # A key without a filter, such as sample_len, is not a metric.
            if not isinstance(value, int | float) or "stderr" in metric or not filtered:
                continue
            if metric.isdecimal() and value == -1:
                continue
            error = metrics.get(f"{metric}_stderr,{filtered}")
            around = Z95 * error if isinstance(error, int | float) else None
            label = f"{task} {metric}" + (f" ({filtered})" if filtered != "none" else "")
            rows.append(
                {
                    "task": label,
                    "tokens": 0,
                    "depth": None,
                    "cases": _cases(task, results),
                    "score": value,
                    "low": None if around is None else value - around,
                    "high": None if around is None else value + around,
                }
                | lengths_of(_parts(task, results))
            )
    return rows


def _parts(task: str, results: dict[str, Any]) -> list[str]:
    """Returns a task, or all tasks of a group."""
    parts = results.get("group_subtasks", {}).get(task, ())
    return [name for part in parts for name in _parts(part, results)] or [task]


def _cases(task: str, results: dict[str, Any]) -> int:
    """Returns the number of questions of a task, or of all tasks of a group."""
    samples = results.get("n-samples", {})
    return sum(samples.get(part, {}).get("effective", 0) for part in _parts(task, results))


def check_tasks(tasks: Sequence[str], known: Collection[str]) -> None:
    """Raises UserError, with the nearest name, if one is neither a known task nor a file."""
    for task in tasks:
        if task in known or Path(task).is_file():
            continue
        near = difflib.get_close_matches(task, known, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(
            f"--tasks: lm-eval has no task {printable(task)!r}{meant}; lm-eval ls tasks lists "
            "them, and --include-path takes a folder with your own tasks"
        )


def _tasks(args: argparse.Namespace, metadata: dict[str, Any]) -> tuple[list[str], Any]:
    """Returns the names of the tasks, and lm-eval's TaskManager.

    Args:
      metadata: what the manager tells tasks that make their own data; it keeps the dictionary,
        unless that is empty.

    Raises:
      UserError: a flag is wrong, or lm-eval is not installed.
    """
    runner.check_flags(args)
    for flag, value in (("--template", args.template), ("--template-kwargs", args.template_kwargs)):
        if value and not args.chat:
            raise UserError(
                f"{flag}: questions are asked in a chat template only with --chat; with both, or "
                "neither, it would work"
            )
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError(
            "lm-eval is not installed; pip install -r requirements-eval.txt installs it"
        ) from None
    if args.include_path and not Path(args.include_path).is_dir():
        raise UserError(f"--include-path: {printable(args.include_path)} is not a folder")
    tasks = args.tasks.split(",")
    check_each_once("--tasks", tasks)
    task_manager = TaskManager(include_path=args.include_path, metadata=metadata)
    check_tasks(tasks, task_manager.all_tasks)
    return tasks, task_manager


def tokenizer_of(folder: Path) -> str:
    """Returns the folder of a model's tokenizer, for tasks that make their own data; "" if
    transformers would run code of the model to read it, as lm-eval allows."""
    for name in ("tokenizer_config.json", "config.json"):
        if (folder / name).is_file() and b"auto_map" in (folder / name).read_bytes():
            return ""
    return str(folder)


def _evaluate_tasks(
    args: argparse.Namespace, tasks: list[str], task_manager: Any, harness: Harness
) -> dict[str, Any]:
    """Returns lm-eval's results.

    Raises:
      UserError: a task cannot be loaded: it needs a package or data that are not there.
    """
    import lm_eval

    model = make_model(harness)
    try:
        return lm_eval.simple_evaluate(
            model=model,
            tasks=tasks,
            num_fewshot=args.few_shot,
            limit=args.limit,
            apply_chat_template=args.chat,
            system_instruction=args.system_instruction,
            task_manager=task_manager,
        )
    except UserError:
        raise
    except Exception as error:
        if harness.asked or not _raised_by_tasks(error):
            raise
        raise UserError(
            f"--tasks: {args.tasks}: cannot be loaded ({type(error).__name__}: {first_line(error)})"
        ) from error


def _raised_by_tasks(error: Exception) -> bool:
    """Whether lm-eval or a task raised an error that `_evaluate_tasks` caught; our own code, which
    lm-eval calls through this module, did not."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
    return bool(frames) and not any(frame.f_globals is globals() for frame in frames)


def _print_lengths(harness: Harness) -> None:
    """Prints how many requests were longer than the model's trained length, or than `length`."""
    if harness.beyond:
        print(
            f"warning: {harness.beyond} of {sum(map(len, harness.asked.values()))} requests take "
            f"more than {harness.opened.respondent.trained_length} tokens with their answers, "
            "which is beyond the trained length; the results of their tasks are marked so",
            file=sys.stderr,
        )
    if harness.truncated:
        print(
            f"warning: {harness.truncated} prompts were longer than {harness.length} tokens and "
            "lost their beginning"
        )
    if harness.windowed:
        print(
            f"note: {harness.windowed} texts were longer than {harness.length} tokens; each of "
            "their tokens was scored once, in windows"
        )


def evaluate(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Evaluates the tasks and writes the results."""
    metadata = {"tokenizer": "", **(args.metadata or {})}  # known once the model is opened
    tasks, task_manager = _tasks(args, metadata)
    import lm_eval

    markers = {"results.json": b'"evaluation": "lm-eval"', "lm_eval.json": b'"n-shot"'}
    folder = output_files(args.output, markers)
    opened = runner.open_respondent(args)
    harness = Harness(opened, args.length or opened.respondent.trained_length, args.max_new_tokens)
    metadata["tokenizer"] = metadata["tokenizer"] or tokenizer_of(opened.tokenizer_path)
    results = _evaluate_tasks(args, tasks, task_manager, harness)
    rows = rows_of(results, harness.lengths_of)
    _print_lengths(harness)
    about = opened.about | {
        "template": opened.about["template"] if args.chat else None,
        "tasks": args.tasks,
        "truncated_prompts": harness.truncated,
        "texts_in_windows": harness.windowed,
        "requests_beyond_trained_length": harness.beyond,
        "length": harness.length,
        "max_new_tokens": harness.new_tokens,
        "lm_eval": lm_eval.__version__,
    }
    for name in ("metadata", "system_instruction"):
        if getattr(args, name) is not None:
            about[name] = getattr(args, name)
    content = {
        "evaluation": "lm-eval",
        "about": about,
        "interval": "95%: normal, of lm-eval's standard error; null where it has none",
        "results": rows,
    }
    theirs = {
        name: results[name]
        for name in ("results", "versions", "n-shot", "n-samples", "configs")
        if name in results
    }
    write_texts(
        folder,
        {
            "lm_eval.json": json.dumps(theirs, indent=2, default=str) + "\n",
            "results.json": json.dumps(content, indent=2) + "\n",
        },
    )
    for row in rows:
        interval = "" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}, "
        print(f"{row['task']}: {row['score']:.3f} ({interval}{row['cases']} cases)")
    print(f"wrote {folder}/results.json and lm_eval.json")
    return rows


main = runner.command(parse, evaluate)


if __name__ == "__main__":
    entry.leave(main())
