"""The kinds of records from sources: conversations, plain texts, token ids, preferences and
labelled completions."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int32

ROLES = ("system", "user", "assistant", "tool")
# A template's requirements for turns after a system turn: none, no answer before the first
# question, or `user assistant (tool assistant)* user ...`.
TurnOrder = Literal["any", "question first", "alternating"]
# The default chat template of recipes and sources: the model's.
DEFAULT_TEMPLATE = "tokenizer"
# A recipe's chat template of this ending is a file, which replaces the model's.
TEMPLATE_FILES = (".jinja", ".jinja2", ".j2")

# A Message.reasoning_field: the reasoning is a part of a content, where some templates look for it.
IN_CONTENT = "content"


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str
    train: bool = True
    """Whether an assistant's turn counts in the loss; one of another role, whether it counts if
    everything does."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    """An assistant's calls in OpenAI's form, {"type", "function": {"name", "arguments"}, "id"},
    where arguments are a dictionary."""
    tool_call_id: str | None = None
    """In a tool's turn, the id of the call that it answers."""
    name: str | None = None
    """In a tool's turn, the name of the tool."""
    reasoning: str | None = None
    """An assistant's reasoning, if a record separates it; `reasoning_content` in templates."""
    reasoning_field: str = "reasoning_content"
    """The record's field with the reasoning, or IN_CONTENT; some templates read only
    `reasoning`."""
    fields: tuple[str, ...] = field(default=(), compare=False)
    """The names of the turn's fields in the record's order, if they are OpenAI's: a template that
    writes a whole turn as JSON keeps this order."""
    generated: bool = field(default=False, compare=False)
    """Whether a model generated the content: its tags, such as <tool_call>, are control tokens."""
    in_prompt: bool = field(default=False, compare=False)
    """Whether it is part of the prompt before the completion that is trained on."""

    def __post_init__(self):
        if self.role not in ROLES:
            raise ValueError(f"role {self.role!r} is none of {', '.join(ROLES)}")


def with_last_answer_trained(messages: Sequence[Message]) -> list[Message]:
    """Returns the turns with only the last answer in the loss, if its `train` allows that."""
    last = max(index for index, message in enumerate(messages) if message.role == "assistant")
    return [
        replace(message, train=message.train and index == last)
        for index, message in enumerate(messages)
    ]


def prompt_of(messages: Sequence[Message]) -> Sequence[Message]:
    """Returns a conversation's prompt; empty if the conversation does not complete a prompt."""
    ends = (number for number, message in enumerate(messages, 1) if message.in_prompt)
    return messages[: max(ends, default=0)]


@dataclass(frozen=True)
class _Record:
    """The fields of every record."""

    id: str
    """Identifies the record within its source; never a path."""
    _: KW_ONLY
    source: int = 0
    """Number of the source in the recipe."""
    record: int = 0
    """Number of the record in the source, from 1; 0 if it was not read from a file."""
    file: str = field(default="", compare=False)
    """The file that it was read from; for messages, not part of the data."""
    line: int = field(default=0, compare=False)
    """Its line, row or number in the file, from 1."""


@dataclass(frozen=True)
class Conversation(_Record):
    """A conversation."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """Descriptions of the tools that the assistant may call, in OpenAI's form."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as {"enable_thinking": False}; they override a
    recipe's."""


@dataclass(frozen=True)
class Text(_Record):
    """A plain text, such as a book."""

    text: str
    prompt: int = 0
    """Number of characters at the beginning that are read and not trained on."""


@dataclass(frozen=True)
class Tokens(_Record):
    """An already tokenized document."""

    tokens: Int32[np.ndarray, " n"]
    loss_mask: Bool[np.ndarray, " n"]
    """Whether token i is trained on as a target."""


@dataclass(frozen=True)
class Preference(_Record):
    """A prompt with a chosen and a rejected completion, each as the whole conversation.

    Only the turns of the completions are trained on.
    """

    chosen: Conversation
    rejected: Conversation


@dataclass(frozen=True)
class Labelled(_Record):
    """A conversation whose last turns, the completion, are labelled desirable or not."""

    conversation: Conversation
    desirable: bool


Record = Conversation | Text | Tokens | Preference | Labelled
