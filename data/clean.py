"""Cleans conversations, much as FastChat and Koala do: a raw record becomes turns, or is dropped.

`shapes` finds the turns of a record, `turns` reads them, `scraped` has the rules for pages of web
chats.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from data import reasons, shapes
from data.conversation import Message, TurnOrder
from data.errors import UserError
from data.exact_duplicates import Seen
from data.fields import (
    TEXT_FIELDS,
    FieldMap,
    check_media,
    first_present,
    has_value,
    is_undesirable,
    names_in_capitals,
    renamed,
    unread_of,
)
from data.reasons import Drop
from data.scraped import before_rate_limit, from_html
from data.table_values import without_unused
from data.tool_calls import parse_tools
from data.turn_lists import role_in
from data.turns import Findings, in_order, read_message, read_messages, with_call_ids

_REFUSAL = re.compile(
    r"\bas an? (?:ai|artificial intelligence|(?:large )?language model)\b"
    r"|\bi(?:['’]m| am) (?:just )?an? (?:ai|language) "
    r"|\bi(?:['’]m| am) (?:sorry|afraid),? (?:but )?"
    r"(?:i )?(?:can(?:no|['’])t|am (?:not able|unable))"
    r"|\bi (?:can(?:no|['’])t|am unable to) (?:assist|help|fulfill|comply)",
    re.IGNORECASE,
)
_COMPANY = re.compile(
    r"\b(?:openai|chatgpt|gpt-?[345]|anthropic|claude(?: ai)?|deepmind|google bard|bing chat"
    r"|microsoft copilot)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class CleanConfig:
    """How conversations are cleaned before training.

    Texts and tokens are unchanged, except that near-duplicate texts can be dropped. By default only
    unambiguous damage is touched. `data.clean: scraped` names the rules for scraped web chats, see
    SETS.
    """

    html: Literal["detect", "always", "never"] = "never"
    """Turns converted to markdown: those that are entirely HTML, in records of ShareGPT's shape;
    every turn that contains a tag, in any record (raw scrapes); or none."""
    rate_limits: bool = False
    """End a conversation of ShareGPT's shape before the first reply that is only a service's busy
    or error message."""
    duplicates: bool = True
    """Drop a conversation whose turns, and which of them are trained on, equal those of an earlier
    one in the same source."""
    near_duplicates: float = 0.0
    """Drop a record (or text) that shares at least this fraction of its runs of five words with
    another one of its source, from 0.5 to 1; the one with the smallest hash is kept. 0 keeps
    all."""
    split: bool = True
    """Split a conversation longer than context_length between exchanges and repeat the system turn
    before each part; otherwise it may be cut in the middle of a turn. A single exchange that is too
    long is always cut."""
    refusals: bool = False
    """Drop conversations in which the assistant refuses or calls itself a model (in English)."""
    company_names: bool = False
    """Drop conversations that name a company that makes assistants, or its assistant."""
    replies: Literal["best", "all"] = "best"
    """What a message tree becomes: `best` is one conversation of the best ranked replies; `all` is
    one conversation per path to a message without replies."""
    languages: tuple[str, ...] = ()
    """Keep only these languages, such as [en, de] (ISO 639-1, by py3langid); empty keeps all."""

    def __post_init__(self) -> None:
        if self.near_duplicates and not 0.5 <= self.near_duplicates <= 1:
            raise ValueError(
                f"data.clean.near_duplicates: found {self.near_duplicates}; 0, which keeps all, or "
                "a similarity from 0.5 to 1, such as 0.8, would work"
            )
        for code in self.languages:
            if not re.fullmatch("[a-z]{2}", code):
                raise ValueError(
                    f"data.clean.languages: found {code!r}; a list of codes of ISO 639-1, such as "
                    "[en, de], would work"
                )


# The record's field of chat template variables, by TRL's name.
TEMPLATE_KWARGS = "chat_template_kwargs"
# Named sets of these rules, for `data.clean: NAME` in recipes.
SETS: Mapping[str, Mapping[str, Any]] = {"scraped": {"html": "detect", "rate_limits": True}}


class Cleaned(NamedTuple):
    """A record that can be used."""

    id: str
    messages: tuple[Message, ...]
    """[system] user assistant ..., see `data.turns.in_order`."""
    changes: set[str]
    """What was changed, as the report counts it."""
    tools: tuple[dict[str, Any], ...] = ()
    """Descriptions of the tools that the assistant may call."""
    unread: frozenset[str] = frozenset()
    """Unread fields with a value, as named in the report."""
    template_kwargs: Mapping[str, Any] = {}
    """Variables for the chat template."""


class _Read(NamedTuple):
    """A record as it was read, before the rules for its turns."""

    id: str | None
    """The record's own id, if it has one."""
    messages: list[Message]
    tools: tuple[dict[str, Any], ...]
    template_kwargs: Mapping[str, Any]
    is_scrape: bool
    """Whether it has ShareGPT's shape."""


