"""Shapes of conversations in public data sets; a record becomes raw turns with roles and texts.

SHAPES is their only table: docs/data.md shows it, and a record is read as the first shape whose
fields it has.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from data import glaive, reasons, trees
from data.fields import (
    CHOSEN,
    LABEL_FIELDS,
    REASONING_FIELDS,
    REJECTED,
    ROLE_FIELDS,
    TEXT_FIELDS,
    TOKEN_FIELDS,
    first_present,
    has_value,
    only_text,
    reasoning_of,
    shown_fields,
    with_context,
)
from data.printable import printable
from data.reasons import Drop
from data.table_values import without_unused
from data.turn_lists import (
    alternating,
    as_list,
    check_commas,
    dialogue_prompt,
    dialogue_turns,
    repeated_turns,
    role_in,
    written_answer,
    written_prompt,
)

_ONLY_TURNS = ("conversations", "conversation", "messages")  # whose dictionaries are always turns
_MOSTLY_TURNS = (*_ONLY_TURNS, "items")  # which are turns if the record has nothing else
TURN_LISTS = (*_MOSTLY_TURNS, "dialogue", "dialog", "turns", "data", "chat", "thread", "contents")
_ANY_LISTS = ("data", "items", "contents")  # TURN_LISTS whose names say nothing of a conversation
SYSTEM_FIELDS = (
    "system",
    "system_prompt",
    "system_message",
    "system_instruction",
    "systemInstruction",
)
TOOL_FIELDS = ("tools", "functions")
# Fields of a question and its answer, in a record or an entry of a list of exchanges; the first
# pair present is read.
PAIRS = (
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "solution"),  # before `answer`, which is then a solution's last line
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("query", "answer"),
    ("problem", "solution"),
    ("inputs", "targets"),
    ("prompt", "response"),
    ("prompt", "output"),
    ("prompt", "answer"),
    ("instruction", "answer"),
    ("problem", "answer"),
    ("input", "output"),
    ("input", "target"),
    ("message", "response"),
    ("human", "assistant"),
    ("user", "assistant"),
    ("human", "bot"),
    ("user", "bot"),
    ("context", "response"),
    ("question", "answers"),  # SQuAD's
    ("input", "answers"),  # LongBench's
)
# Fields appended to an instruction after an empty line.
_APPENDED = {"instruction": ("input", "context")}
# What a question may be about; comes before it, if a record has only one of these.
CONTEXTS = ("context", "document", "passage", "article")
_QUESTIONS = frozenset(question for question, _ in PAIRS if question not in CONTEXTS)
_WITHOUT_SPACE = re.compile("[!-~]+")  # a file's name, a URL or an id
_REFERENCES = ("answer", "answers")  # which may be several
# As in QuAIL and ReClor, whose answers are options.
_RIGHT_OPTION = re.compile(r"label|.*correct.*|gold.*|answer_?(?:key|id|idx|index)", re.IGNORECASE)
KNOWN = frozenset(  # fields of a record that are read
    (
        *TURN_LISTS,
        *SYSTEM_FIELDS,
        *TOOL_FIELDS,
        *REASONING_FIELDS,
        *LABEL_FIELDS,
        *(name for pair in PAIRS for name in pair),
        *("history", "loss_mask", "chosen", "answers"),
    )
)
# Fields of one record, with any list of turns.
_OF_RECORDS = (
    *SYSTEM_FIELDS,
    *TOOL_FIELDS,
    *LABEL_FIELDS,
    *("id", "history", "loss_mask", "chat_template_kwargs", "chosen"),
)
# Fields of a table as pandas' to_json(orient="split") writes it.
_SPLIT_FORM = frozenset(("index", "columns", "data", "name", "dtype", "dtypes"))
_READS = " (`format: {}` reads these)"
CONTEXT = object()  # the key of a turn that is part of a prompt, so not trained on


class RawTurns(NamedTuple):
    """The turns of a record, as they were written."""

    turns: list[Any]
    """Dictionaries with one of ROLE_FIELDS and one of TEXT_FIELDS, if the record is well-formed."""
    fields: set[str]
    """Fields of the record that they were read from."""
    changes: tuple[str, ...] = ()
    """What was changed, as the report counts it."""
    system: str | None = None
    """A text that replaces the record's system text."""
    tools: list[Any] | None = None
    """Descriptions of tools that replace the record's `tools`."""
    id: str | None = None
    """The record's id, if not in its `id`."""


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


