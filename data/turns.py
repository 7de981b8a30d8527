"""Turns raw turns into messages, in an order that a template can write."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from data import reasons
from data.content_parts import Parts, read_parts
from data.conversation import IN_CONTENT, ROLES, Message, TurnOrder
from data.fields import (
    IN_LOSS,
    REASONING_FIELDS,
    ROLE_FIELDS,
    TEXT_FIELDS,
    first_present,
    has_value,
    is_fraction,
    loss_flags,
    shown_fields,
    unread_of,
    without_surrogates,
    yes_or_no,
)
from data.printable import printable
from data.reasons import Drop
from data.roles import is_call_role, role_of
from data.shapes import CONTEXT
from data.table_values import without_unused
from data.tool_calls import (
    new_id,
    parse_call_text,
    parse_calls,
    rewrites_arguments,
    unread_call_fields,
    written_calls,
)
from data.turn_lists import as_list
from data.untrusted_files import is_text

_JSON_TYPES = (dict, list, int, float)  # of a tool's result, besides texts and null
_OF_RANGES = ("train_detail", "training_detail")  # axolotl's flags of ranges of a text
_WRITTEN = frozenset(("role", "content", "tool_calls", "tool_call_id", "name"))
_USUAL_FIELDS = 2  # a role and a text


@dataclass
class Findings:
    """Findings in a record apart from its text, as the report counts them."""

    changes: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    """Unread fields with a value."""


def read_messages(
    turns: Sequence[object], findings: Findings, loss_mask: object = None
) -> list[Message]:
    """Returns raw turns as messages; reasoning turns become part of the answer after them, and
    consecutive turns of calls become one turn.

    Args:
      findings: receives their changes and unread fields.
      loss_mask: which turns are in the loss: an entry per turn, with or without those of reasoning,
        or per answer, as a list or its text; None for all.

    Raises:
      Drop: a turn cannot be used, or the mask does not match the turns.
    """
    read = [read_message(turn, findings) for turn in turns]
    if loss_mask is not None:
        read = _with_loss_mask(read, loss_mask, findings)
    messages: list[Message] = []
    thoughts: list[Message] = []
    for role, message in _with_calls_joined(turns, read, findings):
        if role == "thought":
            thoughts.append(message)
            continue
        if thoughts and role != "assistant":
            raise Drop(reasons.THOUGHT_ALONE)
        if message.train and not all(thought.train for thought in thoughts):
            findings.changes.add(reasons.THOUGHT_FLAG)
        messages.append(_with_thoughts(message, thoughts) if thoughts else message)
        thoughts = []
    if thoughts:
        raise Drop(reasons.THOUGHT_ALONE)
    return messages


def _with_thoughts(message: Message, thoughts: Sequence[Message]) -> Message:
    texts = [*(thought.content for thought in thoughts), message.reasoning or ""]
    return replace(message, reasoning="\n\n".join(texts).strip())


def _with_calls_joined(
    turns: Sequence[object], read: Sequence[tuple[str, Message]], findings: Findings
) -> list[tuple[str, Message]]:
    """Joins the calls of consecutive `tool_call` turns, which were made together, as ms-swift does.
    A call with its own reasoning, or another place in the loss, stays a turn."""
    result: list[tuple[str, Message]] = []
    may_join = False
    for turn, (role, message) in zip(turns, read, strict=True):
        is_call = bool(message.tool_calls) and _is_call_turn(turn)
        before = result[-1][1] if result else message
        is_alone = message.content or message.reasoning is not None
        if may_join and is_call and not is_alone and message.train == before.train:
            calls = before.tool_calls + message.tool_calls
            result[-1] = role, replace(before, tool_calls=calls)
            findings.changes.add(reasons.JOINED_CALLS)
        else:
            result.append((role, message))
        may_join = is_call
    return result


def _is_call_turn(turn: Any) -> bool:
    name = first_present(turn, ROLE_FIELDS)
    return name is not None and is_call_role(turn[name])


def _with_loss_mask(
    read: Sequence[tuple[str, Message]], mask: object, findings: Findings
) -> list[tuple[str, Message]]:
    """Excludes turns from the loss by a record's `loss_mask`; see `read_messages`."""
    every, spoken, answers = [
        [number for number, (role, _) in enumerate(read) if role in roles]
        for roles in ({*ROLES, "thought"}, ROLES, ("assistant",))
    ]
    flags = [yes_or_no(flag) for flag in as_list(mask) or ()]
    masked = next((turns for turns in (every, spoken, answers) if len(turns) == len(flags)), None)
    if None in flags or masked is None:
        raise Drop(reasons.BAD_LOSS_MASK)
    result = list(read)
    for number, flag in zip(masked, flags, strict=True):
        role, message = read[number]
        if not flag:
            result[number] = role, replace(message, train=False)
        if not flag and role == "assistant":
            findings.changes.add(f"{reasons.OUT_OF_LOSS}`loss_mask`")
    return result


