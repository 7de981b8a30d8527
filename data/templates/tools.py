"""Renders a chat template for conversations with tool calls or tools."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from data.conversation import Message
from data.templates.errors import TemplateError
from data.templates.rendering import Content, TemplateText, Written, rendered_parts
from data.tokenizer import Tokenizer
from data.tool_calls import map_texts

GUARDED = "\ufdd2"  # a noncharacter within texts that are not to be found as control tokens
_MARKS = re.compile("[\ufdd0-\ufdd2]")
MAX_CALL_TURNS = 1_000  # turns of a conversation with tools, whose template is rendered for each answer


def render_tool_pieces(
    source: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]], specials: tuple[str | None, ...],
    add_generation_prompt: bool, tokenizer: Tokenizer,
) -> list[Content | TemplateText]:
    """Renders a template for a conversation with tools.

    Calls and tools are rendered as they are, since templates look into them; only contents have marks. What the assistant
    writes in a turn is found by two more renderings: it begins where the generation prompt before it ends, and a turn with
    calls ends where the conversation up to it does.
    """
    if len(messages) > MAX_CALL_TURNS:
        raise TemplateError(f"a conversation with tools of more than {MAX_CALL_TURNS} turns")
    guard = partial(_guarded, tokenizer)
    fields = [_fields(message, guard) for message in messages]
    descriptions = map_texts(list(tools), guard) or None
    roles = tuple(message.role for message in messages)

    def parts_of(turns: int, prompt: bool) -> list[str | Content]:
        return rendered_parts(source, roles[:turns], specials, prompt, fields[:turns], descriptions)

    parts = parts_of(len(messages), add_generation_prompt)
    written: dict[int, list[Written]] = {}  # by the number of the part
    for turn, message in enumerate(messages):
        if message.role != "assistant" or not turn:
            continue
        before = _after(parts_of(turn, True), turn - 1)
        if len(before) > 1:
            raise TemplateError(f"the chat template writes other turns after turn {turn - 1}")
        prompt, first = "".join(map(str, before)), _number_after(parts, turn - 1)
        if not message.tool_calls:
            text = parts[first]
            if isinstance(text, str) and text.startswith(prompt) and len(prompt) < len(text):
                written.setdefault(first, []).append(Written(len(prompt), len(text), turn))
            continue
        alone = _after(parts_of(turn + 1, False), turn - 1)
        for number, (start, end) in _call_parts(parts[first:], alone, prompt, message, guard, tokenizer).items():
            written.setdefault(first + number, []).append(Written(start, end, turn, is_call=True))
    return [
        part if isinstance(part, Content) else TemplateText(part, tuple(written.get(number, ())))
        for number, part in enumerate(parts)
    ]


def _call_parts(
    parts: Sequence[str | Content], alone: Sequence[str | Content], prompt: str, message: Message,
    guard: Callable[[str], str], tokenizer: Tokenizer,
) -> dict[int, tuple[int, int]]:
    """Returns what the assistant writes in a turn with tool calls: by the number of the part, (start, end).

    Args:
        parts: the rendered conversation after the turn before.
        alone: the same of the conversation that ends with the turn.
        prompt: what the generation prompt writes after the turn before.
        message: the turn.
        guard: see `_guarded`.
        tokenizer: the tokenizer.
    """
    ranges: dict[int, tuple[int, int]] = {}
    for number, (part, other) in enumerate(zip(parts, alone, strict=False)):
        if isinstance(part, str) and isinstance(other, str):
            ranges[number] = (len(prompt) if number == 0 else 0, _common_length(part, other))
        if part != other:
            break
    last = max(ranges, default=0)
    text = parts[last] if ranges else ""
    call = "".join(parts[number][start:end] for number, (start, end) in ranges.items())
    names = [guard(call["function"]["name"]) for call in message.tool_calls]
    if not isinstance(parts[0], str) or not parts[0].startswith(prompt) or not all(name in call for name in names):
        raise TemplateError("the chat template does not write a turn's `tool_calls`; one that does, such as the model's own "
                            "(template: tokenizer), would work")
    start, end = ranges[last]
    # The turn ends with a control token, after which the template may write more, such as a line's end.
    ends = [match.end(match.lastindex) for match in tokenizer.control_pattern.finditer(text[:end])]
    ranges[last] = (start, ends[-1] if ends and ends[-1] > start else end)
    return ranges


def _common_length(first: str, second: str) -> int:
    """Returns how many characters two texts have in common at their beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(first), len(second)))


def _number_after(parts: Sequence[str | Content], turn: int) -> int:
    """Returns the number of the part that follows the content of a turn.

    Raises:
        TemplateError: there is no such part, or no such content.
    """
    for number, part in enumerate(parts[:-1]):
        if isinstance(part, Content) and part.turn == turn:
            return number + 1
    raise TemplateError(f"the chat template writes nothing after turn {turn}")


def _after(parts: Sequence[str | Content], turn: int) -> Sequence[str | Content]:
    """Returns the parts that follow the content of a turn."""
    number = next((number for number, part in enumerate(parts) if isinstance(part, Content) and part.turn == turn), None)
    return parts[number + 1 :] if number is not None else ()


def _guarded(tokenizer: Tokenizer, text: str) -> str:
    """Returns a text of a call or a tool in which no control token is found: each has GUARDED after its first letter."""
    return tokenizer.guard_controls(_MARKS.sub("\ufffd", text), GUARDED)


def _fields(message: Message, guard: Callable[[str], str]) -> dict[str, Any]:
    """Returns the fields of a turn that a template sees, besides its content."""
    fields = {"tool_call_id": message.tool_call_id, "name": message.name}
    fields = {name: guard(text) for name, text in fields.items() if text is not None}
    if message.tool_calls:
        fields["tool_calls"] = map_texts(message.tool_calls, guard)
        if not message.content:  # templates ask whether there is any
            fields["content"] = ""
    return fields
