"""Cleans conversations, similarly to FastChat and Koala: a raw record becomes ordered turns, or is dropped for a reason."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from data import html
from data.conversation import Message
from data.errors import UserError
from data.tool_calls import new_id, parse_call_text, parse_calls, parse_tools

# The names of roles in public dumps, for `from` and for `role`.
ROLES = {
    **dict.fromkeys(["human", "user", "prompter", "person", "customer"], "user"),
    **dict.fromkeys(["gpt", "assistant", "chatgpt", "gpt-3.5", "gpt-4", "bing", "bard", "claude", "gemini"], "assistant"),
    **dict.fromkeys(["model", "bot", "ai", "function_call", "tool_call"], "assistant"),
    **dict.fromkeys(["system", "developer"], "system"),
    **dict.fromkeys(["tool", "function", "observation", "tool_response", "function_response", "ipython"], "tool"),
}

CALL_ROLES = ("function_call", "tool_call")  # whose text is a call in JSON

# Reasons to drop a record, as the report counts them.
NOT_A_RECORD = "not a record"
NO_FIELD = "no conversations or messages"
BAD_PAIR = "`prompt` and `completion` that are neither two texts nor two lists of turns"
EMPTY_RECORD = "empty record"
BROKEN_ID = "an `id` with broken characters"
BAD_TURN = "a turn without role or text"
BAD_HISTORY = "`history` that is no list of pairs"
UNKNOWN_ROLE = "unknown role"
CALL_OF_ANOTHER = "a tool call in a turn that is not the assistant's"
BAD_HTML = "HTML that cannot be read"
EMPTY_TURN = "empty turn"
LATE_SYSTEM = "system turn in the middle"
NO_HUMAN = "no human turn"
NO_ANSWER = "no answer"
NOT_ALTERNATING = "roles do not alternate"
RATE_LIMITED = "the only answer is a service's error message"
DUPLICATE = "duplicate"
REFUSAL = "refusal"
COMPANY_NAME = "company name"
OTHER_LANGUAGE = "other language"

# Changes to a record that is kept.
LEADING_ASSISTANT = "leading assistant turns dropped"
TRAILING_HUMAN = "unanswered last turn dropped"
LONE_SURROGATE = "broken characters replaced"
TOOLS_LEFT_OUT = "descriptions in `tools` left out"
FROM_HTML = "HTML turned into markdown"
CUT_AT_RATE_LIMIT = "cut before a service's error message"
SPLIT = "longer than context_length, split on whole exchanges"

# A reply that is not the model's but a message of the service; from real dumps.
_BUSY = re.compile(
    r"!?\s*(?:too many requests in 1 hour|network error|(?:chatgpt|the (?:model|server)) is (?:at capacity|overloaded)"
    r"|something went wrong|an error occurred\. (?:either|if)|there was an error generating a response"
    r"|only one message at a time|our systems are a bit busy|you['’]ve reached (?:the|our) (?:current )?(?:usage|rate)"
    r"|the server (?:experienced|had) an error|error in (?:body|message) stream|rate limit (?:reached|exceeded))",
    re.IGNORECASE,
)
_BUSY_MAX_LENGTH = 400  # characters; a longer reply that begins like this is *about* such a message

_REFUSAL = re.compile(
    r"\bas an? (?:ai|artificial intelligence|(?:large )?language model)\b|\bi(?:['’]m| am) (?:just )?an? (?:ai|language) "
    r"|\bi(?:['’]m| am) (?:sorry|afraid),? (?:but )?(?:i )?(?:can(?:no|['’])t|am (?:not able|unable))"
    r"|\bi (?:can(?:no|['’])t|am unable to) (?:assist|help|fulfill|comply)",
    re.IGNORECASE,
)
_COMPANY = re.compile(
    r"\b(?:openai|chatgpt|gpt-?[345]|anthropic|claude(?: ai)?|deepmind|google bard|bing chat|microsoft copilot)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class CleanConfig:
    """How conversations are cleaned before training. Texts and tokens are used as they are."""

    html: Literal["detect", "always", "never"] = "detect"
    """Turns converted to markdown: those that are entirely HTML, every turn that contains a tag (raw scrapes), or none."""
    rate_limits: bool = True
    """End a conversation before the first reply that is only the service's message that it is busy or has failed."""
    duplicates: bool = True
    """Drop a conversation whose turns equal those of an earlier one in the same source."""
    split: bool = True
    """Split a conversation longer than context_length between exchanges and repeat the system turn before each part; otherwise
    it is cut at any token. An exchange that is too long by itself is always cut."""
    refusals: bool = False
    """Drop conversations in which the assistant refuses, or calls itself a language model (in English)."""
    company_names: bool = False
    """Drop conversations that name a company that makes assistants, or its assistant."""
    languages: tuple[str, ...] = ()
    """Keep only these languages, as ISO 639-1 codes such as [en, de], detected by py3langid; empty keeps all."""