def read_message(turn: object, findings: Findings) -> tuple[str, Message]:
    """Returns the role of a raw turn, which may be `thought`, and the turn as a message.

    Args:
      turn: a turn as a data set has it, such as {"from": "gpt", "value": "Hello."}; anything else
        raises Drop.
      findings: receives the turn's changes and unread fields.

    Raises:
      Drop: the turn cannot be used; the argument is the reason.
    """
    if not isinstance(turn, dict):
        raise Drop(f"{reasons.BAD_TURN}: it is a {type(turn).__name__}")
    role_field, text_field = first_present(turn, ROLE_FIELDS), first_present(turn, TEXT_FIELDS)
    raw_role = turn.get(role_field)
    if not isinstance(raw_role, str):
        raise Drop(_bad_turn(turn, role_field))
    role = role_of(raw_role)
    calls, call_fields = _calls(turn, findings)
    parts = _parts(turn.get(text_field), role, findings)
    content, thoughts, reasoning_fields = _content(
        turn, role, role_field, text_field, parts, bool(calls), findings
    )
    if role is None:
        raise Drop(reasons.UNKNOWN_ROLE + (printable(raw_role.strip())[:60] or "(empty)"))
    if raw_role.strip().lower() == "developer":
        findings.changes.add(reasons.DEVELOPER)
    if not calls and is_call_role(raw_role):
        calls, content = _calls_in_text(content, thoughts, findings), ""
    for call in parts.calls if parts else ():
        calls += _calls_in_text(call, thoughts, findings)
    if calls and role != "assistant":
        raise Drop(reasons.CALL_OF_ANOTHER)
    train, call_id, name = True, None, None
    if len(turn) > _USUAL_FIELDS:
        read = {role_field, text_field, *call_fields, CONTEXT, *reasoning_fields}
        train, call_id, name = _further_fields(turn, role, read, findings)
    train = train and _parts_are_trained(
        turn, role, parts, bool(call_fields or reasoning_fields), findings
    )
    return role, Message(
        "assistant" if role == "thought" else role,
        _stripped(content, findings),
        train,
        calls,
        call_id,
        name,
        reasoning=_unicode("\n\n".join(thoughts), findings) if thoughts else None,
        reasoning_field=_reasoning_field(reasoning_fields, parts),
        fields=_written_fields(turn, reasoning_fields),
        in_prompt=CONTEXT in turn,
    )


def _reasoning_field(fields: Sequence[str], parts: Parts | None) -> str:
    """Returns a Message's reasoning_field, given a turn's fields with reasoning."""
    if fields:
        return fields[0]
    return IN_CONTENT if parts and parts.thoughts else REASONING_FIELDS[0]


def _parts(content: object, role: str | None, findings: Findings) -> Parts | None:
    """Returns the parts of a content; None if it is a text, or a tool's result of another kind."""
    if isinstance(content, dict) and role != "tool":
        content = [content]
    parts = read_parts(content, role) if isinstance(content, list) else None
    if parts:
        findings.unread |= parts.unread
        if role == "tool":  # a template may write even one part as a list
            findings.changes.add(reasons.JOINED_RESULT)
        elif len(parts.texts) > 1:
            findings.changes.add(reasons.JOINED_PARTS)
    return parts