def read_turns(record: dict) -> RawTurns:
    """Returns the turns of a record in any of SHAPES.

    Raises:
      Drop: it has none of the shapes, which names its fields; or what its fields hold is broken.
    """
    if _is_split_table(record):
        raise Drop(reasons.SPLIT_TABLE)
    for shape in SHAPES:
        if (raw := shape.read(record)) is not None:
            return _without_unused_keys(raw, record)
    if broken := next((name for name in _MOSTLY_TURNS if has_value(record.get(name))), None):
        check_commas(record[broken])
        raise Drop(f"{reasons.NOT_TURNS}`{broken}`")
    raise Drop(reasons.NO_SHAPE + shown_fields(record) + _other_format(record))


def _other_format(record: dict) -> str:
    """Returns, for a message, the format that reads a record without a conversation, if one
    does."""
    fields = {str(name).lower(): value for name, value in record.items()}
    if hint := preference_hint(record):
        return hint
    if isinstance(fields.get("text"), str):
        name = "text"
    elif any(isinstance(fields.get(name), list) for name in TOKEN_FIELDS):
        name = "tokens"
    else:
        return ""
    return _READS.format(name)


def preference_hint(record: dict) -> str:
    """Returns, for a message, that the format for preferences reads a record, if it does."""
    fields = {str(name).lower(): value for name, value in record.items()}
    is_pair = first_present(fields, CHOSEN) and first_present(fields, REJECTED)
    return _READS.format("preference") if is_pair else ""


def _is_split_table(record: dict) -> bool:
    """Returns whether a record is a whole table, in _SPLIT_FORM."""
    columns, rows = record.get("columns"), record.get("data")
    return (
        record.keys() <= _SPLIT_FORM
        and isinstance(columns, list)
        and isinstance(rows, list)
        and bool(rows)
        and all(isinstance(row, list) and len(row) == len(columns) for row in rows)
    )


def _without_unused_keys(raw: RawTurns, record: dict) -> RawTurns:
    """Leaves out of a table's `tools` the keys that only other rows' tools have."""
    name = first_present(record, TOOL_FIELDS)
    if name is None or raw.tools is not None:
        return raw
    tools, left_out = without_unused(record[name])
    if not left_out:
        return raw
    return raw._replace(
        tools=tools, fields=raw.fields | {name}, changes=(*raw.changes, reasons.TABLE_NULLS)
    )


def is_sharegpt(raw: RawTurns) -> bool:
    """Returns whether turns have the fields that ShareGPT's made common for scraped web chats."""
    return isinstance(raw.turns[0], dict) and {"from", "value"} <= raw.turns[0].keys()


def _turn_list(record: dict) -> RawTurns | None:
    """A list of turns with roles or of exchanges, perhaps as a JSON text or as columns."""
    lists = _lists(record)
    name = next((name for name, entries in lists.items() if any(map(_has_turns, entries))), None)
    if name is None:  # a source's `fields` may rename the turns', and drops name broken ones
        name = next((name for name in _ONLY_TURNS if _has_dictionary(lists.get(name))), None)
    if name is None:
        return None
    return RawTurns([turn for entry in lists[name] for turn in _entry_turns(entry)], {name})


