"""What a tokenizer needs of a library that encodes texts: one interface for two libraries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Spans(NamedTuple):
    """The tokens of a text and their positions."""

    ids: list[int]
    offsets: Sequence[tuple[int, int]]
    """(start, end) of each token, in characters of the text."""


@dataclass(frozen=True)
class ControlToken:
    """A token that templates may write but text must not become."""

    text: str
    id: int
    strips: tuple[bool, bool] = (False, False)
    """Whether the tokenizer removes white space to the left and right of the token."""


class Engine(Protocol):
    """The interface that Tokenizer needs from a library."""

    def __init__(self, files: dict[str, bytes]):
        """Makes an engine from the contents of a tokenizer's files, by name."""

    controls: dict[str, ControlToken]
    """The control tokens by their text."""
    special_tokens: dict[str, str]
    """Texts of bos_token, eos_token, ..., if the model file names them."""
    vocab_size: int
    """1 + the highest id."""
    named_beside: dict[str, tuple]
    """Tokens by their text that the model file lacks and the files beside it name without an id, or
    with other properties: what encoding depends on, their id first."""

    def token_to_id(self, text: str) -> int | None:
        """Returns the id of the token with exactly this text, or None."""

    def with_control_tokens(self, tokens: list[str]) -> dict[str, bytes]:
        """Returns the model file, by name, with control tokens appended to the vocabulary."""

    def forbid(self, control_ids: set[int]) -> None:
        """Prepares `encode`, which never returns one of these ids."""

    def begins_with(self, bos_id: int, flag: bool | None) -> bool:
        """Returns whether transformers' tokenizer of these files begins a text with BOS.

        Args:
          bos_id: its id.
          flag: `add_bos_token` of its configuration, if present.
        """

    def encode(self, text: str, beginning: bool) -> Spans:
        """Returns the tokens of `text`; `beginning` says whether it begins a document."""

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids that contain no control token."""


def check_no_forbidden(ids: list[int], forbidden: set[int]) -> None:
    """Raises AssertionError if text became a control token, despite `forbid`."""
    if not forbidden.isdisjoint(ids):
        raise AssertionError(f"control ids {forbidden.intersection(ids)} came out of text")
