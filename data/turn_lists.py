"""Lists of turns in a field of a record, as JSON, Python's text, columns or a dialogue."""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from data.fields import (
    IN_LOSS,
    NOT_IN_LOSS,
    REASONING_FIELDS,
    ROLE_FIELDS,
    TEXT_FIELDS,
    first_present,
    has_value,
)
from data.reasons import LOST_COMMAS, Drop
from data.roles import role_of

# A dialogue as text, as in Anthropic's HH-RLHF.
_DIALOGUE = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_DIALOGUE_ROLES = {"Human": "user", "Assistant": "assistant"}
_BEGINS_TURNS = re.compile(r"\s*\[\s*\{")
_WRITTEN_TEXTS = ("value", "content", "text")
_CALLS = ("tool_calls", "function_call")
# Fields of turns in a text. JSON with others, such as `sender` or `id`, may be an answer in JSON.
_WRITTEN_FIELDS = frozenset(
    (
        *("from", "role", "name", "tool_call_id"),
        *_WRITTEN_TEXTS,
        *_CALLS,
        *REASONING_FIELDS,
        *IN_LOSS,
        *NOT_IN_LOSS,
    )
)
# What NumPy makes of a list of turns.
_WITHOUT_COMMAS = re.compile(
    r"""\s*\[\{(?=.*['"](?:role|from)['"]:).*\}\s+\{.*\}\]\s*""", re.DOTALL
)
_LONGEST_PRINTED = 1 << 20  # characters that Python's parser takes without running out of stack


def as_list(value: object) -> list | None:
    """Returns the list in a field, given as JSON, Python's text or columns; None if there is
    none."""
    if isinstance(value, str):
        value = parsed(value) if _is_json(value) else None
    if isinstance(value, dict):
        value = _from_columns(value)
    return _with_json_turns(value) if isinstance(value, list) else None


def _with_json_turns(entries: list) -> list:
    """Returns a list, or the turns in it if all its entries are the JSON texts of turns."""
    turns = []
    for entry in entries:
        turn = parsed(entry) if isinstance(entry, str) and _is_json(entry) else None
        if not isinstance(turn, dict) or first_present(turn, ROLE_FIELDS) is None:
            return entries
        turns.append(turn)
    return turns


def alternating(texts: list) -> list[Any]:
    """Returns alternating turns of user and assistant."""
    return [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(texts)
    ]


def written_turns(value: object) -> list[Any] | None:
    """Returns the turns of a text that is a list of turns, in JSON or as Python prints it; None for
    anything else.

    A list of turns may still be an answer in JSON: see `written_prompt` and `written_answer`.

    Raises:
      Drop: the commas between its turns are lost.
    """
    if not isinstance(value, str) or not _BEGINS_TURNS.match(value):
        return None
    found = parsed(value)
    if found is None:
        check_commas(value)
    if not isinstance(found, list) or not found:
        return None
    return found if all(map(_is_written_turn, found)) else None


def written_prompt(value: object) -> list[Any] | None:
    """Returns the turns of a prompt's text, see `written_turns`, if they begin as a prompt does."""
    turns = written_turns(value)
    return turns if turns and role_in(turns[0]) in ("system", "user") else None


def written_answer(value: object, prompt: Sequence[Any]) -> list[Any] | None:
    """Returns the turns of an answer's text, see `written_turns`, if they begin as an answer does,
    or are a whole conversation with the prompt; any other list of turns is the answer itself, in
    JSON."""
    turns = written_turns(value)
    follows_call = bool(prompt) and role_in(prompt[-1]) == "assistant"
    first = ("assistant", "thought", "tool") if follows_call else ("assistant", "thought")
    if not turns or role_in(turns[0]) in first:
        return turns
    return turns if repeated_turns(prompt, turns) else None


def repeated_turns(prompt: Sequence[Any], turns: Sequence[Any]) -> int:
    """Returns how many turns a conversation has up to the last one of the prompt given next to it;
    0 if it lacks some of the prompt."""
    texts, end = [_text_in(turn) for turn in turns], 0
    for asked in prompt:
        if _text_in(asked) not in texts[end:]:
            return 0
        end = texts.index(_text_in(asked), end) + 1
    return end


def check_commas(value: object) -> None:
    """Raises Drop for the text of turns that lost the commas between them."""
    if isinstance(value, str) and _WITHOUT_COMMAS.fullmatch(value):
        raise Drop(LOST_COMMAS)


def _is_written_turn(entry: object) -> bool:
    """Returns whether this is a turn with a known role, a text or calls, and nothing that turns do
    not have."""
    return (
        isinstance(entry, dict)
        and role_in(entry) is not None
        and any(has_value(entry.get(name)) for name in (*_WRITTEN_TEXTS, *_CALLS))
        and all(name in _WRITTEN_FIELDS or value is None for name, value in entry.items())
    )


def role_in(turn: Any) -> str | None:
    """Returns the role of a raw turn, or None if it names no known one."""
    name = first_present(turn, ROLE_FIELDS) if isinstance(turn, dict) else None
    role = turn[name] if name else None
    return role_of(role) if isinstance(role, str) else None


def _text_in(turn: Any) -> Any:
    """Returns the text, or parts, of a raw turn, or None if it has none."""
    name = first_present(turn, TEXT_FIELDS) if isinstance(turn, dict) else None
    text = turn[name] if name else None
    return text.strip() if isinstance(text, str) else text


def dialogue_prompt(value: object) -> list[dict[str, str]]:
    """Returns the turns of a text that begins with `Human:`, without a last `Assistant:` that
    waits for the answer; empty for other texts."""
    turns = dialogue_turns(value)
    if not turns or turns[0]["role"] != "user":
        return []
    return turns if turns[-1]["content"] or turns[-1]["role"] == "user" else turns[:-1]


def dialogue_turns(value: object) -> list[dict[str, str]]:
    """Returns the turns of a text of `Human:` and `Assistant:`; empty for other texts."""
    if not isinstance(value, str) or not _DIALOGUE.match(value.strip()):
        return []
    _, *parts = _DIALOGUE.split(value.strip())
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": _DIALOGUE_ROLES[speaker], "content": text.strip()} for speaker, text in pairs]


def _is_json(text: str) -> bool:
    return text.lstrip()[:1] in ("[", "{")


def parsed(text: str) -> object:
    """Returns the value of a text in JSON, or as Python prints it (as in CSV), or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text) if len(text) <= _LONGEST_PRINTED else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _from_columns(columns: dict) -> object:
    """Returns the turns of columns such as {"from": [...], "value": [...]}, or None."""
    if first_present(columns, TEXT_FIELDS) is None or not all(
        isinstance(column, list) for column in columns.values()
    ):
        return None
    if len({len(column) for column in columns.values()}) != 1:
        return None
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
