"""The answers of reasoning models without their thoughts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int

from data.conversation import Message
from data.templates import unfinished
from data.tokenizer import Tokenizer

# How a thought begins -> how it ends. The second pair is Mistral's, whose marks are special tokens.
MARKS = {"<think>": "</think>", "[THINK]": "[/THINK]"}
WITHOUT = json.dumps({"enable_thinking": False})  # for templates such as Qwen3's


def text_of(ids: Sequence[int] | Int[np.ndarray, " n"], tokenizer: Tokenizer) -> str:
    """Returns the text of a generated answer, in which marks of thoughts are the only special
    tokens."""
    return tokenizer.decode(ids, keep=(*MARKS, *MARKS.values()))


def after_thought(text: str, opened: str = "") -> str | None:
    """Returns what an answer says after its thought: all of it without one, None if it ends inside.

    An end without a beginning is that of a thought which the model did not open, but one with
    nothing after it is a stray mark.

    Args:
      text: the generated text.
      opened: the thought's beginning, if the prompt ends with it.
    """
    opened = opened or next(filter(text.lstrip().startswith, MARKS), "")
    if opened:
        _, end, after = text.partition(MARKS[opened])
        return after if end else None
    for beginning, mark in MARKS.items():
        before, _, after = text.partition(mark)
        if after.strip() and beginning not in before:
            return after
    return text


def opens_thought(tokenizer: Tokenizer, template: str | None) -> str:
    """Returns the thought's beginning with which a chat template ends its prompts; "" if none."""
    if template is None:
        return ""
    prompt = unfinished((Message("user", "?"),), template, tokenizer)
    return next(filter(prompt.text.rstrip().endswith, MARKS), "")


def counted(texts: Iterable[tuple[str, str | None]]) -> dict[str, int]:
    """Returns how many answers are scored without their thought, and end inside it, if any do.

    Args:
      texts: pairs of a generated text and what `after_thought` returns for it.
    """
    pairs = list(texts)
    after = sum(spoken is not None and spoken != text for text, spoken in pairs)
    inside = sum(spoken is None for _, spoken in pairs)
    if not (after or inside):
        return {}
    return {"answers_after_a_thought": after, "answers_that_end_in_a_thought": inside}


def line(counts: dict[str, int], would_work: str = f"--template-kwargs '{WITHOUT}'") -> str:
    """Returns the line that says what `counted` found; "" for nothing.

    Args:
      would_work: how to ask without thoughts.
    """
    if not counts:
        return ""
    after, inside = counts.values()
    if not inside:
        return f"note: {after} answers begin with a thought; what follows its end is scored"
    return (
        f"warning: {inside} answers end inside their thought and count as empty; {would_work}, if "
        "the chat template reads it, or longer answers would work"
    )