def records_of(record: dict) -> str | None:
    """Returns the field of a file's object whose list may hold records: the only one of TURN_LISTS,
    without turns, and with nothing else of a record beside it. None if there is none.

    Exchanges in a field that names a conversation form one, unless each has what records have, such
    as an `id`. In any other record, a list of exchanges is one conversation.
    """
    names = {str(name).lower(): name for name in record}
    lists = [names[name] for name in TURN_LISTS if isinstance(record.get(names.get(name)), list)]
    beside = any(has_value(record.get(names.get(name))) for name in _OF_RECORDS)
    if len(lists) != 1 or beside or _pair_of(record) is not None:
        return None
    entries = record[lists[0]]
    if not all(isinstance(entry, dict) and role_in(entry) is None for entry in entries):
        return None
    are_records = (
        lists[0].lower() in _ANY_LISTS
        or not any(map(_is_exchange, entries))
        or all(any(has_value(entry.get(name)) for name in _OF_RECORDS) for entry in entries)
    )
    return lists[0] if are_records else None


def _text_list(record: dict) -> RawTurns | None:
    """A list of texts, in alternation or in pairs, which next to other fields may be anything."""
    lists = _lists(record)
    for name, entries in lists.items():
        in_pairs = all(map(_is_text_pair, entries))
        texts = [text for pair in entries for text in pair] if in_pairs else entries
        if texts and all(isinstance(text, str) for text in texts):
            if name == "turns" and not in_pairs and has_value(record.get("question_id")):
                raise Drop(reasons.QUESTIONS)
            return RawTurns(alternating(texts), {name})
    broken = next((name for name in _MOSTLY_TURNS if name in lists), None)  # or empty
    return None if broken is None else RawTurns(lists[broken], {broken})


def _lists(record: dict) -> dict[str, list]:
    """Returns the lists in TURN_LISTS that a record has."""
    lists = {name: as_list(record.get(name)) for name in TURN_LISTS}
    return {name: entries for name, entries in lists.items() if entries is not None}


def _has_dictionary(entries: list | None) -> bool:
    return any(isinstance(entry, dict) for entry in entries or ())


def _has_turns(entry: object) -> bool:
    """Returns whether an entry of a list has a role and a text, or a question and its answer."""
    if not isinstance(entry, dict) or trees.is_row(entry):
        return False
    has_role = first_present(entry, ROLE_FIELDS) is not None
    return _is_exchange(entry) or (has_role and first_present(entry, TEXT_FIELDS) is not None)


def _is_exchange(entry: object) -> bool:
    """Returns whether an entry of a list is a question and its answer."""
    return len(_entry_turns(entry)) == 2


def _is_text_pair(entry: object) -> bool:
    return isinstance(entry, list) and [type(text) for text in entry] == [str, str]


def _entry_turns(entry: object) -> list[Any]:
    """Returns the turn in an entry of a list, or both turns of an exchange."""
    if not isinstance(entry, dict) or (
        first_present(entry, ROLE_FIELDS) is not None
        and first_present(entry, TEXT_FIELDS) is not None
    ):
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
    """One exchange: a question, perhaps with context and earlier exchanges, and its answer."""
    pair = _pair_of(record)
    return None if pair is None else _exchange(record, pair)


def _exchange(record: dict, pair: tuple[str, str]) -> RawTurns:
    changes: list[str] = []
    asked, fields = with_joined_fields(record, pair[0], changes)
    answered = _first_answer(record, pair[1], changes)
    fields |= {pair[1], "history"}
    question = _question(asked, changes)
    if question and pair == ("prompt", "completion"):  # TRL's, whose loss begins after the prompt
        question = as_context(question)
    answer = None if question is None else _answer(answered, question, changes)
    if question is None or answer is None:
        name = pair[0] if question is None else pair[1]
        raise Drop(f"{reasons.NOT_TEXT}`{name}` ({type(record[name]).__name__})")
    if answer == _one_turn("assistant", answered):
        reasoning = reasoning_of(record)
        answer[-1].update(reasoning)
        fields.update(reasoning)
    earlier = earlier_turns(record)
    if answer and role_in(answer[0]) in ("system", "user"):
        end = repeated_turns(earlier + question, answer)
        if end:  # a whole conversation
            earlier, question, answer = [], as_context(answer[:end]), answer[end:]
    return RawTurns(earlier + question + answer, fields, tuple(changes))