class Drop(Exception):
    """A record cannot be used; the argument is the reason, as the report counts it."""


class Cleaned(NamedTuple):
    """A record that can be used."""

    id: str
    messages: tuple[Message, ...]
    """[system] user assistant (tool assistant)* user assistant ..."""
    changes: set[str]
    """What was changed, as the report counts it."""
    tools: tuple[dict[str, Any], ...] = ()
    """Descriptions of the tools that the assistant may call."""


@dataclass
class Cleaner:
    """Cleans the records of one source, in order; remembers 16 bytes of each conversation to find duplicates."""

    config: CleanConfig = CleanConfig()
    _seen: set[bytes] = field(default_factory=set)

    def clean(self, record: object) -> Cleaned:
        """Returns the turns of a raw record.

        Args:
            record: a dictionary with `conversations` of from/value, with `messages` of role/content, with a `prompt` and a
                `completion`, or with one exchange in Alpaca's form (`instruction`, perhaps `input`, `output`, and the
                exchanges before it as pairs in `history`); each perhaps with a text `system` and a list `tools`.

        Raises:
            Drop: the record cannot be used.
        """
        if not isinstance(record, dict):
            raise Drop(NOT_A_RECORD)
        record_id = own_id(record)
        turns = _turns(record)
        if not turns:
            raise Drop(EMPTY_RECORD)
        changes: set[str] = set()
        tools = parse_tools(record["tools"]) if record.get("tools") else ()
        if tools is None:
            changes.add(TOOLS_LEFT_OUT)
        messages = [self._message(turn, changes) for turn in turns]
        messages = self._with_system(messages, _first_present(record, "system", "system_prompt"), changes)
        messages = _in_order(messages, changes)
        if self.config.rate_limits:
            messages = _before_rate_limit(messages, changes)
        self._filter(messages)
        messages = _with_call_ids(messages)
        content = json.dumps([_said(message) for message in messages] + [*(tools or ())], ensure_ascii=True)
        digest = hashlib.sha256(content.encode()).digest()[:16]
        if self.config.duplicates:
            if digest in self._seen:
                raise Drop(DUPLICATE)
            self._seen.add(digest)
        return Cleaned(record_id or digest.hex()[:16], tuple(messages), changes, tools or ())

    def _message(self, turn: object, changes: set[str]) -> Message:
        """Returns a raw turn as a message, or raises Drop; adds what it changes to `changes`."""
        if not isinstance(turn, dict):
            raise Drop(BAD_TURN)
        raw_role, content = _first_present(turn, "from", "role"), _joined(_first_present(turn, "value", "content"))
        try:
            raw_calls = _first_present(turn, "tool_calls", "function_call")
            calls = parse_calls(raw_calls) if raw_calls else ()
        except (ValueError, RecursionError) as error:
            raise Drop(str(error)) from None
        if content is None and calls and not isinstance(turn.get("content"), list):
            content = ""
        if not isinstance(raw_role, str):
            raise Drop(BAD_TURN)
        role = ROLES.get(raw_role) or ROLES.get(raw_role.strip().lower())
        if role == "tool" and isinstance(content, dict | list):
            content = json.dumps(content, ensure_ascii=False, default=str)
        if not isinstance(content, str):
            raise Drop(BAD_TURN)
        if role is None:
            raise Drop(UNKNOWN_ROLE)
        if raw_role.strip().lower() in CALL_ROLES and not calls and (calls := parse_call_text(content)):
            content = ""
        if calls and role != "assistant":
            raise Drop(CALL_OF_ANOTHER)
        try:
            content.encode()
        except UnicodeEncodeError:  # half of a surrogate pair such as \ud83d\ude00, which no tokenizer accepts
            content = content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            changes.add(LONE_SURROGATE)
        content = content.strip()
        if self._is_html(content):
            try:
                content = html.to_markdown(content)
            except ValueError:
                raise Drop(BAD_HTML) from None
            changes.add(FROM_HTML)
        # OpenAI's `weight` is 0 or 1; any other number counts as yes.
        train = _first_present(turn, "train", "weight")
        trained = bool(train) if isinstance(train, bool | int | float) else True
        if role != "tool":
            return Message(role, content, trained, calls)
        call_id, name = (_text_field(turn, field) for field in ("tool_call_id", "name"))
        return Message(role, content, trained, tool_call_id=call_id, name=name)

    def _is_html(self, content: str) -> bool:
        if self.config.html == "never":
            return False
        return html.has_tags(content) if self.config.html == "always" else html.is_page(content)

    def _with_system(self, messages: list[Message], system: object, changes: set[str]) -> list[Message]:
        """Puts the record's `system` text first, unless the conversation begins with a system turn of its own."""
        has_turn = messages[0].role == "system"
        if not isinstance(system, str) or (has_turn and messages[0].content):
            return messages
        return [self._message({"role": "system", "content": system}, changes), *messages[has_turn:]]

    def _filter(self, messages: Sequence[Message]) -> None:
        """Raises Drop for what the user's optional filters leave out."""
        config = self.config
        if config.refusals and any(m.role == "assistant" and _REFUSAL.search(m.content) for m in messages):
            raise Drop(REFUSAL)
        if config.company_names and any(_COMPANY.search(m.content) for m in messages):
            raise Drop(COMPANY_NAME)
        if config.languages:
            # A beginning is enough to detect the language, and is clearer without blocks of code.
            text = re.sub(r"```.*?(?:```|\Z)", " ", "\n".join(m.content[:2000] for m in messages[:6]), flags=re.DOTALL)
            if text.strip() and _language_classifier()(text[:4000])[0] not in config.languages:
                raise Drop(OTHER_LANGUAGE)


