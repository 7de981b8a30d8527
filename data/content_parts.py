"""Reads the parts of a turn's content: texts, reasoning and calls, with their flags of the loss."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from data.fields import has_value, is_fraction, loss_flags, shown_fields, unread_of, yes_or_no
from data.printable import printable
from data.reasons import BAD_PART, EMPTY_PART, Drop

_TEXT_KINDS, _THOUGHT_KINDS = ("text", "input_text", "output_text"), ("thinking", "reasoning")
_CALL_KIND = "tool_call"  # the text is a call in JSON, as in a turn of this role
_FIELDS = ("text", "value", "content")  # of the text


class Parts(NamedTuple):
    """The parts of a turn's content."""

    texts: list[str]
    thoughts: list[str]
    """The assistant's reasoning."""
    calls: list[str]
    """The texts of its calls."""
    flags: list[Mapping[str, bool]]
    """For each part with a text, its flags: whether they say that it is trained on."""
    fractions: set[str]
    """Flags that are weights other than 0 and 1."""
    unread: set[str]
    """Unread fields with a value."""

    @property
    def excluding(self) -> set[str]:
        """The flags that exclude a part from the loss."""
        return {name for flags in self.flags for name, in_loss in flags.items() if not in_loss}

    @property
    def is_partly_excluded(self) -> bool:
        """Whether flags exclude some parts and not all."""
        excluded = [not all(flags.values()) for flags in self.flags]
        return any(excluded) and not all(excluded)


def read_parts(parts: Sequence[Any], role: str | None) -> Parts | None:
    """Returns the parts of a content; None for a tool's result with others than texts.

    Raises:
      Drop: a part is neither text nor an assistant's reasoning or call.
    """
    read = Parts([], [], [], [], set(), set())
    for part in ({"text": part} if isinstance(part, str) else part for part in parts):
        kind, name = _kind_of(part, role), _text_field(part)
        if kind is None or name is None:
            if role == "tool":
                return None
            raise Drop(_bad_part(part, kind))
        {"text": read.texts, "thought": read.thoughts, "call": read.calls}[kind].append(part[name])
        flags = loss_flags(part)
        if part[name]:
            read.flags.append(flags)
            read.fractions.update(name for name in flags if flags[name] and is_fraction(part, name))
        known = {"type", name, *flags}
        if role == "assistant" and yes_or_no(part.get("thought")) is not None:
            known.add("thought")
        read.unread.update(unread_of(part, known, "content part's"))
    return read


def _kind_of(part: object, role: str | None) -> str | None:
    """Returns what a part is: a `text`, or an assistant's `thought` or `call`; None for others."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if kind is None or kind in _TEXT_KINDS:  # Gemini's texts say whether they are reasoning
        is_thought = role == "assistant" and yes_or_no(part.get("thought"))
        return "thought" if is_thought else "text"
    if role != "assistant":
        return None
    return "thought" if kind in _THOUGHT_KINDS else "call" if kind == _CALL_KIND else None


def _text_field(part: object) -> str | None:
    """Returns the field of a part's text, None if it has none."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if kind is None:  # any object, such as a row of a tool's result
        names: tuple[str, ...] = ("text",)
    else:
        names = (*_THOUGHT_KINDS, *_FIELDS) if kind in _THOUGHT_KINDS else _FIELDS
    texts = [name for name in names if isinstance(part.get(name), str)]
    return next((name for name in texts if part[name]), texts[0] if texts else None)


def _bad_part(part: object, kind: str | None) -> str:
    """Returns why a part is refused."""
    if isinstance(part, dict) and kind is not None:
        return EMPTY_PART + shown_fields(
            {name: value for name, value in part.items() if has_value(value)}
        )
    shown = part.get("type") if isinstance(part, dict) else None
    return BAD_PART + printable(shown if isinstance(shown, str) else type(part).__name__)[:60]
