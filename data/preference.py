"""Records of preferences: a prompt with a chosen and a rejected completion, or with one and its
label.

The shapes are TRL's: an explicit `prompt` with completions, or completions that are whole
conversations with common first turns; or `completion` and `label`. Texts become user and assistant
turns; dialogues of `Human:` and `Assistant:` become several.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple

from data import shapes
from data.clean import TEMPLATE_KWARGS, CleanConfig, Cleaned, Cleaner, own_id
from data.conversation import Conversation, Labelled, Message, Preference, TurnOrder
from data.exact_duplicates import Seen
from data.fields import (
    CHOSEN,
    LABEL_FIELDS,
    REJECTED,
    FieldMap,
    check_media,
    first_present,
    has_value,
    is_desirable,
    names_in_capitals,
    only_text,
    renamed,
    shown_fields,
    unread_of,
)
from data.reasons import DIALOGUE_IN_TEXT, DUPLICATE, NOT_A_RECORD, TURNS_IN_TEXT, Drop
from data.turn_lists import (
    dialogue_prompt,
    dialogue_turns,
    repeated_turns,
    role_in,
    written_answer,
    written_prompt,
    written_turns,
)
from data.turns import Findings, read_messages

PROMPTS = ("prompt", "question", "instruction", "query", *shapes.TURN_LISTS, "input")
_NAMED_COMPLETIONS = ("completion", "response")
COMPLETIONS = (*_NAMED_COMPLETIONS, "output", "answer")
TARGETS = ("prompt", "chosen", "rejected", "completion", "label", "system", "tools", "id")
"""Targets of a source's `fields`."""
_CONTEXT = (*shapes.SYSTEM_FIELDS, *shapes.TOOL_FIELDS, TEMPLATE_KWARGS)
_KNOWN = frozenset(  # fields of a record that are read
    (*CHOSEN, *REJECTED, *PROMPTS, *COMPLETIONS, *LABEL_FIELDS, *_CONTEXT, "context", "history")
)
NO_PREFERENCE = "no `chosen` and `rejected`, and no `completion` and `label`: it has "
NO_LABEL = "a `label` that is neither true nor false"
NOT_A_COMPLETION = "a completion that is no text or list of turns: "
NOT_A_PROMPT = "a prompt that is no text or list of turns: "
SAME = "the chosen completion equals the rejected one"
OTHER_PROMPTS = "the completions answer different prompts"
NO_PROMPT = "completions without a prompt"
NO_LAST_ANSWER = "a conversation with a `{}` that does not end with an answer"
NO_ANSWER = "the turns after the prompt do not begin with the assistant's"