def _content(
    turn: dict,
    role: str | None,
    role_field: str | None,
    text_field: str | None,
    parts: Parts | None,
    has_calls: bool,
    findings: Findings,
) -> tuple[str, list[str], list[str]]:
    """Returns a turn's content as text, its reasoning, and the fields with its reasoning.

    Raises:
      Drop: it has no content, or one that is neither text nor a tool's result.
    """
    content, thoughts = turn.get(text_field), list[str]()
    if parts:
        content, thoughts = "".join(parts.texts), [*parts.thoughts]
    if role == "tool" and not isinstance(content, str):
        content = _result(content, turn, role_field, findings)
    reasoning_fields: list[str] = []
    if role == "assistant" and (thoughts or len(turn) > _USUAL_FIELDS):
        reasoning_fields = _add_reasoning(turn, thoughts)
    if content is None and (has_calls or thoughts):
        content = ""
        findings.changes.add(reasons.NO_CONTENT)
    if content is None:
        raise Drop(_bad_turn(turn, role_field))
    if not isinstance(content, str):
        raise Drop(f"{reasons.CONTENT_NOT_TEXT}`{text_field}` ({type(content).__name__})")
    return content, thoughts, reasoning_fields


def _stripped(content: str, findings: Findings) -> str:
    """Returns a text without white space around it, and without lone surrogates."""
    content = _unicode(content, findings)
    stripped = content.strip()
    if len(stripped) != len(content):
        findings.changes.add(reasons.WHITE_SPACE)
    return stripped


def _further_fields(
    turn: dict, role: str, read: set, findings: Findings
) -> tuple[bool, str | None, str | None]:
    """Reads a turn's other fields, adds them to `read`, and notes those that nothing has read.

    Returns:
      Whether no flag excludes the turn from the loss; and for a tool's result the id of its call
      and the tool's name, each None if absent.
    """
    train, call_id, name = _trained(turn, role, read, findings), None, None
    if role == "tool":
        call_id, name = (_text_field(turn, field, read) for field in ("tool_call_id", "name"))
    findings.unread |= unread_of(turn, read, "turn")
    return train, call_id, name


def _written_fields(turn: dict, reasoning_fields: list[str]) -> tuple[str, ...]:
    """Returns the names of a turn's fields passed to templates, in order; none if they are just
    role and content in this order, or have names that no template reads."""
    names = tuple(turn)
    if names == ("role", "content") or not {"role", "content"} <= turn.keys():
        return ()
    return tuple(name for name in names if name in _WRITTEN or name in reasoning_fields)


def _bad_turn(turn: dict, role_field: str | None) -> str:
    """Returns why a turn is dropped that lacks a role or a text, with the fields that it has."""
    null = next((name for name in TEXT_FIELDS if name in turn and turn[name] is None), None)
    if role_field is not None and not isinstance(turn[role_field], str):
        wrong = f"`{role_field}` is no text ({type(turn[role_field]).__name__}); "
    elif role_field is not None and null is not None:
        wrong = f"`{null}` is null; "
    else:
        wrong = ""
    return f"{reasons.BAD_TURN}: {wrong}it has {shown_fields(_with_values(turn))}"


def _with_values(turn: dict) -> dict:
    return {name: value for name, value in turn.items() if name != CONTEXT and has_value(value)}


def _result(content: object, turn: dict, role_field: str | None, findings: Findings) -> object:
    """Returns a tool's result as JSON text if it is a JSON value other than text. Null counts as a
    result only if no other field of the turn may hold it."""
    others = _with_values(turn).keys() - {role_field, "name", "tool_call_id"}
    is_null = content is None and not others and any(name in turn for name in TEXT_FIELDS)
    if not is_null and not isinstance(content, _JSON_TYPES):
        return content
    findings.changes.add(reasons.RESULT_AS_TEXT)
    content = _without_unused(content, findings)
    return json.dumps(content, ensure_ascii=False, default=str)


def _calls(turn: dict, findings: Findings) -> tuple[tuple[dict[str, Any], ...], set[str]]:
    """Returns a turn's tool calls, and the fields that were read for them."""
    read: set[str] = set()
    for name in ("tool_calls", "function_call"):
        if not turn.get(name):
            continue
        read.add(name)
        try:
            written = _without_unused(written_calls(turn[name], name), findings)
            calls = parse_calls(written)
        except (ValueError, RecursionError) as error:
            raise Drop(str(error)) from None
        if calls:
            findings.unread |= unread_call_fields(written)
            if rewrites_arguments(written):
                findings.changes.add(reasons.ARGUMENTS)
            return calls, read
    return (), read


