"""Lists of turns in a field of a record, as JSON, Python's text, columns or a dialogue."""

import ast
import json
import re
from typing import Any

from data.fields import ROLE_FIELDS, TEXT_FIELDS, first_present, has_value
from data.reasons import LOST_COMMAS, Drop
from data.roles import role_of

# A dialogue as text, as in Anthropic's HH-RLHF.
_DIALOGUE = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_DIALOGUE_ROLES = {"Human": "user", "Assistant": "assistant"}
_BEGINS_TURNS = re.compile(r"\s*\[?\s*\{")
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
    """Returns the turns of a text that is a list of turns, or one, in JSON or as Python prints it;
    None for anything else, such as an answer in JSON.

    Raises:
      Drop: it was one.
    """
    if not isinstance(value, str) or not _BEGINS_TURNS.match(value):
        return None
    found = parsed(value)
    if found is None:
        check_commas(value)
    turns = [found] if _is_turn(found) else as_list(found)
    return turns if turns and all(map(_is_turn, turns)) else None


def check_commas(value: object) -> None:
    """Raises Drop for the text of turns that lost the commas between them."""
    if isinstance(value, str) and _WITHOUT_COMMAS.fullmatch(value):
        raise Drop(LOST_COMMAS)


def _is_turn(entry: object) -> bool:
    """Returns whether this is a turn with a known role, and a text or calls."""
    return (
        isinstance(entry, dict)
        and role_in(entry) is not None
        and any(
            has_value(entry.get(name)) for name in (*TEXT_FIELDS, "tool_calls", "function_call")
        )
    )


def role_in(turn: Any) -> str | None:
    """Returns the role of a raw turn, or None if it names no known one."""
    name = first_present(turn, ROLE_FIELDS) if isinstance(turn, dict) else None
    role = turn[name] if name else None
    return role_of(role) if isinstance(role, str) else None


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
