"""Cleaning, in the spirit of FastChat's and Koala's: a raw record becomes turns in order, or a reason to drop it."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeVar

import numpy as np

from data import html
from data.conversation import Message
from data.errors import UserError

T = TypeVar("T")

# Many spellings are met in public dumps; both key styles use the same table.
SPELLINGS = {
    **dict.fromkeys(["human", "user", "prompter", "person", "customer"], "user"),
    **dict.fromkeys(["gpt", "assistant", "chatgpt", "gpt-3.5", "gpt-4", "bing", "bard", "claude", "gemini"], "assistant"),
    **dict.fromkeys(["model", "bot", "ai", "function_call", "tool_call"], "assistant"),
    **dict.fromkeys(["system", "developer"], "system"),
    **dict.fromkeys(["tool", "function", "observation", "tool_response", "function_response", "ipython"], "tool"),
}

NOT_A_RECORD = "not a record"
NO_FIELD = "no conversations or messages"
EMPTY_RECORD = "empty record"
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

LEADING_ASSISTANT = "leading assistant turns dropped"
TRAILING_HUMAN = "unanswered last turn dropped"
LONE_SURROGATE = "broken characters replaced"
TOOLS_LEFT_OUT = "descriptions in `tools` left out"
FROM_HTML = "HTML turned into markdown"
CUT_AT_RATE_LIMIT = "cut before a busy service's reply"
SPLIT = "longer than context_length, split on whole exchanges"

# A whole reply that is the service speaking, not the model; from real dumps.
_BUSY = re.compile(
    r"!?\s*(?:too many requests in 1 hour|network error|(?:chatgpt|the (?:model|server)) is (?:at capacity|overloaded)"
    r"|something went wrong|an error occurred\. (?:either|if)|there was an error generating a response"
    r"|only one message at a time|our systems are a bit busy|you've reached (?:the|our) (?:current )?(?:usage|rate)"
    r"|the server (?:experienced|had) an error|error in (?:body|message) stream|rate limit (?:reached|exceeded))",
    re.IGNORECASE,
)
_BUSY_AT_MOST = 400  # characters: a longer reply that begins so talks *about* such a message

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
    """What is done to conversations before they are learned from. Texts and tokens are taken as they are."""

    html: Literal["detect", "always", "never"] = "detect"
    """Turns that become markdown: those that are a web page as a whole, every turn with a tag in it (raw scrapes), none."""
    rate_limits: bool = True
    """Ends a conversation before the first reply that is only the service's message that it is busy or failed."""
    duplicates: bool = True
    """Drops a conversation that says word for word what an earlier one of its source says."""
    split: bool = True
    """Splits a conversation longer than context_length on whole exchanges, the last one kept, the system turn before each
    part; else it is cut at any token. An exchange that is too long by itself is always cut."""
    refusals: bool = False
    """Drops conversations in which the assistant refuses, or speaks of itself as a language model (English)."""
    company_names: bool = False
    """Drops conversations that name a company that makes assistants, or its assistant."""
    languages: tuple[str, ...] = ()
    """Languages that are kept, as ISO 639-1 codes such as [en, de], told apart by py3langid; none given keeps all."""


class Drop(Exception):
    """A record cannot be used; the argument is the reason that is counted."""


@dataclass
class Cleaner:
    """Cleans the records of one source, in order: it remembers which conversations it has seen (16 bytes of each)."""

    config: CleanConfig = CleanConfig()
    _seen: set[bytes] = field(default_factory=set)

    def clean(self, record: object) -> tuple[str, tuple[Message, ...], set[str]]:
        """(id, turns in order, what was changed) of a record: `conversations` with from/value, `messages` with role/content,
        or one exchange as Alpaca has it (`instruction`, perhaps `input`, `output`, and the exchanges before it as pairs in
        `history`); perhaps with a text `system` beside them.

        Turns are [system] user assistant (tool assistant)* user assistant ... Raises Drop with the reason.
        """
        if not isinstance(record, dict):
            raise Drop(NOT_A_RECORD)
        turns = _turns(record)
        if not turns:
            raise Drop(EMPTY_RECORD)
        changes: set[str] = set()
        if record.get("tools"):
            changes.add(TOOLS_LEFT_OUT)
        messages = [self._message(turn, changes) for turn in turns]
        beside = _first(record, "system", "system_prompt")
        if isinstance(beside, str) and not (messages[0].role == "system" and messages[0].content):
            messages = [self._message({"role": "system", "content": beside}, changes),
                        *messages[messages[0].role == "system" :]]  # fmt: skip
        messages = _in_order(messages, changes)
        if self.config.rate_limits:
            messages = _before_rate_limit(messages, changes)
        self._filter(messages)
        said = json.dumps([(message.role, message.content) for message in messages], ensure_ascii=True)
        digest = hashlib.sha256(said.encode()).digest()[:16]
        if self.config.duplicates:
            if digest in self._seen:
                raise Drop(DUPLICATE)
            self._seen.add(digest)
        identity = record.get("id")
        if not isinstance(identity, (str, int)) or identity == "":
            identity = digest.hex()[:16]
        return str(identity), tuple(messages), changes

    def _message(self, turn: object, changes: set[str]) -> Message:
        if not isinstance(turn, dict):
            raise Drop(BAD_TURN)
        role, content = _first(turn, "from", "role"), _first(turn, "value", "content")
        if isinstance(content, list):  # OpenAI's parts: only those made of text alone can be learned from
            parts = [part.get("text") if isinstance(part, dict) else part for part in content]
            content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
        if turn.get("tool_calls") or turn.get("function_call"):
            raise Drop(TOOL_CALLS)
        if not isinstance(role, str) or not isinstance(content, str):
            raise Drop(BAD_TURN)
        known = SPELLINGS.get(role) or SPELLINGS.get(role.strip().lower())
        if known is None:
            raise Drop(UNKNOWN_ROLE)
        try:
            content.encode()
        except UnicodeEncodeError:  # half of a \ud83d\ude00 pair: no tokenizer takes it
            content = content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            changes.add(LONE_SURROGATE)
        content = content.strip()
        wanted = self.config.html
        if wanted != "never" and (html.has_tags(content) if wanted == "always" else html.is_page(content)):
            try:
                content = html.to_markdown(content)
            except ValueError:
                raise Drop(BAD_HTML) from None
            changes.add(FROM_HTML)
        # `weight` is OpenAI's (0 or 1); a number is no more than a yes or no here.
        train = _first(turn, "train", "weight")
        return Message(known, content, bool(train) if isinstance(train, bool | int | float) else True)

    def _filter(self, messages: Sequence[Message]) -> None:
        """What users may ask for, and nobody gets unasked."""
        config = self.config
        if config.refusals and any(m.role == "assistant" and _REFUSAL.search(m.content) for m in messages):
            raise Drop(REFUSAL)
        if config.company_names and any(_COMPANY.search(m.content) for m in messages):
            raise Drop(COMPANY_NAME)
        if config.languages:
            # As much as tells a language; code blocks would only blur it.
            text = re.sub(r"```.*?(?:```|\Z)", " ", "\n".join(m.content[:2000] for m in messages[:6]), flags=re.DOTALL)
            if text.strip() and _language()(text[:4000])[0] not in config.languages:
                raise Drop(OTHER_LANGUAGE)