def _calls_in_text(
    text: str, thoughts: list[str], findings: Findings
) -> tuple[dict[str, Any], ...]:
    """Returns the calls in the text of a turn `function_call`; its reasoning is appended to
    `thoughts`."""
    try:
        read = parse_call_text(text)
    except (json.JSONDecodeError, RecursionError):
        raise Drop(reasons.NOT_A_CALL) from None
    except ValueError as error:
        raise Drop(f"{reasons.NOT_A_CALL}: {error}") from None
    if read.reasoning is not None and read.reasoning not in thoughts:
        thoughts.append(read.reasoning)
    findings.unread |= read.unread
    return read.calls


def _without_unused(value: Any, findings: Findings) -> Any:
    """Returns a value without the keys that a table's row lacks."""
    value, left_out = without_unused(value)
    if left_out:
        findings.changes.add(reasons.TABLE_NULLS)
    return value


def _add_reasoning(turn: dict, thoughts: list[str]) -> list[str]:
    """Appends an answer's reasoning to `thoughts`; returns all fields it was in.

    An empty text counts too: some templates write it as an empty block.
    """
    read: list[str] = []
    for name in REASONING_FIELDS:
        text = turn.get(name)
        if isinstance(text, str) and (not thoughts or thoughts == [text]):
            thoughts[:] = [text]
            read.append(name)
    return read


def _unicode(text: str, findings: Findings) -> str:
    """Replaces lone surrogates, see `without_surrogates`."""
    if is_text(text):
        return text
    findings.changes.add(reasons.LONE_SURROGATE)
    return without_surrogates(text)


def _trained(turn: dict, role: str, read: set, findings: Findings) -> bool:
    """Returns whether no flag excludes a turn from the loss; adds the flags to `read`.

    A prompt's answers are excluded without a flag; its reasoning follows the answer after it.
    """
    trained = CONTEXT not in turn or role == "thought"
    for name, in_loss in loss_flags(turn).items():
        read.add(name)
        if in_loss and is_fraction(turn, name):
            findings.changes.add(reasons.FRACTION.format(name))
        if not in_loss:  # for other roles, counts with train_on: everything
            trained = False
            if role == "assistant":  # reasoning follows the answer after it
                findings.changes.add(f"{reasons.OUT_OF_LOSS}`{name}`")
        elif role not in ("assistant", "thought") and name in IN_LOSS:
            findings.changes.add(reasons.OTHERS_FLAG)
    return trained


def _parts_are_trained(
    turn: dict, role: str, parts: Parts | None, says_more: bool, findings: Findings
) -> bool:
    """Returns whether no flags exclude all parts of a turn's content from the loss.

    Args:
      says_more: whether the turn has calls or reasoning besides its content.

    Raises:
      Drop: flags exclude a part of what the assistant writes.
    """
    for name in parts.fractions if parts else ():
        findings.changes.add(reasons.FRACTION.format(name))
    if role not in ("assistant", "thought"):
        if parts and any(flags[name] for flags in parts.flags for name in flags if name in IN_LOSS):
            findings.changes.add(reasons.OTHERS_FLAG)
        return not (parts and parts.excluding)
    detail = first_present(turn, _OF_RANGES)
    if detail is not None and _excludes_range(turn[detail]):
        raise Drop(reasons.PARTLY_IN_LOSS.format(detail))
    if parts is None or not (excluding := sorted(parts.excluding)):
        return True
    if parts.is_partly_excluded or says_more:
        raise Drop(reasons.PARTLY_IN_LOSS.format(excluding[0]))
    findings.changes |= {f"{reasons.OUT_OF_LOSS}`{name}`" for name in excluding}
    return False


def _excludes_range(detail: object) -> bool:
    ranges = detail if isinstance(detail, list) else []
    return any(isinstance(each, dict) and yes_or_no(each.get("train")) is False for each in ranges)


def _text_field(fields: dict, name: str, read: set) -> str | None:
    """Returns a non-empty text field without lone surrogates, and adds it to `read`; else None."""
    text = fields.get(name)
    if not text or not is_text(text):
        return None
    read.add(name)
    return text