def with_joined_fields(
    record: Mapping[str, Any], name: str, changes: list[str]
) -> tuple[Any, set[str]]:
    """Returns a question with the texts of the fields that belong to it, and the fields read.

    Args:
      name: the field of the question.
      changes: receives what was changed.
    """
    question = only_text(record[name])
    if not isinstance(question, str) or name not in _QUESTIONS:
        return question, {name}
    appended = [other for other in _APPENDED.get(name, ()) if isinstance(record.get(other), str)]
    question = "\n\n".join(filter(None, (question, *(record[other] for other in appended))))
    others = [other for other in CONTEXTS if other not in _APPENDED.get(name, ())]
    texts = {other: only_text(record.get(other)) for other in others}
    contexts = [
        other
        for other, text in texts.items()
        if isinstance(text, str)
        and text
        and (other == "context" or not _WITHOUT_SPACE.fullmatch(text))
    ]
    if len(contexts) == 1:
        alone, question = question, with_context(question, texts[contexts[0]])
        changes += [reasons.CONTEXT_FIRST.format(contexts[0])] if question != alone else []
        appended += contexts
    return question, {name, *appended}


def _first_answer(record: Mapping[str, Any], name: str, changes: list[str]) -> Any:
    """Returns an answer; the first one if its field has several texts to compare answers with."""
    texts = _reference_texts(record[name]) if name in _REFERENCES else []
    if len(set(texts)) > 1:
        for other, value in record.items():
            is_given = has_value(value) and not isinstance(value, bool)
            if is_given and _RIGHT_OPTION.fullmatch(str(other)):
                raise Drop(f"{reasons.OPTIONS}`{printable(str(other))[:80]}`")
        changes.append(reasons.OTHER_ANSWERS)
    return texts[0] if texts else only_text(record[name])


def _reference_texts(value: object) -> list[str]:
    """Returns reference answers: a text, those in a list, or SQuAD's; [] for anything else."""
    if isinstance(value, str):
        return [value]
    texts = value.get("text") if isinstance(value, dict) else value
    return texts if isinstance(texts, list) and all(isinstance(each, str) for each in texts) else []


def _pair_of(record: dict) -> tuple[str, str] | None:
    """Returns the fields of a record's question and answer; None if it has none."""
    return next(
        (
            pair
            for pair in PAIRS
            if record.get(pair[0]) is not None
            and record.get(pair[1]) is not None
            and (pair[1] != "answers" or _reference_texts(record["answers"]))
        ),
        None,
    )


def _question(value: object, changes: list[str]) -> list[dict] | None:
    """Returns the turns of a question, whose answers are not trained on."""
    if turns := written_prompt(value):
        changes.append(reasons.TURNS_IN_TEXT)
    elif turns := dialogue_prompt(value):
        changes.append(reasons.DIALOGUE_IN_TEXT)
    elif isinstance(value, str):
        return _one_turn("user", value)
    else:
        turns = _side(value)
    return None if turns is None else as_context(turns)


def _answer(value: object, question: list[dict], changes: list[str]) -> list[dict] | None:
    """Returns the turns of an answer, which may be a whole conversation that repeats its
    question."""
    if turns := written_answer(value, question):
        changes.append(reasons.TURNS_IN_TEXT)
        return turns
    return _one_turn("assistant", value) if isinstance(value, str) else _side(value)


def _side(value: object) -> list[dict] | None:
    """Returns one side of an exchange that is a turn or a list of turns; None for another value."""
    turns: list[Any] | None = [value] if role_in(value) else as_list(value)
    return None if turns is None or not all(isinstance(turn, dict) for turn in turns) else turns


def as_context(turns: Sequence[Any]) -> list[Any]:
    """Returns the turns of a prompt, marked as such."""
    return [{**turn, CONTEXT: True} if isinstance(turn, dict) else turn for turn in turns]


