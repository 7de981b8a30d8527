"""lm-evaluation-harness on a sharded checkpoint: its tasks, answered and scored by our decoding.

    python -m eval.harness --checkpoint DIR_OR_HF --tasks arc_easy,hellaswag [--include-path DIR] --output DIR

Tasks are names that lm-eval knows, or YAML files below --include-path, which may take local JSON files. With --chat questions
are asked in the model's own chat template. Prompts longer than --length are cut at their beginning; how many is printed and
written. Needs lm-eval: pip install -r requirements-eval.txt. Writes results.json, and what lm-eval returns to lm_eval.json.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from data.conversation import Message
from data.errors import UserError
from data.paths import output_folder
from data.templates import render
from eval import adapters, runner
from eval.scoring import Z95
from trainer import entry

if TYPE_CHECKING:
    from model.decode import Generator


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = entry.CommandParser(prog="python -m eval.harness", description=__doc__.splitlines()[0], allow_abbrev=False)
    runner.add_flags(parser, new_tokens=256, continues=False)
    parser.add_argument("--tasks", required=True, help="names of tasks, with commas between them")
    parser.add_argument("--include-path", metavar="DIR", help="folder with tasks of your own")
    parser.add_argument("--few-shot", type=int, help="number of examples before a question (default: the task's own)")
    parser.add_argument("--limit", type=int, help="only the first so many questions of each task")
    parser.add_argument("--length", type=entry.at_least_one, help="tokens of the longest prompt with its answer (default: the "
                        "trained length)")
    parser.add_argument("--chat", action="store_true", help="ask in the model's chat template")
    return runner.parse(parser, argv)


@dataclasses.dataclass
class Harness:
    """What lm-eval asks of a model, by token ids.

    Attributes:
      length: tokens of the longest prompt with its answer; new_tokens: of the longest answer.
      truncated: number of prompts that were cut so far.
    """

    opened: runner.Opened
    length: int
    new_tokens: int
    truncated: int = 0
    chats: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """Ids of prompts in the chat template, by their text: encoded again, control tokens would be letters."""

    def __post_init__(self) -> None:
        capacity = runner.padded_length(self.length, 64 * self.opened.respondent.model.mesh.shape["sequence"])
        self.generator: Generator = self.opened.respondent.generator(self.opened.params, capacity, self.new_tokens, self.length)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.opened.respondent.tokenizer

    def _encode(self, text: str) -> list[int]:
        chat = next((chat for chat in self.chats if text.startswith(chat)), None)
        if chat is not None:
            rest = text.removeprefix(chat)
            return self.chats[chat] + (self.tokenizer.encode(rest) if rest else [])
        first = self.tokenizer.bos_id if self.tokenizer.bos_id is not None else self.tokenizer.eos_id
        return [*([first] if first is not None else []), *self.tokenizer.encode(text)]

    def _cut(self, ids: list[int], room: int) -> list[int]:
        """Returns the last tokens of a prompt that leave so much room, and counts prompts that are cut."""
        if len(ids) + room <= self.length:
            return ids
        self.truncated += 1
        return ids[len(ids) + room - self.length:]

    def likelihoods(self, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Returns of each context with its continuation the continuation's log-likelihood and whether greedy decoding gives it.

        Spaces at a context's end are the continuation's, as lm-eval has it.
        """
        texts, starts = [], []
        for context, continuation in pairs:
            stripped = context if context in self.chats else context.rstrip()
            before, whole = self._encode(stripped), self._encode(context + continuation)
            # Where the last token of the context and the first of the continuation are one, that is scored.
            start = max(min(len(before), len(whole) - 1), 1)
            texts.append(self._cut(whole, self.new_tokens))
            starts.append(max(start - (len(whole) - len(texts[-1])), 1))
        scores = self._score(texts, starts)
        return [(sum(score.log_likelihoods), all(score.is_greedy)) for score in scores]

    def rolling(self, texts: list[str]) -> list[float]:
        """Returns each text's log-likelihood; of one that is longer than `length` in pieces that begin anew."""
        totals = []
        size = self.length - self.new_tokens
        for text in texts:
            ids = self._encode(text)
            pieces = [ids[max(first - 1, 0):first + size - 1] for first in range(0, len(ids), size - 1)]
            pieces = [piece for piece in pieces if len(piece) > 1]
            self.truncated += len(pieces) > 1
            totals.append(sum(sum(score.log_likelihoods) for score in self._score(pieces, [1] * len(pieces))))
        return totals

    def _score(self, texts: list[list[int]], starts: list[int]) -> list[Any]:
        """Returns the scores of texts; those with a common beginning are scored one after the other."""
        order = sorted(range(len(texts)), key=texts.__getitem__)
        rows, scores = self.generator.rows, [None] * len(texts)
        run = max(-(-len(order) // rows), 1)
        for number in range(run if order else 0):
            chosen = order[number::run]
            found = self.generator.score(self.opened.params, [texts[i] for i in chosen], [starts[i] for i in chosen])
            for i, score in zip(chosen, found, strict=True):
                scores[i] = score  # type: ignore[call-overload]
        return scores

    def continuations(self, contexts: list[str], ends: list[list[str]]) -> list[str]:
        """Returns the generated text after each context, up to the first of its ends."""
        ids = [self._cut(self._encode(context), self.new_tokens) for context in contexts]
        order, texts = sorted(range(len(ids)), key=ids.__getitem__), [""] * len(ids)
        run = max(-(-len(order) // self.generator.rows), 1)
        for number in range(run if order else 0):
            chosen = order[number::run]
            answers = self.generator(self.opened.params, [ids[i] for i in chosen])
            for i, answer in zip(chosen, answers, strict=True):
                text = self.tokenizer.decode(answer)
                for end in ends[i]:
                    text = text.split(end)[0] if end else text
                texts[i] = text
        return texts

    def chat_prompt(self, turns: list[dict[str, str]], generation: bool = True) -> str:
        """Returns turns in the model's chat template.

        Raises:
          UserError: it has none.
        """
        if not self.opened.respondent.template:
            raise UserError(f"{self.opened.about['checkpoint']}: its tokenizer has no chat template; without --chat, or with "
                            "--template, it can be evaluated")
        messages = [Message(turn["role"], turn["content"]) for turn in turns]
        segments = render(messages, self.opened.respondent.template, self.tokenizer, add_generation_prompt=generation)
        ids = [token for segment in segments for token in segment.ids]
        text = self.tokenizer.decode(ids, skip_control=False)
        self.chats[text] = ids
        return text


def make_model(harness: Harness) -> Any:
    """Returns lm-eval's view of a model.

    Raises:
      UserError: lm-eval is not installed.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise UserError("lm-eval is not installed; pip install -r requirements-eval.txt installs it") from None

    class LongstripeLM(LM):
        """A checkpoint of ours in lm-eval."""

        tokenizer_name = "longstripe"

        def loglikelihood(self, requests, disable_tqdm=False):
            return harness.likelihoods([request.args for request in requests])

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            return harness.rolling([request.args[0] for request in requests])

        def generate_until(self, requests, disable_tqdm=False):
            contexts, options = zip(*(request.args for request in requests), strict=True)
            ends = [option.get("until") or [] for option in options]
            return harness.continuations(list(contexts), [[end] if isinstance(end, str) else end for end in ends])

        def chat_template(self, chat_template=False):
            return harness.opened.respondent.template or ""

        def apply_chat_template(self, chat_history, add_generation_prompt=True):
            return harness.chat_prompt(chat_history, add_generation_prompt)

    return LongstripeLM()


def rows_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what results.json holds of lm-eval's results: each metric with the normal interval of its standard error."""
    rows = []
    for task, metrics in results["results"].items():
        for name, value in metrics.items():
            metric, _, filtered = name.partition(",")
            error = metrics.get(f"{metric}_stderr,{filtered}")
            if isinstance(value, int | float) and "stderr" not in metric and isinstance(error, int | float):
                cases = results.get("n-samples", {}).get(task, {}).get("effective", 0)
                label = f"{task} {metric}" + (f" ({filtered})" if filtered not in ("", "none") else "")
                rows.append({"task": label, "tokens": 0, "depth": None, "cases": cases, "score": value,
                             "low": value - Z95 * error, "high": value + Z95 * error, "prompt_tokens": 0,
                             "beyond_trained_length": False})
    return rows


def evaluate(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Evaluates the tasks and writes the results."""
    runner.check_flags(args)
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError("lm-eval is not installed; pip install -r requirements-eval.txt installs it") from None
    folder = output_folder(args.output)
    opened = runner.open_respondent(args)
    harness = Harness(opened, args.length or opened.respondent.trained_length, args.max_new_tokens)
    found = lm_eval.simple_evaluate(
        model=make_model(harness), tasks=args.tasks.split(","), num_fewshot=args.few_shot, limit=args.limit,
        apply_chat_template=args.chat, task_manager=TaskManager(include_path=args.include_path))
    rows = rows_of(found)
    if harness.truncated:
        print(f"warning: {harness.truncated} prompts were longer than {harness.length} tokens and were cut at their beginning")
    about = opened.about | {"tasks": args.tasks, "truncated_prompts": harness.truncated, "length": harness.length,
                            "lm_eval": lm_eval.__version__}
    content = {"evaluation": "lm-eval", "about": about, "interval": "95%: normal, of lm-eval's standard error", "results": rows}
    (folder / "results.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    own = {name: found[name] for name in ("results", "versions", "n-shot", "n-samples", "configs") if name in found}
    (folder / "lm_eval.json").write_text(json.dumps(own, indent=2, default=str) + "\n", encoding="utf-8")
    for row in rows:
        print(f"{row['task']}: {row['score']:.3f} ({row['low']:.3f} to {row['high']:.3f}, {row['cases']} cases)")
    print(f"wrote {folder}/results.json and lm_eval.json")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    args = parse(argv)
    return entry.run(lambda: adapters.each_adapter(evaluate, args), args.output)


if __name__ == "__main__":
    entry.leave(main())
