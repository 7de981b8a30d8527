"""Cleans conversations, similarly to FastChat and Koala: a raw record becomes ordered turns, or is dropped for a reason."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from data import html
from data.conversation import Message
from data.errors import UserError

Rendered = TypeVar("Rendered")

# The names of roles in public dumps, for `from` and for `role`.
ROLES = {
    **dict.fromkeys(["human", "user", "prompter", "person", "customer"], "user"),
    **dict.fromkeys(["gpt", "assistant", "chatgpt", "gpt-3.5", "gpt-4", "bing", "bard", "claude", "gemini"], "assistant"),
    **dict.fromkeys(["model", "bot", "ai", "function_call", "tool_call"], "assistant"),
    **dict.fromkeys(["system", "developer"], "system"),
    **dict.fromkeys(["tool", "function", "observation", "tool_response", "function_response", "ipython"], "tool"),
}

# Reasons to drop a record, as the report counts them.
NOT_A_RECORD = "not a record"
NO_FIELD = "no conversations or messages"
EMPTY_RECORD = "empty record"
BROKEN_ID = "an `id` with broken characters"
BAD_TURN = "a turn without role or text"
TOOL_CALLS = "a turn with `tool_calls`, which are no text"
BAD_HISTORY = "`history` that is no list of pairs"
UNKNOWN_ROLE = "unknown role"
BAD_HTML = "HTML that cannot be read"
EMPTY_TURN = "empty turn"
LATE_SYSTEM = "system turn in the middle"
NO_HUMAN = "no human turn"
NO_ANSWER = "no answer"
NOT_ALTERNATING = "roles do not alternate"
RATE_LIMITED = "no answer but a busy service's"
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
CUT_AT_RATE_LIMIT = "cut before a busy service's reply"
SPLIT = "longer than context_length, split on whole exchanges"

# A reply that is not the model's but a message of the service; from real dumps.
_BUSY = re.compile(
    r"!?\s*(?:too many requests in 1 hour|network error|(?:chatgpt|the (?:model|server)) is (?:at capacity|overloaded)"
    r"|something went wrong|an error occurred\. (?:either|if)|there was an error generating a response"
    r"|only one message at a time|our systems are a bit busy|you've reached (?:the|our) (?:current )?(?:usage|rate)"
    r"|the server (?:experienced|had) an error|error in (?:body|message) stream|rate limit (?:reached|exceeded))",
    re.IGNORECASE,
)
_BUSY_MAX_LENGTH = 400  # characters; a longer reply that begins like this is *about* such a message

_REFUSAL = re.compile(
    r"\bas an? (?:ai|artificial intelligence|(?:large )?language model)\b|\bi(?:'m| am) (?:just )?an? (?:ai|language) "
    r"|\bi(?:'m| am) (?:sorry|afraid),? (?:but )?(?:i )?(?:can(?:no|')t|am (?:not able|unable))"
    r"|\bi (?:can(?:no|')t|am unable to) (?:assist|help|fulfill|comply)",
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


@dataclass
class Cleaner:
    """Cleans the records of one source, in order; remembers 16 bytes of each conversation to find duplicates."""

    config: CleanConfig = CleanConfig()
    _seen: set[bytes] = field(default_factory=set)

    def clean(self, record: object) -> Cleaned:
        """Returns the turns of a raw record.

        Args:
            record: a dictionary with `conversations` of from/value, with `messages` of role/content, or with one exchange in
                Alpaca's form (`instruction`, perhaps `input`, `output`, and the exchanges before it as pairs in `history`);
                each perhaps with a text `system`.

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
        if record.get("tools"):
            changes.add(TOOLS_LEFT_OUT)
        messages = [self._message(turn, changes) for turn in turns]
        messages = self._with_system(messages, _first_present(record, "system", "system_prompt"), changes)
        messages = _in_order(messages, changes)
        if self.config.rate_limits:
            messages = _before_rate_limit(messages, changes)
        self._filter(messages)
        content = json.dumps([(message.role, message.content) for message in messages], ensure_ascii=True)
        digest = hashlib.sha256(content.encode()).digest()[:16]
        if self.config.duplicates:
            if digest in self._seen:
                raise Drop(DUPLICATE)
            self._seen.add(digest)
        return Cleaned(record_id or digest.hex()[:16], tuple(messages), changes)

    def _message(self, turn: object, changes: set[str]) -> Message:
        """Returns a raw turn as a message, or raises Drop; adds what it changes to `changes`."""
        if not isinstance(turn, dict):
            raise Drop(BAD_TURN)
        raw_role, content = _first_present(turn, "from", "role"), _joined(_first_present(turn, "value", "content"))
        if turn.get("tool_calls") or turn.get("function_call"):
            raise Drop(TOOL_CALLS)
        if not isinstance(raw_role, str) or not isinstance(content, str):
            raise Drop(BAD_TURN)
        role = ROLES.get(raw_role) or ROLES.get(raw_role.strip().lower())
        if role is None:
            raise Drop(UNKNOWN_ROLE)
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
        return Message(role, content, bool(train) if isinstance(train, bool | int | float) else True)

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
    return _alpaca_turns(record)


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
    if any(not message.content for message in messages):
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
    """Returns the turns before the first reply that is a message of a busy service, up to the last answer."""
    for index, message in enumerate(messages):
        if message.role == "assistant" and len(message.content) <= _BUSY_MAX_LENGTH and _BUSY.match(message.content):
            changes.add(CUT_AT_RATE_LIMIT)
            answered = _up_to_last_answer(messages[:index])
            if not answered:
                raise Drop(RATE_LIMITED)
            return answered
    return messages