@dataclass
class PreferenceReader:
    """Reads the preference records of one source, in order.

    Attributes:
      clean: the cleaning rules, which both conversations of a record pass.
      order: see `data.clean.Cleaner`.
      fields: maps the records' field names to TARGETS.
      seen: hashes of records read before; repetitions are dropped.
      found: receives the names in `fields` that occur.
    """

    clean: CleanConfig = CleanConfig()
    order: TurnOrder = "any"
    fields: Mapping[str, str] = field(default_factory=dict)
    seen: Seen = field(default_factory=set[bytes])
    found: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._names = FieldMap(self.fields, self.found)

    def read(self, raw: object) -> tuple[Preference | Labelled, set[str], set[str]]:
        """Returns a record, its changes, and its unread fields with a value.

        Raises:
            Drop: it cannot be used.
        """
        if not isinstance(raw, dict):
            raise Drop(NOT_A_RECORD)
        check_media(raw)
        as_written = self._names.record(raw)
        written = names_in_capitals(as_written, _KNOWN)
        named = renamed(as_written, {name: known for known, name in written.items()})
        unwrapped, unread = _with_unwrapped_prompt(named)
        record, changes = _with_written_turns(unwrapped)
        record = _with_chosen(record)
        chosen_name, rejected_name = _chosen_name(record), first_present(record, REJECTED)
        if chosen_name is None or rejected_name is None:
            reading = self._read_labelled(record)
        else:
            reading = self._read_pair(record, (chosen_name, rejected_name))
        read = {written.get(name, name) for name in reading.read}
        if own_id(record) is not None:
            read.add("id")
        unread |= unread_of(as_written, read, "record") | reading.unread
        return reading.record, changes | reading.changes, unread

    def _read_pair(self, record: dict, names: tuple[str, str]) -> "_Reading":
        """Reads a record with completions in two fields, the chosen one first."""
        prompt = _read_prompt(record)
        # Fields next to both completions are read, or named, with each conversation.
        read, changes = {*names, *_CONTEXT}, set[str]()
        cleaned, follow = [], bool(prompt.turns)
        for name in names:
            turns, is_whole = _completion_turns(record[name], name)
            if not is_whole and not prompt.turns:
                raise Drop(NO_PROMPT)
            if not is_whole or repeated_turns(prompt.turns, turns):
                read |= prompt.fields
                changes |= prompt.changes
            elif repeated_turns(prompt.alone, turns):
                read.add(prompt.name)
            follow = follow and not is_whole
            cleaned.append(self._clean(record, turns if is_whole else prompt.turns + turns, name))
        both = [one.messages for one in cleaned]
        if _content(both[0]) == _content(both[1]):
            raise Drop(SAME)
        start = _first_after(prompt.turns, both[0]) if follow else _common_turns(*both)
        if any(message.in_prompt for messages in both for message in messages[start:]):
            raise Drop(OTHER_PROMPTS)
        chosen, rejected = (_trained_from(one.messages, start) for one in cleaned)
        digest = self._digest(
            [_content(chosen), _content(rejected)],
            [*_beside(cleaned[0], start), *_beside(cleaned[1], start)],
        )
        preference = Preference(
            own_id(record) or digest.hex()[:16],
            _conversation(cleaned[0], chosen),
            _conversation(cleaned[1], rejected),
        )
        changes |= cleaned[0].changes | cleaned[1].changes
        return _Reading(preference, changes, read, cleaned[0].unread | cleaned[1].unread)

    def _read_labelled(self, record: dict) -> "_Reading":
        """Reads a record with one labelled completion."""
        name, label_name = _completion_name(record), first_present(record, LABEL_FIELDS)
        if name is None or label_name is None:
            raise Drop(NO_PREFERENCE + shown_fields(record))
        desirable = is_desirable(record[label_name])
        if desirable is None:
            raise Drop(NO_LABEL)
        turns, is_whole = _completion_turns(record[name], name)
        prompt = _begun(turns, "label") if is_whole else _read_prompt(record)
        if not prompt.turns:
            raise Drop(NO_PROMPT)
        completion = turns[len(prompt.turns) :] if is_whole else turns
        cleaned = self._clean(record, prompt.turns + completion, name)
        start = _first_after(prompt.turns, cleaned.messages)
        messages = _trained_from(cleaned.messages, start)
        digest = self._digest([_content(messages), desirable], _beside(cleaned, start))
        read = {name, label_name, *prompt.fields, *_CONTEXT}
        conversation = _conversation(cleaned, messages)
        labelled = Labelled(own_id(record) or digest.hex()[:16], conversation, desirable)
        return _Reading(labelled, prompt.changes | cleaned.changes, read, cleaned.unread)

    def _digest(self, contents: list, beside: list) -> bytes:
        """Returns a hash of a record's turns and what is beside them; raises Drop for a
        repetition."""
        contents += [beside] * bool(beside)  # otherwise the digest of earlier versions
        digest = hashlib.sha256(json.dumps(contents).encode()).digest()[:16]
        if self.clean.duplicates and digest in self.seen:
            raise Drop(DUPLICATE)
        self.seen.add(digest)
        return digest

    def _clean(self, record: Mapping, turns: list, name: str) -> Cleaned:
        """Returns the cleaned turns of the conversation with one completion."""
        context = {key: record[key] for key in _CONTEXT if key in record}
        cleaner = Cleaner(replace(self.clean, duplicates=False), self.order)
        try:
            return cleaner.clean({**context, "messages": turns})
        except Drop as drop:
            raise Drop(f"{name}: {drop}") from None


class _Reading(NamedTuple):
    """What was read of a record."""

    record: Preference | Labelled
    changes: set[str]
    """What was changed, as the report counts it."""
    read: set[str]
    """Fields of the record that were read, apart from its `id`."""
    unread: Set[str]
    """Unread fields with a value within its turns."""


class _Prompt(NamedTuple):
    """The prompt of a record; without one, all are empty."""

    turns: list[Any]
    """Earlier exchanges, and the question with the fields joined to it."""
    fields: set[str]
    """The fields that they were read from."""
    name: str
    """The field of the question."""
    alone: list[Any]
    """The turns of this field only."""
    changes: set[str]
    """What was changed in it."""


