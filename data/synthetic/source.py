"""Generated exercises as a data source: the path is `synthetic:TASK?count=N&seed=S`, or tokens=N.

Each exercise is a conversation of a question with its text, and the answer. Text sizes are uniform
up to the context length. Evaluation's key-value pairs, and reserved keys and numbers, do not occur
(`split`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.errors import UserError
from data.folders import sync
from data.lengths import tokens_of
from data.paths import cache_folder, refuse_store
from data.synthetic import tasks
from data.synthetic.tasks import Exercise
from data.synthetic.wording import Wording, wording_like
from data.untrusted_files import read_bytes

PREFIX = "synthetic:"
RULES = "synthetic-4"  # change with every change to the exercises
TASKS: dict[str, Callable[..., Exercise]] = {
    "lines": tasks.lines,
    "needles": tasks.needles,
    "key_values": tasks.key_values,
    "variables": tasks.variables,
    "copying": tasks.copying,
}
# Tokens of a context reserved for the template's first turns and for texts with longer words.
MARGIN = 48
FURTHER_MARGIN = 16  # for headings and ends of the two turns of another question


class Spec(NamedTuple):
    """What a source of exercises generates.

    Attributes:
      like: the file whose wording lines take; None for ours.
      tokens: approximate total of all exercises, which determines their number; 0 if `count` is
        given.
      share: of a text's lines to ask for in another question.
    """

    task: str
    count: int  # type: ignore[assignment]  # no use of tuple.count
    seed: int
    like: str | None
    tokens: int = 0
    share: float = 0.0

    def exercises(self, context_length: int) -> int:
        """Returns how many exercises there are: half a context each, on average."""
        return max(1, 2 * self.tokens // context_length) if self.tokens else self.count

    @classmethod
    def parse(cls, path: str) -> Spec:
        """Reads the path of a source.

        Raises:
          UserError: the task or an option is unknown, or has another form.
        """
        task, _, query = path.removeprefix(PREFIX).partition("?")
        form = (
            f"{PREFIX}TASK?count=2000&seed=0, with a TASK of {', '.join(TASKS)} (or tokens=4000000 "
            "in place of count)"
        )
        options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        of_lines = {"like", "share"} if task == "lines" else set()
        if (
            task not in TASKS
            or set(options) - {"count", "tokens", "seed"} - of_lines
            or {"count", "tokens"} <= set(options)
        ):
            raise UserError(
                f"data.sources: found {path}; {form} would work (and for lines &like=FILE and "
                "&share=0.25)"
            )
        try:
            spec = cls(
                task,
                int(options.get("count", "2000")),
                int(options.get("seed", "0")),
                options.get("like"),
                tokens_of(options.get("tokens", "0")),
                float(options.get("share", "0")),
            )
        except ValueError:
            raise UserError(
                f"data.sources: found {path}; numbers are needed, as in {form}"
            ) from None
        if spec.like:
            refuse_store(spec.like)
        if spec.count < 1 or spec.tokens < 0 or spec.seed < 0 or not 0 <= spec.share <= 1:
            raise UserError(
                f"data.sources: found {path}; a count of 1 or more, a seed of 0 or more and a "
                "share of 0 to 1 would work"
            )
        return spec


def exercise_of(spec: Spec, wording: Wording | None, number: int, units: int) -> Exercise:
    """Returns an exercise, as a pure function of the arguments."""
    rng = np.random.default_rng([spec.seed, list(TASKS).index(spec.task), number])
    options = {"wording": wording, "share": spec.share} if spec.task == "lines" else {}
    return TASKS[spec.task](rng, units, False, **options)


def generate(path: str, context_length: int, count: Callable[[str], int]) -> list[dict]:
    """Returns the conversations of a source, as ShareGPT records.

    Args:
      path: see `Spec.parse`.
      context_length: most tokens of an exercise.
      count: tokens of a text.

    Raises:
      UserError: see `Spec.parse`; or not even the shortest exercise fits.
    """
    spec = Spec.parse(path)
    wording = wording_like(spec.like) if spec.like else None
    make = functools.partial(exercise_of, spec, wording)

    def tokens(units: int) -> int:
        longest = max(
            (make(number, units) for number in range(3)), key=lambda exercise: len(exercise.text)
        )
        texts = longest.text, longest.prefix + longest.rest, *filter(None, longest.further)
        return sum(map(count, texts)) + MARGIN + FURTHER_MARGIN * (len(texts) // 2 - 1)

    short = tokens(1)
    if short > context_length:
        raise UserError(
            f"{path}: its shortest exercise takes about {short} tokens; a data.context_length of "
            f"{short} or more would work"
        )
    per_unit = (tokens(33) - short) / 32
    most = max(int(1 + (context_length - short) / per_unit), 1)
    if spec.task == "lines":
        most = min(most, tasks.MOST_TRAINING_LINES)
    while most > 1 and tokens(most) > context_length:
        most -= max(most // 50, 1)
    sizes = np.random.default_rng([spec.seed, list(TASKS).index(spec.task)]).integers(
        1, most + 1, spec.exercises(context_length)
    )
    records = []
    for number, units in enumerate(sizes.tolist()):
        exercise = make(number, units)
        texts = (
            exercise.text,
            (exercise.prefix + exercise.rest).strip(),
            *filter(None, exercise.further),
        )
        turns = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]
        records.append({"id": f"{spec.task}-{spec.seed}-{number}", "conversations": turns})
    return records


def write(path: str, context_length: int, count: Callable[[str], int], tokenizer: str) -> Path:
    """Returns a cached file with the conversations of a source, writing it if missing.

    Args:
      path, context_length, count: see `generate`.
      tokenizer: fingerprint of the tokenizer that counts.
    """
    spec = Spec.parse(path)
    like = spec.like
    if like and Path(like).is_file():
        like = hashlib.sha256(read_bytes(like)).hexdigest()
    parts = json.dumps([RULES, spec._replace(like=like), context_length, tokenizer])
    folder = cache_folder("synthetic")
    file = folder / f"{spec.task}-{hashlib.sha256(parts.encode()).hexdigest()[:20]}.jsonl"
    if not file.exists():
        records = generate(path, context_length, count)
        folder.mkdir(parents=True, exist_ok=True)
        # Hosts that share the cache may have equal process ids.
        scratch = file.with_suffix(f".{secrets.token_hex(4)}")
        try:
            scratch.write_text(
                "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
            )
            sync(scratch)
            os.replace(scratch, file)
        finally:
            scratch.unlink(missing_ok=True)
        sync(folder)
    return file