def _first(fields: dict, *names: str) -> object:
    """What the first of these fields holds that there is: rows of a table have all columns, empty ones as None."""
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _turns(record: dict) -> list:
    for key in ("conversations", "conversation", "messages", "items"):
        if isinstance(record.get(key), list):
            return record[key]
    return _alpaca(record)


def _alpaca(record: dict) -> list[dict]:
    asked = [record.get("instruction"), record.get("input") or ""]
    if not all(isinstance(text, str) for text in [*asked, record.get("output")]):
        raise Drop(NO_FIELD)
    exchanges = record.get("history") or []
    if not (isinstance(exchanges, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in exchanges)):
        raise Drop(BAD_HISTORY)
    texts = [text for pair in exchanges for text in pair] + ["\n\n".join(filter(None, asked)), record["output"]]
    return [{"from": ("user", "assistant")[number % 2], "value": text} for number, text in enumerate(texts)]


def _language():
    try:
        from py3langid import classify
    except ImportError:
        raise UserError("data.clean.languages needs py3langid; `pip install py3langid` would work") from None
    return classify


def _in_order(messages: list[Message], changes: set[str]) -> list[Message]:
    """[system] user assistant (tool assistant)* user assistant ...; anything else is a reason to drop."""
    system = []
    if messages[0].role == "system":
        # An empty system turn is common in exports and says nothing: leave it out, the template has its default.
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
    follows = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}
    for before, after in pairwise(messages):
        if after.role not in follows[before.role]:
            raise Drop(NOT_ALTERNATING)
    if any(not message.content for message in messages):
        raise Drop(EMPTY_TURN)
    answered = _up_to_an_answer(messages)
    if not answered:
        raise Drop(NO_ANSWER)
    if len(answered) < len(messages):
        changes.add(TRAILING_HUMAN)
    return system + answered


def _up_to_an_answer(messages: list[Message]) -> list[Message]:
    end = next((i for i in range(len(messages), 0, -1) if messages[i - 1].role == "assistant"), 0)
    return messages[:end]


def _before_rate_limit(messages: list[Message], changes: set[str]) -> list[Message]:
    for place, message in enumerate(messages):
        if message.role == "assistant" and len(message.content) <= _BUSY_AT_MOST and _BUSY.match(message.content):
            changes.add(CUT_AT_RATE_LIMIT)
            kept = _up_to_an_answer(messages[:place])
            if not kept:
                raise Drop(RATE_LIMITED)
            return kept
    return messages


def split(
    messages: Sequence[Message], render: Callable[[Sequence[Message]], T], length: Callable[[T], int], room: int
) -> Iterator[T]:
    """Consecutive parts of whole exchanges, rendered, each as long as `room` allows and at least one exchange; the system
    turn opens each part. Every exchange is in one part, the last one too (FastChat's own splitting loses it at times)."""
    whole = render(messages)
    if length(whole) <= room:
        yield whole
        return
    system = messages[:1] if messages[0].role == "system" else messages[:0]
    starts = [place for place, message in enumerate(messages) if message.role == "user"] + [len(messages)]
    ends = np.cumsum([0, *(len(message.content) for message in messages)])
    typical = length(whole) / ends[-1]  # per character: a first guess, so that a part is rendered two or three times
    at = 0
    while at < len(starts) - 1:
        left = len(starts) - 1 - at
        guess = sum((ends[end] - ends[starts[at]]) * typical <= room for end in starts[at + 1 :])
        least, beyond, step, found = 1, left + 1, 1, None  # `least` exchanges are taken, `beyond` are too many
        while beyond - least > 1:
            exchanges = min(max(guess, least + 1), beyond - 1)
            rendered = render([*system, *messages[starts[at] : starts[at + exchanges]]])
            if length(rendered) <= room:
                least, found = exchanges, rendered
                guess = exchanges + step if beyond == left + 1 else (least + beyond) // 2
            else:
                beyond = exchanges
                guess = exchanges - step if least == 1 else (least + beyond) // 2
            step *= 2
        yield render([*system, *messages[starts[at] : starts[at + 1]]]) if found is None else found
        at += least
