"""The shapes that records of conversations have in public data sets: a record becomes raw turns, each with a role and a text.

SHAPES is the one table of them: docs/data.md shows it, and a record is read in the first shape whose fields it has.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from data.printable import printable
from data.reasons import (
    BAD_HISTORY,
    NO_SHAPE,
    NOT_TEXT,
    NOT_TURNS,
    OTHER_REPLIES,
    TREE_MESSAGE,
    Drop,
)

_ONLY_TURNS = ("conversations", "conversation", "messages", "items")  # which hold nothing else
TURN_LISTS = (*_ONLY_TURNS, "dialogue", "dialog", "turns", "data", "chat")
ROLE_FIELDS, TEXT_FIELDS = ("from", "role", "speaker"), ("value", "content", "text")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# Fields of a question and its answer, in a record or in an entry of a list of exchanges; the first pair that is there is read.
PAIRS = (
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("query", "answer"),
    ("problem", "solution"),
    ("inputs", "targets"),
    ("prompt", "response"),
    ("prompt", "output"),
    ("input", "output"),
    ("human", "assistant"),
    ("user", "assistant"),
)
# What is joined to a question with an empty line between.
_JOINED = {"instruction": ("input", "context"), "question": ("context",)}
SHOWN_FIELDS = 12  # names of fields in a message
_SPEAKERS = re.compile(r"(?:\A|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):\s*")
_END_OF_TEXT = "<|endoftext|>"
_CALL = re.compile(  # the arguments are JSON, between single quotes or none
    r"""<functioncall>\s*\{\s*"name":\s*"(?P<name>[^"]+)",\s*"arguments":\s*(?P<quote>'?)(?P<arguments>.*?)(?P=quote)\s*\}\s*\Z""",
    re.DOTALL,
)
CONTEXT = object()  # the key of a turn that is not trained on, since it is part of a prompt


class RawTurns(NamedTuple):
    """The turns of a record, as they were written."""

    turns: list[Any]
    """Each a dictionary with one of ROLE_FIELDS and of TEXT_FIELDS, if the record is well-formed."""
    fields: set[str]
    """Fields of the record that they were read from."""
    changes: tuple[str, ...] = ()
    """What was changed, as the report counts it."""
    system: str | None = None
    """A text that replaces the record's `system`."""
    tools: list[Any] | None = None
    """Descriptions of tools that replace the record's `tools`."""


class Shape(NamedTuple):
    """A shape of records."""

    name: str
    """Where it comes from."""
    fields: str
    """Its fields, in the words of docs/data.md."""
    becomes: str
    """What is made of them, in the words of docs/data.md."""
    read: Callable[[dict], RawTurns | None]
    """Returns the turns of a record, or None if it does not have this shape."""


def has_value(value: object) -> bool:
    """Returns whether a field says anything: rows of a table have all columns, with None, or an empty text or list, in some."""
    return value is not None and value != "" and value != [] and value != {}