def _with_unwrapped_prompt(record: dict) -> tuple[dict, set[str]]:
    """Returns a record with the turns and tools of a prompt in OpenAI's form, an object with
    `messages`, as its own, and the prompt's unread fields."""
    for name in PROMPTS:
        prompt = record.get(name)
        if isinstance(prompt, dict) and isinstance(prompt.get("messages"), list):
            read = {"messages"} if has_value(record.get("tools")) else {"messages", "tools"}
            own = {"tools": prompt["tools"]} if "tools" in read & prompt.keys() else {}
            return {**record, **own, name: prompt["messages"]}, unread_of(prompt, read, "prompt's")
    return record, set()


def _with_chosen(record: dict) -> dict:
    """Returns a record with the last answer of its conversation as the chosen completion, if it has
    just the rejected one, as ms-swift's; or all of it next to a rejected conversation.

    Raises:
      Drop: the conversation does not end with an answer.
    """
    name, rejected = _turn_list(record), first_present(record, REJECTED)
    if name is None or rejected is None or first_present(record, (*CHOSEN, *LABEL_FIELDS)):
        return record
    if not _is_answered(record[name]) and first_present(record, COMPLETIONS):
        return record
    turns, _ = _completion_turns(record[name], name)
    prompt = len(_begun(turns, rejected).turns)
    _, is_whole = _completion_turns(record[rejected], rejected)
    if is_whole:
        return {**record, CHOSEN[0]: turns}
    return {**record, name: turns[:prompt], CHOSEN[0]: turns[prompt:]}


def _chosen_name(record: Mapping[str, Any]) -> str | None:
    """Returns the field of the chosen completion; next to a rejected one, it may be named as an
    only answer is."""
    is_labelled = first_present(record, LABEL_FIELDS)
    return first_present(record, CHOSEN if is_labelled else (*CHOSEN, *COMPLETIONS))


def _with_written_turns(record: dict) -> tuple[dict, set[str]]:
    """Returns a record with turns for the texts of lists of turns, and what was changed."""
    prompts = {name: _written_prompt(record, name) for name in PROMPTS}
    asked = record | {name: turns for name, turns in prompts.items() if turns}
    names = (*CHOSEN, *REJECTED, *COMPLETIONS)
    answers = {name: _written_completion(asked, name) for name in names}
    result = asked | {name: turns for name, turns in answers.items() if turns}
    is_changed = any([*prompts.values(), *answers.values()])
    return result, {TURNS_IN_TEXT} if is_changed else set()


def _written_prompt(record: Mapping[str, Any], name: str) -> list[Any] | None:
    """Returns the turns of a prompt's text, unless other fields are joined to it. In a field for
    conversations they may begin with any turn, elsewhere as a prompt does."""
    if record.get(name) is None:
        return None
    value, _ = shapes.with_joined_fields(record, name, [])
    return written_turns(value) if name in shapes.TURN_LISTS else written_prompt(value)


def _written_completion(record: Mapping[str, Any], name: str) -> list[Any] | None:
    """Returns the turns of a completion's text, or, without a prompt, of a whole conversation."""
    turns = written_turns(record.get(name))
    if turns is None:
        return None
    prompt = _read_prompt(record)
    if not prompt.turns:
        return turns
    return written_answer(record[name], prompt.turns) or written_answer(record[name], prompt.alone)


def _read_prompt(record: Mapping[str, Any]) -> _Prompt:
    """Returns a record's prompt, joined from the same fields as a question in `data.shapes`.

    Raises:
      Drop: it has no turns.
    """
    name = next((name for name in PROMPTS if _is_asked(record.get(name))), None)
    if name is None:
        return _Prompt([], set(), "", [], set())
    changes: list[str] = []
    question, fields = shapes.with_joined_fields(record, name, changes)
    turns = _turns_of(question, "user")
    if turns is None:
        raise Drop(f"{NOT_A_PROMPT}`{name}`")
    alone = _turns_of(record[name], "user") or []
    if isinstance(record.get("history"), list):  # not something else of that name
        turns, fields = shapes.earlier_turns(record) + turns, fields | {"history"}
    changes += [DIALOGUE_IN_TEXT] if dialogue_prompt(question) else []
    return _Prompt(shapes.as_context(turns), fields, name, alone, set(changes))


def _is_asked(value: object) -> bool:
    """Returns whether a prompt's field has a value, and not just white space."""
    return has_value(value) and (not isinstance(value, str) or bool(value.strip()))


def _completion_name(record: Mapping[str, Any]) -> str | None:
    """Returns the field of a labelled completion, or of a conversation that ends with it, beside
    which an `answer` may be anything."""
    name = _turn_list(record)
    names = _NAMED_COMPLETIONS if name and _is_answered(record[name]) else COMPLETIONS
    return first_present(record, names) or name


