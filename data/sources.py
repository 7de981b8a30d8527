"""Files of conversations: which there are, and how a record becomes a clean Conversation or a counted reason."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from data.conversation import Conversation, Message
from data.errors import UserError
from data.records import WOULD_WORK, read_records
from data.report import Report, SourceReport

FORMATS = ("sharegpt",)

# Six and more spellings are met in public dumps; both key styles use the same table.
SPELLINGS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
}

NOT_A_RECORD = "not a record"
NO_FIELD = "no conversations or messages"
EMPTY_RECORD = "empty record"
BAD_TURN = "a turn without role or text"
UNKNOWN_ROLE = "unknown role"
EMPTY_TURN = "empty turn"
LATE_SYSTEM = "system turn in the middle"
NO_HUMAN = "no human turn"
NO_ANSWER = "no answer"
NOT_ALTERNATING = "roles do not alternate"

LEADING_ASSISTANT = "leading assistant turns dropped"
TRAILING_HUMAN = "unanswered last turn dropped"
LONE_SURROGATE = "broken characters replaced"


@dataclass(frozen=True)
class Source:
    """One file of a recipe's `data.sources`.

    path: a JSON list or JSON lines of ShareGPT-like records. format: `sharegpt` (`conversations` with from/value, or
    `messages` with role/content). template: `vicuna_v1.1`, or `tokenizer` for the tokenizer's own. weight: how often
    each of its documents is seen in an epoch, on average (0.5: half of them, other ones each epoch).
    """

    path: str
    format: str = "sharegpt"
    template: str = "vicuna_v1.1"
    weight: float = 1.0

    def __post_init__(self):
        if self.format not in FORMATS:
            raise UserError(f"data.sources: format {self.format!r} is unknown; {', '.join(FORMATS)} would work")
        if not 0 < self.weight < float("inf"):
            raise UserError(f"data.sources: weight {self.weight} of {self.path} must be a number above 0")


class _Drop(Exception):
    """A record cannot be used; the argument is the reason that is counted."""


def read(
    source: Source, report: Report, number: int = 0, advance: Callable[[int], None] | None = None
) -> Iterator[Conversation]:
    """Streams the source's usable conversations; `report` accounts for every record, used or not.

    number is the source's place in the recipe, advance(bytes) is told what was read. Raises UserError when the file
    is missing, empty or no JSON, and, at its end, when not one of its records was usable (with the reasons' counts).
    """
    account = report.open(str(source.path))
    path = Path(source.path).expanduser()
    for record in read_records(path, account, advance):
        try:
            conversation = _clean(record, number, account)
        except _Drop as drop:
            account.drop(str(drop))
        else:
            account.keep()
            yield conversation
    if not account.records:
        raise UserError(f"{source.path}: a JSON list without records; {WOULD_WORK}")
    if not account.kept:
        raise UserError(
            f"{source.path}: none of its {account.records} records is a usable conversation ({account.reasons()}); "
            "records with turns human, gpt, human, gpt, ... would work"
        )


def _clean(record: object, number: int, account: SourceReport) -> Conversation:
    if not isinstance(record, dict):
        raise _Drop(NOT_A_RECORD)
    turns = next((record[key] for key in ("conversations", "messages") if isinstance(record.get(key), list)), None)
    if turns is None:
        raise _Drop(NO_FIELD)
    if not turns:
        raise _Drop(EMPTY_RECORD)
    changes = set()
    messages = [_message(turn, changes) for turn in turns]
    messages = _in_order(messages, changes)
    account.repaired.update(changes)
    identity = record.get("id")
    if not isinstance(identity, (str, int)) or identity == "":
        said = json.dumps([(message.role, message.content) for message in messages], ensure_ascii=True)
        identity = hashlib.sha256(said.encode()).hexdigest()[:16]
    return Conversation(str(identity), tuple(messages), number)


def _message(turn: object, changes: set) -> Message:
    if not isinstance(turn, dict):
        raise _Drop(BAD_TURN)
    role, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if isinstance(content, list):  # OpenAI's parts: only those made of text alone can be learned from
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(role, str) or not isinstance(content, str):
        raise _Drop(BAD_TURN)
    known = SPELLINGS.get(role.strip().lower())
    if known is None:
        raise _Drop(UNKNOWN_ROLE)
    try:
        content.encode()
    except UnicodeEncodeError:  # half of a \ud83d\ude00 pair: no tokenizer takes it
        content = content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        changes.add(LONE_SURROGATE)
    train = turn.get("train", True)
    return Message(known, content.strip(), train if isinstance(train, bool) else True)


def _in_order(messages: list[Message], changes: set) -> list[Message]:
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
        raise _Drop(NO_HUMAN)
    if any(message.role == "system" for message in messages):
        raise _Drop(LATE_SYSTEM)
    if messages[0].role != "user":
        raise _Drop(NOT_ALTERNATING)
    follows = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}
    for before, after in pairwise(messages):
        if after.role not in follows[before.role]:
            raise _Drop(NOT_ALTERNATING)
    if any(not message.content for message in messages):
        raise _Drop(EMPTY_TURN)
    while messages and messages[-1].role != "assistant":
        messages = messages[:-1]
        changes.add(TRAILING_HUMAN)
    if not messages:
        raise _Drop(NO_ANSWER)
    return system + messages
