"""Tokens of a text with their positions, and control tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


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
    special: bool = True
    """Whether decoded answers omit it, as with transformers' skip_special_tokens; false for tags
    such as <think> and <tool_call>."""


def check_no_forbidden(ids: list[int], forbidden: set[int]) -> None:
    """Raises AssertionError if text became a control token, despite `forbid`."""
    if not forbidden.isdisjoint(ids):
        raise AssertionError(f"control ids {forbidden.intersection(ids)} came out of text")
