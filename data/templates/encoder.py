"""Encodes a rendered conversation: finds its control tokens, and which of its ids are trained on."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from data.templates.rendering import Rendered
from data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from data.templates.tracked import Source


class Control(NamedTuple):
    """A control token in a text."""

    start: int
    """Where it begins, with the white space before it that the tokenizer removes."""
    end: int
    token_start: int
    token_end: int
    id: int


class Controls(NamedTuple):
    """The control tokens of a text."""

    controls: list[Control]
    typed: frozenset[str]
    """The texts of control tokens that turns contain and that remain text."""


def find_controls(rendered: Rendered, tokenizer: Tokenizer) -> Controls:
    """Returns the control tokens that the template writes, and those in turns' texts that the template looks for there.

    A control token that is typed in a turn remains text, but for tags that a template handles itself, as Qwen 3's looks for
    </think> in an answer; never BOS, EOS or padding.
    """
    text = rendered.text
    found = [(match.start(), match.end()) for match in tokenizer.typed_pattern.finditer(text)]
    typed: set[str] = set()
    turns = [(at, at + length) for at, length in _turn_ranges(rendered)]
    if found and turns and _any_overlap(found, turns):
        own = []
        for start, end in _template_ranges(rendered, tokenizer):
            for match in tokenizer.typed_pattern.finditer(text[start:end]):
                place = (start + match.start(), start + match.end())
                if match.group() not in _ends_of(tokenizer) or not _any_overlap([place], turns):
                    own.append(place)
        typed = {text[start:end] for start, end in found if not _any_overlap([(start, end)], own)}
        found = own
    controls, previous = [], 0
    for number, (start, end) in enumerate(found):
        token = tokenizer.controls[text[start:end]]
        limit = found[number + 1][0] if number + 1 < len(found) else len(text)
        first = (
            start - (len(text[previous:start]) - len(text[previous:start].rstrip()))
            if token.strips[0]
            else start
        )
        last = (
            end + (len(text[end:limit]) - len(text[end:limit].lstrip())) if token.strips[1] else end
        )
        controls.append(Control(first, last, start, end, token.id))
        previous = last
    return Controls(controls, frozenset(typed))


def _ends_of(tokenizer: Tokenizer) -> tuple[str | None, ...]:
    return tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token


def _turn_ranges(rendered: Rendered) -> Iterator[tuple[int, int]]:
    """Yields (start, length) of the text that comes from turns."""
    at = 0
    for length, source, _ in rendered.runs:
        if source is not None:
            yield at, length
        at += length


def _any_overlap(ranges: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
    """Returns whether one of some ranges overlaps one of some others; both are in order."""
    index = 0
    for start, end in ranges:
        while index < len(others) and others[index][1] <= start:
            index += 1
        if index < len(others) and others[index][0] < end:
            return True
    return False


def _template_ranges(rendered: Rendered, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Returns the ranges of the template's own text, and of tags in turns that it looks for."""
    ranges: list[tuple[int, int]] = []
    handled: dict[int, list[tuple[int, int]]] = {}
    at = 0
    for length, source, offset in rendered.runs:
        parts = [(at, at + length)]
        if source is not None:
            if id(source) not in handled:
                handled[id(source)] = _handled(source, rendered.needles, tokenizer)
            parts = []
            if offset is not None:
                for start, end in handled[id(source)]:
                    low, high = max(start, offset), min(end, offset + length)
                    if low < high:
                        parts.append((at + low - offset, at + high - offset))
        for start, end in parts:
            if ranges and ranges[-1][1] >= start:
                ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
            else:
                ranges.append((start, end))
        at += length
    return ranges


def _handled(
    source: "Source", needles: frozenset[str], tokenizer: Tokenizer
) -> list[tuple[int, int]]:
    """Returns the ranges of a text in which the template found a text with a control token in it.

    Where it looks for one such tag, it means the others that it knows too: Nemotron's looks for <think> in an answer, and only
    in one without it for </think>.
    """
    looked_for = {needle for needle in source.needles if tokenizer.typed_pattern.search(needle)}
    if looked_for:
        looked_for |= {needle for needle in needles if tokenizer.typed_pattern.search(needle)}
    ranges = [
        match.span()
        for needle in looked_for
        for match in re.finditer(re.escape(needle), source.text)
    ]
    return sorted([*source.found, *ranges])


def encode(
    rendered: Rendered,
    controls: Sequence[Control],
    trained: Sequence[tuple[int, int]],
    tokenizer: Tokenizer,
) -> list[tuple[int, bool]]:
    """Returns the ids of a conversation, each with whether it is trained on.

    All text between two control tokens is encoded at once, because tokens form across the border of template and contents
    ("USER:" + " hello"). A token is trained on if any of its characters are.

    Args:
        rendered: the conversation.
        controls: its control tokens.
        trained: the ranges of characters that are trained on, in order.
        tokenizer: the tokenizer.
    """
    ids: list[tuple[int, bool]] = []
    index = 0  # of the first range that does not end before the token

    def is_trained(start: int, end: int) -> bool:
        nonlocal index
        while index < len(trained) and trained[index][1] <= start:
            index += 1
        return index < len(trained) and trained[index][0] < end

    at = 0
    for control in controls:
        for token, start, end in tokenizer.encode_spans(rendered.text[at : control.start], at == 0):
            # A token without characters of its own lies where the next one begins.
            ids.append((token, is_trained(at + start, at + max(end, start + 1))))
        ids.append((control.id, is_trained(control.token_start, control.token_end)))
        at = control.end
    for token, start, end in tokenizer.encode_spans(rendered.text[at:], at == 0):
        ids.append((token, is_trained(at + start, at + max(end, start + 1))))
    return ids