def _text_field(fields: dict, name: str) -> str | None:
    """Returns a field that is a text without half a surrogate pair, or None."""
    text = fields.get(name)
    return text if isinstance(text, str) and text and not re.search("[\ud800-\udfff]", text) else None


def _said(message: Message) -> tuple:
    """Returns what makes two turns equal: role and text, and the calls of a turn that has some."""
    calls = [call["function"] for call in message.tool_calls]
    return (message.role, message.content, calls) if calls else (message.role, message.content)


def _with_call_ids(messages: list[Message]) -> list[Message]:
    """Gives an id to each call without one, and to each tool's turn without one that of the call which it answers, in order."""
    result: list[Message] = []
    unanswered: list[str] = []
    for turn, message in enumerate(messages):
        if message.tool_calls:
            calls = tuple(
                {**call, "id": call.get("id") or new_id(turn, number, call)} for number, call in enumerate(message.tool_calls)
            )
            unanswered = [call["id"] for call in calls]
            result.append(replace(message, tool_calls=calls))
        elif message.role == "tool" and message.tool_call_id is None and unanswered:
            result.append(replace(message, tool_call_id=unanswered[0]))
        else:
            result.append(message)
        if result[-1].tool_call_id in unanswered:
            unanswered.remove(result[-1].tool_call_id)
    return result


def own_id(record: dict) -> str | None:
    """Returns a record's field `id`; None if it has none. Raises Drop for one that is not Unicode text."""
    record_id = record.get("id")
    if not isinstance(record_id, (str, int)) or record_id == "":
        return None
    try:
        return str(record_id).encode().decode()
    except UnicodeEncodeError:  # half of a surrogate pair, see Cleaner._message
        raise Drop(BROKEN_ID) from None