@dataclass
class Cleaner:
    """Cleans the records of one source, in order."""

    config: CleanConfig = CleanConfig()
    order: TurnOrder = "any"
    """The order of turns that the template requires."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Maps the records' field names to those that are read, see `data.fields.FieldMap`."""
    seen: Seen = field(default_factory=set[bytes])
    """Hashes of conversations read before; repetitions are dropped."""
    found: set[str] = field(default_factory=set)
    """Receives the names in `fields` that occur."""

    def __post_init__(self):
        self._names = FieldMap(self.fields, self.found)

    def clean(self, raw_record: object) -> Cleaned:
        """Returns the turns of a raw record.

        Args:
          raw_record: a dictionary in one of `data.shapes.SHAPES`, perhaps with a text `system`, a
            list `tools`, and a list `loss_mask` that says which turns are trained on; or the turns.

        Raises:
          Drop: the record cannot be used.
        """
        findings = Findings()
        read = self._read(raw_record, findings)
        try:
            messages = self._cleaned(read, findings.changes)
        except Drop as drop:
            if str(drop) != reasons.NO_ANSWER or not isinstance(raw_record, dict):
                raise
            raise Drop(reasons.NO_ANSWER + shapes.preference_hint(raw_record)) from None
        digest = _digest(messages, read)
        if self.config.duplicates:
            if digest in self.seen:
                raise Drop(reasons.DUPLICATE)
            self.seen.add(digest)
        return Cleaned(
            read.id or digest.hex()[:16],
            tuple(messages),
            findings.changes,
            read.tools,
            frozenset(findings.unread),
            read.template_kwargs,
        )

    def _read(self, raw_record: object, findings: Findings) -> _Read:
        """Reads a raw record; `findings` receives its changes and unread fields."""
        as_written = self._as_dictionary(raw_record)
        written = names_in_capitals(as_written, shapes.KNOWN)
        record = renamed(as_written, {name: known for known, name in written.items()})
        raw = shapes.read_turns(record)
        if is_undesirable(record):
            raise Drop(reasons.UNDESIRABLE)
        record_id = own_id(record)
        if not raw.turns:
            raise Drop(reasons.EMPTY_RECORD)
        findings.changes |= set(raw.changes)
        turns, of_answer = self._named(raw.turns, as_written)
        messages = read_messages(turns, findings, record.get("loss_mask"))
        check_media(record, [message.content for message in messages])
        messages, system_field = _with_system(messages, record, raw.system, findings)
        tools, tools_field = _tools(record, raw, findings)
        template_kwargs = _template_kwargs(record, findings)
        read = {"loss_mask", *raw.fields, *of_answer, *filter(None, (system_field, tools_field))}
        if template_kwargs is not None:
            read.add(TEMPLATE_KWARGS)
        if record_id is not None:
            read.add("id")
        read = {written.get(name, name) for name in read}
        findings.unread |= unread_of(as_written, read, "record")
        is_scrape = shapes.is_sharegpt(raw)
        return _Read(record_id or raw.id, messages, tools, template_kwargs or {}, is_scrape)

    def _named(
        self, turns: Sequence[object], record: Mapping[str, Any]
    ) -> tuple[Sequence[object], set[str]]:
        """Returns turns under the names of fields that are read here, and which fields of the
        record became its only answer's."""
        named = [self._names.turn(turn) if isinstance(turn, dict) else turn for turn in turns]
        if not (targets := self._names.of_answer(record)):
            return named, set()
        answers = [
            (index, turn)
            for index, turn in enumerate(named)
            if isinstance(turn, dict)
            and role_in(turn) == "assistant"
            and shapes.CONTEXT not in turn
        ]
        if len(answers) != 1:
            return named, set()
        ((index, answer),) = answers
        read = {name for name, target in targets.items() if not has_value(answer.get(target))}
        named[index] = {**answer, **{targets[name]: record[name] for name in read}}
        return named, read

    def _cleaned(self, read: _Read, changes: set[str]) -> list[Message]:
        """Returns the turns of a record after all rules; raises Drop if one excludes it."""
        config, messages = self.config, read.messages
        if config.html == "always" or (config.html == "detect" and read.is_scrape):
            messages = [self._without_html(message, changes) for message in messages]
        messages = in_order(messages, self.order, changes)
        if config.rate_limits and read.is_scrape:
            messages = before_rate_limit(messages, changes)
        self._filter(messages)
        return with_call_ids(messages, changes)

    def _as_dictionary(self, record: object) -> dict[str, Any]:
        """Returns a record under the names read here; bare turns become a record."""
        if isinstance(record, list) and record and all(isinstance(turn, dict) for turn in record):
            record = {"messages": record}
        if not isinstance(record, dict):
            raise Drop(reasons.NOT_A_RECORD)
        return self._names.record(record)

    def _without_html(self, message: Message, changes: set[str]) -> Message:
        content = from_html(message.content, self.config.html, changes)
        return message if content is message.content else replace(message, content=content)

    def _filter(self, messages: Sequence[Message]) -> None:
        """Raises Drop for records excluded by the user's optional filters."""
        config = self.config
        if config.refusals and any(
            m.role == "assistant" and _REFUSAL.search(m.content) for m in messages
        ):
            raise Drop(reasons.REFUSAL)
        if config.company_names and any(_COMPANY.search(m.content) for m in messages):
            raise Drop(reasons.COMPANY_NAME)
        if config.languages:
            # A beginning is enough to detect the language, and is clearer without blocks of code.
            text = re.sub(
                r"```.*?(?:```|\Z)",
                " ",
                "\n".join(m.content[:2000] for m in messages[:6]),
                flags=re.DOTALL,
            )
            if text.strip() and _language_classifier()(text[:4000])[0] not in config.languages:
                raise Drop(reasons.OTHER_LANGUAGE)