def first_present(fields: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """Returns the first of these names whose field is not None."""
    for name in names:  # a generator takes twice the time, and this runs for every turn
        if fields.get(name) is not None:
            return name
    return None


def read_turns(record: dict) -> RawTurns:
    """Returns the turns of a record in any of SHAPES.

    Raises:
        Drop: it has none of the shapes, which names its fields; or what its fields hold is broken.
    """
    for shape in SHAPES:
        if (raw := shape.read(record)) is not None:
            return raw
    if broken := next((name for name in _ONLY_TURNS if has_value(record.get(name))), None):
        raise Drop(f"{NOT_TURNS}`{broken}`")
    raise Drop(NO_SHAPE + shown_fields(record))


def is_sharegpt(raw: RawTurns) -> bool:
    """Returns whether turns have the fields that scrapes of web chats have, which ShareGPT's made common."""
    return isinstance(raw.turns[0], dict) and {"from", "value"} <= raw.turns[0].keys()


def shown_fields(record: Mapping[Any, Any]) -> str:
    """Returns the names of a record's fields for a message, such as `the fields a, b`."""
    names = [printable(str(name))[:40] for name in record]
    more = ", ..." if len(names) > SHOWN_FIELDS else ""
    return f"the fields {', '.join(names[:SHOWN_FIELDS])}{more}" if names else "no fields"


def _turn_list(record: dict) -> RawTurns | None:
    """A list of turns or of exchanges, perhaps as a JSON text or as columns."""
    lists = {
        name: turns for name in TURN_LISTS if (turns := _as_list(record.get(name))) is not None
    }
    name = next(
        (
            name
            for name, turns in lists.items()
            if turns and (name in _ONLY_TURNS or _is_turn(turns[0]))
        ),
        None,
    )
    if name is None:  # a list without turns, unless the record has another shape
        name = next((name for name in lists if name in _ONLY_TURNS), None)
        if name is None or _pair_of(record):
            return None
    entries = lists[name]
    if entries and all(isinstance(entry, str) for entry in entries):
        return RawTurns(_alternating(entries), {name})
    return RawTurns([turn for entry in entries for turn in _entry_turns(entry)], {name})


def _as_list(value: object) -> list | None:
    """Returns the list that a field holds, as it is, as a JSON text or as a dictionary of columns; None if it holds none."""
    if isinstance(value, str):
        value = _parsed(value) if _is_json(value) else None
    if isinstance(value, dict):
        value = _from_columns(value)
    return value if isinstance(value, list) else None


def _is_turn(entry: object) -> bool:
    return isinstance(entry, str) or (
        isinstance(entry, dict)
        and (first_present(entry, ROLE_FIELDS) is not None or len(_entry_turns(entry)) == 2)
    )


def _alternating(texts: list) -> list[Any]:
    """Returns turns of user and assistant, one after the other."""
    return [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(texts)
    ]


def _is_json(text: str) -> bool:
    return text.lstrip()[:1] in ("[", "{")


def _parsed(text: str) -> object:
    """Returns the value of a JSON text, or None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _from_columns(columns: dict) -> object:
    """Returns the turns of a dictionary of lists, such as {"from": [...], "value": [...]}; None if it is something else."""
    if first_present(columns, TEXT_FIELDS) is None or not all(
        isinstance(column, list) for column in columns.values()
    ):
        return None
    if len({len(column) for column in columns.values()}) != 1:
        return None
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _entry_turns(entry: object) -> list[Any]:
    """Returns the entry of a list of turns; the two turns of one that is a whole exchange, such as {"input", "output"}."""
    if not isinstance(entry, dict) or first_present(entry, ROLE_FIELDS) is not None:
        return [entry]
    pair = next(
        (pair for pair in PAIRS if all(isinstance(entry.get(name), str) for name in pair)), None
    )
    if pair is None:
        return [entry]
    others = {name: value for name, value in entry.items() if name not in pair}
    return [
        {"role": "user", "content": entry[pair[0]]},
        {**others, "role": "assistant", "content": entry[pair[1]]},
    ]


def _pair(record: dict) -> RawTurns | None:
    """One exchange: a question, perhaps with what it is about, and its answer; perhaps with the exchanges before it."""
    pair = _pair_of(record)
    if pair is None:
        return None
    fields = set(pair)
    sides = [record[name] for name in pair]
    joined = [
        name
        for name in _JOINED.get(pair[0], ())
        if name not in pair and isinstance(record.get(name), str)
    ]
    if isinstance(sides[0], str) and joined:
        sides[0] = "\n\n".join(filter(None, [sides[0], *(record[name] for name in joined)]))
        fields.update(joined)
    question, answer = (
        _side(side, role) for side, role in zip(sides, ("user", "assistant"), strict=True)
    )
    if question is None or answer is None:
        raise Drop(f"{NOT_TEXT}`{pair[0]}` and `{pair[1]}`")
    reasoning = [name for name in REASONING_FIELDS if isinstance(record.get(name), str)]
    if reasoning and isinstance(sides[1], str):
        answer[-1].update({name: record[name] for name in reasoning})
        fields.update(reasoning)
    history = record.get("history")
    if history is not None:
        fields.add("history")
    return RawTurns(_history(history) + question + answer, fields)


def _pair_of(record: dict) -> tuple[str, str] | None:
    """Returns the fields of a record's question and answer; None if it has none."""
    return next(
        (
            pair
            for pair in PAIRS
            if record.get(pair[0]) is not None and record.get(pair[1]) is not None
        ),
        None,
    )


def _side(value: object, role: str) -> list[dict] | None:
    """Returns the turns of one side of an exchange, a text or a list of turns; those of a question are not trained on."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        return None
    return [{**turn, CONTEXT: True} for turn in value] if role == "user" else value


def _history(history: object) -> list[dict]:
    history = history or []
    if not (
        isinstance(history, list)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in history)
    ):
        raise Drop(BAD_HISTORY)
    return _alternating([text for pair in history for text in pair])


def _tree(record: dict) -> RawTurns | None:
    """A tree of messages, of which the path of the best ranked replies is read."""
    root = record.get("prompt")
    if not isinstance(root, dict) or not isinstance(root.get("replies"), list):
        if {"message_id", "parent_id", "role", "text"} <= record.keys():
            raise Drop(TREE_MESSAGE)
        return None
    turns, changes, node = [], (), root
    while isinstance(node, dict):
        turns.append({name: value for name, value in node.items() if name != "replies"})
        replies = node.get("replies") if isinstance(node.get("replies"), list) else []
        changes = changes or ((OTHER_REPLIES,) if len(replies) > 1 else ())
        node = min(replies, key=_rank, default=None)
    return RawTurns(turns, {"prompt"}, changes)


def _rank(reply: object) -> float:
    """Returns the place of a reply among others, 0 for the best; those without one come last, in their order."""
    rank = reply.get("rank") if isinstance(reply, dict) else None
    return float("inf") if not isinstance(rank, int | float) or rank != rank else rank


def _glaive(record: dict) -> RawTurns | None:
    """A dialogue in one text with the speakers' names, and functions described in the system text."""
    chat = record.get("chat")
    if not isinstance(chat, str):
        return None
    before, *pieces = _SPEAKERS.split(chat)
    if not pieces or before.strip():
        raise Drop(f"{NOT_TURNS}`chat`")
    roles = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
    turns = [
        _glaive_turn(roles[speaker], text)
        for speaker, text in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    system = record.get("system")
    if not isinstance(system, str):
        return RawTurns(turns, {"chat"})
    text, tools = _described_functions(re.sub(r"\A\s*SYSTEM:\s*", "", system))
    return RawTurns(turns, {"chat"}, system=text, tools=tools or None)


def _glaive_turn(role: str, text: str) -> dict:
    text = text.strip().removesuffix(_END_OF_TEXT).strip()
    call = _CALL.search(text) if role == "assistant" else None
    arguments = _parsed(call["arguments"].replace("\\'", "'")) if call else None
    if not call or not isinstance(arguments, dict):
        return {"role": role, "content": text}
    calls = [{"function": {"name": call["name"], "arguments": arguments}}]
    return {"role": role, "content": text[: call.start()].strip(), "tool_calls": calls}


def _described_functions(system: str) -> tuple[str, list[dict]]:
    """Returns a system text without the JSON objects at its end, and these objects; the whole text if they are none."""
    start = system.find("{")
    decoder, tools, offset = json.JSONDecoder(), [], start
    while 0 <= offset < len(system):
        try:
            value, offset = decoder.raw_decode(system, offset)
        except (ValueError, RecursionError):
            return system, []
        if not isinstance(value, dict) or "name" not in value:
            return system, []
        tools.append(value)
        offset += len(system[offset:]) - len(system[offset:].lstrip())
    return (system[:start].strip(), tools) if tools else (system, [])


SHAPES = (
    Shape(
        "ShareGPT, OpenAI",
        "a list in one of TURNS",
        "a turn for each entry: ROLES with TEXTS",
        _turn_list,
    ),
    Shape(
        "Glaive",
        "`chat`: a text with `USER:`, `ASSISTANT:`",
        "turns; JSON in `system` becomes tools, `<functioncall>` a call",
        _glaive,
    ),
    Shape(
        "OpenAssistant",
        "`prompt` with `replies`",
        "the path of the best ranked replies; others are counted",
        _tree,
    ),
    Shape(
        "an exchange", "one of PAIRS", "a question and its answer, texts or lists of turns", _pair
    ),
)


# What a source's `fields` may map a record's fields to.
ROLE_TARGETS = ("user", "assistant")
TURN_TARGETS = (
    "role",
    "content",
    "reasoning_content",
    "tool_calls",
    "tool_call_id",
    "name",
    "train",
)
RECORD_TARGETS = (
    "messages",
    "system",
    "prompt",
    "completion",
    "history",
    "tools",
    "id",
    "loss_mask",
)


class FieldMap:
    """A source's own names of fields: `{question: user, answer: assistant}`, `{dialog: messages, speaker: role}`."""

    def __init__(self, fields: Mapping[str, str]):
        self._roles = {name: target for name, target in fields.items() if target in ROLE_TARGETS}
        self._turns = {name: target for name, target in fields.items() if target in TURN_TARGETS}
        self._record = {
            name: target
            for name, target in fields.items()
            if target not in ROLE_TARGETS + TURN_TARGETS
        }

    def record(self, record: dict) -> dict:
        """Returns a record under the names that are read here, with `messages` for fields that are mapped to roles.

        Raises:
            Drop: a field that is mapped to a turn holds no text.
        """
        record = renamed(record, self._record)
        if not self._roles:
            return record
        record = dict(record)
        turns: list[dict] = []
        for name, role in self._roles.items():
            text = record.pop(name, None)
            if not isinstance(text, str):
                raise Drop(f"{NOT_TEXT}`{printable(name)}`")
            turns.append({"role": role, "content": text})
        answers = [turn for turn in turns if turn["role"] == "assistant"]
        for name, target in self._turns.items() if answers else ():
            if name in record:
                answers[-1][target] = record.pop(name)
        if has_value(record.get("messages")):
            record["messages, for which others are named"] = record["messages"]
        return {**record, "messages": turns}

    def turn(self, turn: dict) -> dict:
        """Returns a turn under the names that are read here."""
        return renamed(turn, self._turns) if self._turns else turn


def renamed(fields: dict, names: Mapping[str, str]) -> dict:
    """Returns fields of which some have other names; what had such a name before is kept as one that nothing reads."""
    moved = {
        names[name]: value for name, value in fields.items() if name in names and value is not None
    }
    if not moved:
        return fields
    others = {name: value for name, value in fields.items() if name not in names}
    kept = {
        f"{name}, for which another is named" if name in moved else name: value
        for name, value in others.items()
    }
    return {**kept, **moved}


def unread_of(fields: Mapping[Any, Any], read: set[str] | frozenset[str], where: str) -> set[str]:
    """Returns, for the report, the fields that have a value and are not read, such as "record field `source`"."""
    return {
        f"{where} field `{printable(str(name))[:80]}`"
        for name, value in fields.items()
        if name not in read and has_value(value)
    }
