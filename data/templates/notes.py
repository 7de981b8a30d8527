"""Reports input that a rendered conversation does not contain."""

import re
from collections.abc import Collection, Sequence
from typing import Any

from data.conversation import Message
from data.reasons import TOOLS_LEFT_OUT
from data.templates.errors import TemplateError
from data.templates.rendering import Rendered
from data.templates.runs import Source

REASONING_LEFT_OUT = "reasoning left out: the template cannot write it"
EARLIER_REASONING_LEFT_OUT = "reasoning of earlier turns left out by the template"
LAST_REASONING_LEFT_OUT = "reasoning after the last question left out by the template"
TEXT_LEFT_OUT = "text of a turn left out by the template"


def notes_of(
    rendered: Rendered,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    template: str,
    is_models_own: bool,
) -> frozenset[str]:
    """Returns the template's omissions, as the report counts them.

    Args:
      rendered: the conversation as the template writes it.
      messages: its turns.
      tools: its descriptions of tools.
      template: the template in Jinja.
      is_models_own: whether it came with the model, for messages.

    Raises:
      TemplateError: it writes no turn at all, or omits a call.
    """
    notes: set[str] = set()
    written: dict[int, list[tuple[int, int]]] = {}  # by the id of a source, ranges of it
    for length, source, offset in rendered.runs:
        if source is not None:
            whole = (0, len(source.text))
            written.setdefault(id(source), []).append(
                whole if offset is None else (offset, offset + length)
            )
    if not written and any(message.content.strip() for message in messages):
        raise TemplateError("the chat template writes nothing of the turns")
    fields = {
        source.field for source in rendered.sources if id(source) in written and source.turn < 0
    }
    if tools and "tools" not in fields:
        notes.add(TOOLS_LEFT_OUT)
    questions = [number for number, message in enumerate(messages) if message.role == "user"]
    for source in rendered.sources:
        ranges = written.get(id(source))
        if source.field == "content":
            if source.text and _is_cut(source, ranges or []):
                notes.add(TEXT_LEFT_OUT)
        elif source.field == "reasoning" and source.text.strip() and not ranges:
            if not re.search(r"\b(?:reasoning_content|thinking)\b", template):
                notes.add(REASONING_LEFT_OUT)
            elif questions and source.turn < questions[-1]:
                notes.add(EARLIER_REASONING_LEFT_OUT)
            else:
                notes.add(LAST_REASONING_LEFT_OUT)
    _require_calls(rendered, written.keys(), is_models_own)
    return frozenset(notes)


def _is_cut(source: Source, ranges: list[tuple[int, int]]) -> bool:
    """Returns whether text is missing, apart from white space and what the template looks for."""
    if sum(end - start for start, end in ranges) >= len(source.text.strip()):
        return False
    looked_for = [
        match.span()
        for needle in source.needles
        for match in re.finditer(re.escape(needle), source.text)
    ]
    at = 0
    for start, end in [
        *sorted([*ranges, *source.found, *looked_for]),
        (len(source.text), len(source.text)),
    ]:
        if source.text[at:start].strip():
            return True
        at = max(at, end)
    return False


def _require_calls(rendered: Rendered, written: Collection[int], is_models_own: bool) -> None:
    """Raises TemplateError if the template omits a call.

    Each call counts by itself: a turn may call the same function twice.

    Args:
      rendered: the conversation as the template writes it.
      written: the ids of the sources that the template writes.
      is_models_own: whether the template came with the model.
    """
    turns: dict[int, list[bool]] = {}  # whether each of a turn's calls is written
    for source in rendered.call_names:
        turns.setdefault(source.turn, []).append(id(source) in written)
    for calls in turns.values():
        if all(calls):
            continue
        if any(calls):
            which = "only some" if any(calls[1:]) else "only the first"
            raise TemplateError(
                f"the chat template writes {which} of a turn's `tool_calls`; one call in a turn "
                "would work"
            )
        remedy = (
            "a model whose template does"
            if is_models_own
            else "one that does, such as the model's own (template: tokenizer),"
        )
        raise TemplateError(
            f"the chat template does not write a turn's `tool_calls`; {remedy} would work"
        )