def _with_system(
    messages: list[Message], record: dict, replacement: str | None, findings: Findings
) -> tuple[list[Message], str | None]:
    """Puts the record's system text first, unless the conversation has a system turn.

    Returns:
      The turns, and the field that was read.
    """
    name = first_present(record, shapes.SYSTEM_FIELDS)
    text = record[name] if name and replacement is None else replacement
    if isinstance(text, dict) and (inner := first_present(text, TEXT_FIELDS)):
        findings.unread |= unread_of(text, {inner, "role"}, "system text's")
        text = text[inner]
    has_turn = messages[0].role == "system"
    if not isinstance(text, str | list) or (has_turn and messages[0].content):
        return messages, None
    _, system = read_message({"role": "system", "content": text}, findings)
    system = replace(system, in_prompt=messages[0].in_prompt)
    return [system, *messages[has_turn:]] if system.content else messages, name


def _tools(
    record: dict, raw: shapes.RawTurns, findings: Findings
) -> tuple[tuple[dict[str, Any], ...], str | None]:
    """Returns the descriptions of tools, and the field that they were read from."""
    name = first_present(record, shapes.TOOL_FIELDS)
    described, field_read = (raw.tools, None) if raw.tools is not None else (record.get(name), name)
    if not has_value(described):
        return (), field_read
    if (parsed := parse_tools(described)) is not None:
        tools, is_rewritten = parsed
        if is_rewritten:
            findings.changes.add(reasons.NESTED_TOOLS)
        return tools, field_read
    findings.changes.add(reasons.TOOLS_LEFT_OUT)
    return (), field_read if field_read == "tools" else None


def _template_kwargs(record: dict, findings: Findings) -> dict[str, Any] | None:
    """Returns the record's variables for the chat template; None if it has no dictionary of
    them."""
    variables, left_out = without_unused(record.get(TEMPLATE_KWARGS))
    if left_out:
        findings.changes.add(reasons.TABLE_NULLS)
    return variables if isinstance(variables, dict) else None


def own_id(record: dict) -> str | None:
    """Returns a record's `id`, None without one; raises Drop if it is not Unicode text."""
    record_id = record.get("id")
    if not isinstance(record_id, (str, int)) or record_id == "":
        return None
    try:
        return str(record_id).encode().decode()
    except UnicodeEncodeError:  # half of a surrogate pair, see data.turns
        raise Drop(reasons.BROKEN_ID) from None


def _digest(messages: Sequence[Message], read: _Read) -> bytes:
    """Returns a hash of a conversation's turns, tools and variables, and of what is trained on."""
    contents: list[object] = [*map(_content, messages), *read.tools]
    contents += [read.template_kwargs] * bool(read.template_kwargs)
    if not all(trained := _trained(messages)):  # otherwise the digest of earlier versions
        contents.append(trained)
    return hashlib.sha256(json.dumps(contents).encode()).digest()[:16]


def _content(message: Message) -> tuple:
    """Returns what makes two turns equal: role, text, and calls if any."""
    calls = [call["function"] for call in message.tool_calls]
    more = ([calls] if calls else []) + (
        [{"reasoning": message.reasoning}] if message.reasoning else []
    )
    return (message.role, message.content, *more)


def _trained(messages: Sequence[Message]) -> list[bool]:
    """Returns whether each answer is trained on, without those before the first question, which
    never are."""
    roles = [message.role for message in messages]
    first = roles.index("user") if "user" in roles else 0
    return [message.train for message in messages[first:] if message.role == "assistant"]


def _language_classifier() -> Callable[[str], tuple[str, float]]:
    """Returns a function from a text to its ISO 639-1 code and a score."""
    try:
        from py3langid import classify
    except ImportError:
        raise UserError(
            "data.clean.languages needs py3langid; `pip install py3langid` would work"
        ) from None
    return classify