def _one_turn(role: str, text: str) -> list[dict]:
    return [{"role": role, "content": text}]


def _preferred(record: dict) -> RawTurns | None:
    """The better one of two answers, or a whole conversation that ends with it."""
    chosen, prompt = record.get("chosen"), record.get("prompt")
    has_prompt = prompt is not None and chosen is not None
    if has_prompt and isinstance(chosen, str):
        turns = dialogue_turns(chosen) or written_answer(chosen, _question(prompt, []) or [])
    else:
        turns = dialogue_turns(chosen) or as_list(chosen)
    if turns and isinstance(turns[0], dict) and len(turns) > 1:
        follows_prompt = has_prompt and role_in(turns[0]) in ("assistant", "thought", "tool")
        if not follows_prompt:
            return RawTurns(turns, {"chosen"})
    if not has_prompt:
        return None
    return _exchange(record, ("prompt", "chosen"))


def _asked_calls(record: dict) -> RawTurns | None:
    """A question, and the calls that answer it, as a list or its JSON text."""
    calls = as_list(record.get("answers"))
    if not isinstance(record.get("query"), str) or not calls or not has_value(record.get("tools")):
        return None
    question = {"role": "user", "content": record["query"]}
    return RawTurns([question, {"role": "assistant", "tool_calls": calls}], {"query", "answers"})


def earlier_turns(record: Mapping[str, Any]) -> list[dict]:
    """Returns the turns of the exchanges in a record's `history`.

    Raises:
      Drop: it is not a list of pairs.
    """
    history = record.get("history")
    if not history or not has_value(history):
        return []
    if not (
        isinstance(history, list)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in history)
    ):
        raise Drop(reasons.BAD_HISTORY)
    return alternating([text for pair in history for text in pair])


def _tree(record: dict) -> RawTurns | None:
    """A tree of messages; the path of the best ranked replies is read."""
    root = trees.root_of(record)
    if root is None:
        if trees.is_row(record):
            raise Drop(reasons.TREE_MESSAGE)
        return None
    turns, others = trees.best_path(root)
    changes = (reasons.OTHER_REPLIES,) if others else ()
    return RawTurns(turns, {"prompt", "message_tree_id"}, changes, id=trees.tree_id(record))


def _glaive(record: dict) -> RawTurns | None:
    """A dialogue in one text with speakers' names; the system text describes functions."""
    chat, system = record.get("chat"), record.get("system")
    if not isinstance(chat, str):
        return None
    turns = glaive.dialogue(chat)
    if turns is None:
        raise Drop(f"{reasons.NOT_TURNS}`chat`")
    if not isinstance(system, str):
        return RawTurns(turns, {"chat"})
    text, tools = glaive.described_functions(system)
    return RawTurns(turns, {"chat"}, system=text, tools=tools or None)


SHAPES = (
    Shape(
        "ShareGPT, OpenAI",
        "a list of turns in one of TURNS",
        "one turn per entry, from ROLES and TEXTS",
        _turn_list,
    ),
    Shape(
        "Glaive",
        "`chat`: text with `USER:`, `ASSISTANT:`",
        "turns; JSON in `system` becomes tools, `<functioncall>` a call",
        _glaive,
    ),
    Shape(
        "OpenAssistant",
        "`prompt` with `replies`, or a row per message",
        "the best ranked replies, or every path: `data.clean.replies`",
        _tree,
    ),
    Shape(
        "xLAM",
        "`query`, `answers`, `tools`",
        "a question and the calls in `answers`",
        _asked_calls,
    ),
    Shape(
        "preferences",
        "`chosen`, perhaps with `prompt`",
        "the preferred answer; `rejected` is not read",
        _preferred,
    ),
    Shape(
        "single exchange",
        "one of PAIRS",
        "a question and its answer, as texts or lists of turns",
        _pair,
    ),
    Shape(
        "texts",
        "a list of texts, or of pairs, in one of TURNS",
        "alternating turns of user and assistant",
        _text_list,
    ),
)
