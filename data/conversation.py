"""What sources give: a conversation, a plain text or ready tokens, whatever file it came from."""

from dataclasses import dataclass

import numpy as np

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Message:
    """One turn. `train` says whether an assistant's turn is in the loss; no other role ever is."""

    role: str
    content: str
    train: bool = True

    def __post_init__(self):
        if self.role not in ROLES:
            raise ValueError(f"role {self.role!r} is none of {', '.join(ROLES)}")


@dataclass(frozen=True)
class Conversation:
    """A whole record: `id` is unique in its source (never a path), `source` the source's number in the recipe, `record`
    its place among the source's records, from 1 (0: it came from no file)."""

    id: str
    messages: tuple[Message, ...]
    source: int = 0
    record: int = 0


@dataclass(frozen=True)
class Text:
    """A plain text, such as a book, learned from its first word to its last; id, source and record as above."""

    id: str
    text: str
    source: int = 0
    record: int = 0


@dataclass(frozen=True)
class Tokens:
    """Ready ids: tokens int32 [n], loss_mask bool [n] (is token i a target trained on); the rest as above."""

    id: str
    tokens: np.ndarray
    loss_mask: np.ndarray
    source: int = 0
    record: int = 0
