"""A conversation as everything after `data.sources` sees it, whatever file it came from."""

from dataclasses import dataclass

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
    """A whole record: `id` is unique in its source (never a path), `source` the source's number in the recipe."""

    id: str
    messages: tuple[Message, ...]
    source: int = 0
