"""Encodes a rendered conversation: finds its control tokens, and which ids are trained on."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from data.templates.rendering import Rendered
from data.templates.runs import Source
from data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Segment:
    """Consecutive ids that are all trained on, or all not."""

    ids: tuple[int, ...]
    train: bool
    """Whether these ids, as targets, count in the loss."""


class Control(NamedTuple):
    """A control token in a text."""

    start: int
    """Where it begins, including white space before it that the tokenizer removes."""
    end: int
    token_start: int
    token_end: int
    id: int


class Controls(NamedTuple):
    """The control tokens of a text."""

    controls: list[Control]
    typed: frozenset[str]
    """Texts of control tokens in turns that remain text."""


def find_controls(
    rendered: Rendered, tokenizer: Tokenizer, generated: Collection[int] = ()
) -> Controls:
    """Returns the control tokens of the template, and those in turns that the template looks for.

    A control token typed in a turn remains text, except for tags that a template handles itself, as
    Qwen 3's looks for </think> in an answer; never BOS, EOS or padding.

    Args:
      generated: the numbers of turns whose tags are control tokens unless they are special.
    """
    text = rendered.text
    found = [(match.start(), match.end()) for match in tokenizer.typed_pattern.finditer(text)]
    typed: set[str] = set()
    turns = list(_turn_ranges(rendered))
    if found and turns and _any_overlap(found, turns):
        own = []
        for start, end in _template_ranges(rendered, tokenizer, generated):
            for match in tokenizer.typed_pattern.finditer(text[start:end]):
                span = (start + match.start(), start + match.end())
                if match.group() not in _ends_of(tokenizer) or not _any_overlap([span], turns):
                    own.append(span)
        typed = {text[start:end] for start, end in found if not _any_overlap([(start, end)], own)}
        found = own
    controls, previous = [], 0
    for number, (start, end) in enumerate(found):
        token = tokenizer.controls[text[start:end]]
        limit = found[number + 1][0] if number + 1 < len(found) else len(text)
        first = previous + len(text[previous:start].rstrip()) if token.strips[0] else start
        last = limit - len(text[end:limit].lstrip()) if token.strips[1] else end
        controls.append(Control(first, last, start, end, token.id))
        previous = last
    return Controls(controls, frozenset(typed))


def _ends_of(tokenizer: Tokenizer) -> tuple[str | None, ...]:
    return tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token


def _turn_ranges(rendered: Rendered) -> Iterator[tuple[int, int]]:
    """Yields the ranges of the text that come from turns."""
    at = 0
    for length, source, _ in rendered.runs:
        if source is not None:
            yield at, at + length
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


def _template_ranges(
    rendered: Rendered, tokenizer: Tokenizer, generated: Collection[int]
) -> list[tuple[int, int]]:
    """Returns the ranges of the template's own text, of tags in turns that it looks for, and of
    tags in turns that a model generated."""
    ranges: list[tuple[int, int]] = []
    handled: dict[int, list[tuple[int, int]]] = {}
    at = 0
    for length, source, offset in rendered.runs:
        parts = [(at, at + length)]
        if source is not None:
            if id(source) not in handled:
                handled[id(source)] = _handled(source, rendered.needles, tokenizer)
                if source.turn in generated:
                    tags = _tags(source.text, tokenizer)
                    handled[id(source)] = sorted([*handled[id(source)], *tags])
            parts = []
            if offset is not None:
                for start, end in handled[id(source)]:
                    low, high = max(start, offset), min(end, offset + length)
                    if low < high:
                        parts.append((at + low - offset, at + high - offset))
        for start, end in parts:
            _add_range(ranges, start, end)
        at += length
    return ranges


def _handled(
    source: Source, needles: frozenset[str], tokenizer: Tokenizer
) -> list[tuple[int, int]]:
    """Returns the ranges of a text where the template found a text containing a control token.

    If it looks for one such tag, its other known tags count too: Nemotron's looks for <think> in an
    answer, and for </think> only in one without it.
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


def _tags(text: str, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Returns the ranges of control tokens in a text that are not special."""
    return [
        match.span()
        for match in tokenizer.typed_pattern.finditer(text)
        if not tokenizer.controls[match.group()].special
    ]


def encode(
    rendered: Rendered,
    controls: Sequence[Control],
    trained: Sequence[tuple[int, int]],
    tokenizer: Tokenizer,
) -> list[Segment]:
    """Returns the ids of a conversation, in segments that are trained on or not.

    All text between two control tokens is encoded at once, because tokens form across the border of
    template and contents ("USER:" + " hello"). A token is trained on if any of its characters are.

    Args:
      controls: its control tokens.
      trained: the ranges of characters that are trained on, in order.
    """
    ids: list[int] = []
    ranges: list[tuple[int, int]] = []  # of ids that are trained on
    at = 0
    for control in controls:
        _add_text(rendered.text, at, control.start, trained, tokenizer, ids, ranges)
        if overlapping(trained, control.token_start, control.token_end):
            _add_range(ranges, len(ids), len(ids) + 1)
        ids.append(control.id)
        at = control.end
    _add_text(rendered.text, at, len(rendered.text), trained, tokenizer, ids, ranges)
    return _segments(ids, ranges)


def _add_text(
    text: str,
    start: int,
    end: int,
    trained: Sequence[tuple[int, int]],
    tokenizer: Tokenizer,
    ids: list[int],
    ranges: list[tuple[int, int]],
) -> None:
    """Appends the ids of text[start:end], and which of them are trained on."""
    spans = tokenizer.encode_spans(text[start:end], start == 0)
    first = len(ids)
    ids += spans.ids
    for low, high in overlapping(trained, start, end):
        # A token without characters is placed where the next one begins.
        begin = bisect_right(spans.offsets, low - start, key=lambda at: max(at[1], at[0] + 1))
        stop = bisect_left(spans.offsets, high - start, lo=begin, key=lambda at: at[0])
        _add_range(ranges, first + begin, first + stop)


def overlapping(
    ranges: Sequence[tuple[int, int]], start: int, end: int
) -> Sequence[tuple[int, int]]:
    """Returns the ranges, given in order, that overlap start:end."""
    first = bisect_right(ranges, start, key=lambda part: part[1])
    return ranges[first : bisect_left(ranges, end, lo=first, key=lambda part: part[0])]


def _add_range(ranges: list[tuple[int, int]], start: int, end: int) -> None:
    """Appends a range, or extends the last one, which it may touch or overlap."""
    if ranges and start <= ranges[-1][1]:
        ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
    elif start < end:
        ranges.append((start, end))


def _segments(ids: list[int], ranges: Sequence[tuple[int, int]]) -> list[Segment]:
    """Returns ids in segments; those in the ranges are trained on."""
    segments: list[Segment] = []
    at = 0
    for start, end in ranges:
        if start > at:
            segments.append(Segment(tuple(ids[at:start]), False))
        segments.append(Segment(tuple(ids[start:end]), True))
        at = end
    if at < len(ids):
        segments.append(Segment(tuple(ids[at:]), False))
    return segments