def _turn_list(record: Mapping[str, Any]) -> str | None:
    return next((name for name in shapes.TURN_LISTS if isinstance(record.get(name), list)), None)


def _is_answered(turns: Sequence[Any]) -> bool:
    return bool(turns) and role_in(turns[-1]) == "assistant"


def _begun(turns: Sequence[Any], beside: str) -> _Prompt:
    """Returns a conversation up to its last answer, whose reasoning may be a turn of its own.

    Args:
      beside: the field beside it that is about this answer.

    Raises:
      Drop: it does not end with an answer.
    """
    roles = [role_in(turn) for turn in turns]
    if roles[-1] != "assistant":
        raise Drop(NO_LAST_ANSWER.format(beside))
    end = len(roles) - 1
    while end and roles[end - 1] == "thought":
        end -= 1
    return _Prompt(shapes.as_context(turns[:end]), set(), "", [], set())


def _completion_turns(value: object, name: str) -> tuple[list[Any], bool]:
    """Returns a completion's turns, and whether they are a whole conversation with its prompt."""
    turns = _turns_of(value, "assistant")
    if not turns:
        raise Drop(f"{NOT_A_COMPLETION}`{name}`")
    return turns, name in shapes.TURN_LISTS or role_in(turns[0]) in ("system", "user")


def _turns_of(value: object, role: str) -> list[Any] | None:
    """Returns the turns of a text (perhaps the only one of a list), a turn, or a list of turns in
    any shape of conversations."""
    value = only_text(value)
    if isinstance(value, dict) and role_in(value):
        return [value]
    if turns := (role == "user" and dialogue_prompt(value)) or dialogue_turns(value):
        return turns
    if isinstance(value, list | dict):
        try:
            return shapes.read_turns({"messages": value}).turns
        except Drop:
            return None
    return [{"role": role, "content": value}] if isinstance(value, str) else None


def _first_after(prompt: Sequence[Any], messages: Sequence[Message]) -> int:
    """Returns the number of the first turn after a prompt, whose turns were marked as context: the
    assistant's, or the result of a call at the prompt's end.

    Raises:
        Drop: there is none, or another follows the prompt.
    """
    asked = [i for i, message in enumerate(messages) if message.role != "assistant"]
    last = max((i for i in asked if messages[i].in_prompt), default=-1)
    begun = [*takewhile(lambda turn: role_in(turn) == "assistant", reversed(prompt))]
    start = last + 1 + len(read_messages(begun[::-1], Findings()))  # which joins calls
    spoken = next((message.role for message in messages[start:] if message.role != "tool"), None)
    if spoken != "assistant":
        raise Drop(NO_ANSWER)
    return start


def _common_turns(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Returns how many turns a pair's conversations begin with in common, the prompt.

    Raises:
        Drop: their prompts differ.
    """
    pairs: Iterable[tuple[Message, Message]] = zip(chosen, rejected, strict=False)
    prompt = sum(1 for _ in takewhile(lambda pair: _content(pair[:1]) == _content(pair[1:]), pairs))
    if prompt == 0 or any(
        len(turns) == prompt or turns[prompt].role != "assistant" for turns in (chosen, rejected)
    ):
        raise Drop(OTHER_PROMPTS)
    return prompt


def _trained_from(messages: Sequence[Message], start: int) -> list[Message]:
    """Returns the turns, with those before `start`, the prompt, excluded from training."""
    return [
        replace(message, train=message.train and index >= start, in_prompt=index < start)
        for index, message in enumerate(messages)
    ]


def _conversation(cleaned: Cleaned, messages: Sequence[Message]) -> Conversation:
    """Returns a record's conversation, with other turns."""
    return Conversation("", tuple(messages), cleaned.tools, cleaned.template_kwargs)


def _beside(cleaned: Cleaned, start: int) -> list:
    """Returns what distinguishes a conversation from others with the same turns: its tools, the
    template's variables, and which answers from turn `start` on are trained on; [] if it has
    neither tools nor variables and all are."""
    beside: list[object] = [*cleaned.tools]
    if cleaned.template_kwargs:
        beside.append(cleaned.template_kwargs)
    trained = [turn.train for turn in cleaned.messages[start:] if turn.role == "assistant"]
    return beside if all(trained) else [*beside, trained]


def _content(messages: Sequence[Message]) -> list[tuple]:
    """Returns what makes turns equal, as JSON can hold it."""
    return [
        (message.role, message.content, list(message.tool_calls), message.reasoning)
        for message in messages
    ]