def _first_present(fields: dict, *names: str) -> object:
    """Returns the first of these fields that is not None; rows of a table have all columns, with None in empty ones."""
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _joined(content: object) -> object:
    """Joins the parts of which OpenAI's contents may consist; returns None if a part is not text."""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") if isinstance(part, dict) else part for part in content]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else None


def _turns(record: dict) -> list:
    for key in ("conversations", "conversation", "messages", "items"):
        if isinstance(record.get(key), list):
            return record[key]
    if record.get("completion") is not None:
        return _pair_turns(record.get("prompt"), record["completion"])
    return _alpaca_turns(record)


def _pair_turns(prompt: object, completion: object) -> list[dict]:
    """Returns the turns of a prompt and its completion, texts or lists of turns; the prompt's are not trained on."""
    if isinstance(prompt, str) and isinstance(completion, str):
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    if not (isinstance(prompt, list) and isinstance(completion, list) and all(isinstance(turn, dict) for turn in prompt)):
        raise Drop(BAD_PAIR)
    return [{**turn, "train": False} for turn in prompt] + completion


def _alpaca_turns(record: dict) -> list[dict]:
    prompt = [record.get("instruction"), record.get("input") or ""]
    if not all(isinstance(text, str) for text in [*prompt, record.get("output")]):
        raise Drop(NO_FIELD)
    history = record.get("history") or []
    if not (isinstance(history, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in history)):
        raise Drop(BAD_HISTORY)
    texts = [text for pair in history for text in pair] + ["\n\n".join(filter(None, prompt)), record["output"]]
    return [{"from": ("user", "assistant")[number % 2], "value": text} for number, text in enumerate(texts)]


def _language_classifier() -> Callable[[str], tuple[str, float]]:
    """Returns a function from a text to its ISO 639-1 code and a score."""
    try:
        from py3langid import classify
    except ImportError:
        raise UserError("data.clean.languages needs py3langid; `pip install py3langid` would work") from None
    return classify


def _in_order(messages: list[Message], changes: set[str]) -> list[Message]:
    """Returns turns in the order [system] user assistant (tool assistant)* user assistant ..., or raises Drop.

    Leading turns of the assistant and trailing turns without an answer are left out.
    """
    system: list[Message] = []
    if messages[0].role == "system":
        # Exports often have an empty system turn; without it, the template uses its default.
        system = [messages[0]] if messages[0].content else []
        messages = messages[1:]
    first = next((i for i, message in enumerate(messages) if message.role != "assistant"), len(messages))
    if first:
        messages = messages[first:]
        changes.add(LEADING_ASSISTANT)
    if not messages:
        raise Drop(NO_HUMAN)
    if any(message.role == "system" for message in messages):
        raise Drop(LATE_SYSTEM)
    if messages[0].role != "user":
        raise Drop(NOT_ALTERNATING)
    may_follow = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}
    for message, following in pairwise(messages):
        if following.role not in may_follow[message.role]:
            raise Drop(NOT_ALTERNATING)
    if any(not message.content and not message.tool_calls for message in messages):
        raise Drop(EMPTY_TURN)
    answered = _up_to_last_answer(messages)
    if not answered:
        raise Drop(NO_ANSWER)
    if len(answered) < len(messages):
        changes.add(TRAILING_HUMAN)
    return system + answered


def _up_to_last_answer(messages: list[Message]) -> list[Message]:
    end = next((i for i in range(len(messages), 0, -1) if messages[i - 1].role == "assistant"), 0)
    return messages[:end]


def _before_rate_limit(messages: list[Message], changes: set[str]) -> list[Message]:
    """Returns the turns before the first reply that is a service's error message, up to the last answer."""
    for index, message in enumerate(messages):
        if message.role == "assistant" and len(message.content) <= _BUSY_MAX_LENGTH and _BUSY.match(message.content):
            changes.add(CUT_AT_RATE_LIMIT)
            answered = _up_to_last_answer(messages[:index])
            if not answered:
                raise Drop(RATE_LIMITED)
            return answered
    return messages