def split(
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], Rendered],
    length: Callable[[Rendered], int],
    max_length: int,
) -> Iterator[Rendered]:
    """Splits a conversation between exchanges into consecutive parts of at most `max_length`, and yields them rendered.

    Each part has as many exchanges as fit, and at least one, even if that is longer; the system turn opens each part. Every
    exchange is in one part, also the last one, which FastChat's own splitting sometimes loses.

    Args:
        messages: a clean conversation.
        render: renders a conversation.
        length: the length of a rendered conversation.
        max_length: how long a part should be at most.
    """
    whole = render(messages)
    if length(whole) <= max_length:
        yield whole
        return
    system = messages[:1] if messages[0].role == "system" else messages[:0]
    starts = [index for index, message in enumerate(messages) if message.role == "user"] + [len(messages)]
    characters = np.cumsum([0, *(len(message.content) for message in messages)])
    length_per_character = length(whole) / characters[-1]

    def render_exchanges(first: int, count: int) -> Rendered:
        return render([*system, *messages[starts[first] : starts[first + count]]])

    first = 0
    while first < len(starts) - 1:
        lengths = (characters[starts[first + 1 :]] - characters[starts[first]]) * length_per_character
        count, part = _largest_part(
            partial(render_exchanges, first), length, max_length,
            guess=int((lengths <= max_length).sum()), available=len(starts) - 1 - first,
        )
        yield part
        first += count


def _largest_part(
    render: Callable[[int], Rendered], length: Callable[[Rendered], int], max_length: int, guess: int, available: int
) -> tuple[int, Rendered]:
    """Returns how many exchanges fit into `max_length`, at least one, and these rendered.

    Gallops from the guess until the number is enclosed, then bisects: with a good guess, two or three renderings.

    Args:
        render: renders the first so many exchanges.
        length: the length of a rendered part.
        max_length: how long the part should be at most.
        guess: an estimate of the number.
        available: how many exchanges there are.
    """
    fits, too_many, step = 1, available + 1, 1
    part = None
    while too_many - fits > 1:
        count = min(max(guess, fits + 1), too_many - 1)
        rendered = render(count)
        if length(rendered) <= max_length:
            fits, part = count, rendered
            guess = count + step if too_many == available + 1 else (fits + too_many) // 2
        else:
            too_many = count
            guess = count - step if fits == 1 else (fits + too_many) // 2
        step *= 2
    return fits, render(1) if part is None else part
