"""What a model that thinks before it answers says after its thought."""

from __future__ import annotations

import json
from collections.abc import Iterable

from data.conversation import Message
from data.templates import unfinished
from data.tokenizer import Tokenizer

BEGINNING, END = "<think>", "</think>"
WITHOUT = json.dumps({"enable_thinking": False})  # for templates such as Qwen3's


def said(text: str, opened: bool = False) -> str | None:
    """Returns what an answer says after its thought: all of it without one, None if it ends inside.

    An end without a beginning is that of a thought which the model did not open, but one with
    nothing after it is a stray mark.

    Args:
      text: the generated text.
      opened: whether the prompt ends with the thought's beginning.
    """
    before, end, after = text.partition(END)
    begins = opened or before.lstrip().startswith(BEGINNING)
    if end and (begins or (BEGINNING not in before and after.strip())):
        return after
    return None if begins else text


def opens_thought(tokenizer: Tokenizer, template: str | None) -> bool:
    """Returns whether a chat template ends its prompts with a thought's beginning."""
    if template is None:
        return False
    prompt = unfinished((Message("user", "?"),), template, tokenizer)
    return prompt.text.rstrip().endswith(BEGINNING)


def counted(texts: Iterable[tuple[str, str | None]]) -> dict[str, int]:
    """Returns how many answers are scored without their thought, and end inside it, if any do.

    Args:
      texts: pairs of a generated text and what `said` returns for it.
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
        return f"note: {after} answers begin with a thought; what follows {END} is scored"
    return (
        f"warning: {inside} answers end inside their thought and count as empty; {would_work}, if "
        "the chat template reads it, or longer answers would work"
    )