def with_call_ids(messages: list[Message], changes: set[str]) -> list[Message]:
    """Gives ids to calls, and to tools' turns the ids of the calls they answer: by name, otherwise
    in order.

    `changes` receives the changes.
    """
    result: list[Message] = []
    unanswered: list[dict[str, Any]] = []
    for turn, message in enumerate(messages):
        written = message
        if message.tool_calls:
            if not all(call.get("id") for call in message.tool_calls):
                changes.add(reasons.MADE_IDS)
            calls = tuple(
                {**call, "id": call.get("id") or new_id(turn, number, call)}
                for number, call in enumerate(message.tool_calls)
            )
            # Calls in consecutive turns were made together; others came after all results.
            is_next = bool(result) and bool(result[-1].tool_calls)
            unanswered = [*(unanswered if is_next else ()), *calls]
            written = replace(message, tool_calls=calls)
        elif message.role == "tool" and message.tool_call_id is None and unanswered:
            named = [call for call in unanswered if call["function"]["name"] == message.name]
            written = replace(message, tool_call_id=(named or unanswered)[0]["id"])
        result.append(written)
        answered = (call for call in unanswered if call["id"] == written.tool_call_id)
        if (call := next(answered, None)) is not None:
            unanswered.remove(call)
    return result


def in_order(messages: list[Message], order: TurnOrder, changes: set[str]) -> list[Message]:
    """Returns the turns up to the last answer.

    Args:
      order: the template's requirement. If it takes any order, answers before the first question
        are kept as context; otherwise they are left out. An empty system turn, which a model's
        template may treat in any way, is left out if turns must alternate.
      changes: receives what was changed.

    Raises:
      Drop: an empty turn other than a tool's, no answer or no question, or an order that an
        alternating template does not take.
    """
    system: list[Message] = []
    if messages[0].role == "system":
        system, messages = messages[:1], messages[1:]
        if order == "alternating" and not system[0].content:
            system = []
            changes.add(reasons.EMPTY_SYSTEM)
    if order == "any":
        messages = _with_opening_as_context(messages, changes)
    else:
        messages = _without_opening(messages, changes)
    if order == "alternating":
        _check_alternation(messages)
    if any(
        not (message.content or message.tool_calls or message.reasoning or message.role == "tool")
        for message in messages
    ):
        raise Drop(reasons.EMPTY_TURN)
    answers = [number for number, message in enumerate(messages) if message.role == "assistant"]
    if not answers:
        raise Drop(reasons.NO_ANSWER)
    if answers[-1] + 1 < len(messages):
        changes.add(reasons.TRAILING_HUMAN)
    return system + messages[: answers[-1] + 1]


def _without_opening(messages: list[Message], changes: set[str]) -> list[Message]:
    first = next(
        (number for number, message in enumerate(messages) if message.role != "assistant"),
        len(messages),
    )
    if first:
        messages = messages[first:]
        changes.add(reasons.LEADING_ASSISTANT)
    if all(message.role != "user" for message in messages):
        raise Drop(reasons.NO_HUMAN)
    return messages


def _check_alternation(messages: list[Message]) -> None:
    if any(message.role == "system" for message in messages):
        raise Drop(reasons.LATE_SYSTEM)
    if messages[0].role != "user":
        raise Drop(reasons.NOT_ALTERNATING)
    may_follow: Mapping[str, tuple[str, ...]] = {
        "user": ("assistant",),
        "assistant": ("user", "tool"),
        "tool": ("tool", "assistant"),
    }
    for message, following in pairwise(messages):
        if following.role not in may_follow[message.role]:
            raise Drop(reasons.NOT_ALTERNATING)


def _with_opening_as_context(messages: list[Message], changes: set[str]) -> list[Message]:
    first = next(
        (number for number, message in enumerate(messages) if message.role == "user"), None
    )
    if first is None:
        raise Drop(reasons.NO_HUMAN)
    opening = [
        replace(message, train=message.train and message.role != "assistant")
        for message in messages[:first]
    ]
    if any(message.role == "assistant" for message in opening):
        changes.add(reasons.OPENING_ANSWER)
    return opening + messages[first:]
