"""Strings that know the origin of each character, and how much work a template has done on them.

A chat template is rendered with the real contents of turns as `Tracked` strings: whatever the
template cuts out of them, joins or replaces, the result still says which characters are the
template's and which are a turn's. Every operation has the result of Python's own, character for
character.
"""

import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from jinja2 import Undefined

from data.templates.errors import TemplateError
from data.templates.meter import meter
from data.templates.runs import Run, Source, cut, joined, of_turns


def _runs_of(text: str) -> Sequence[Run]:
    if isinstance(text, Tracked):
        return text.runs
    return ((len(text), None, 0),) if text else ()


def concat(pieces: Iterable[str]) -> "Tracked":
    """Returns the pieces as one text."""
    pieces = list(pieces)
    text = "".join(pieces)
    runs = joined(map(_runs_of, pieces))
    meter.spend(len(text) // 100 + (len(pieces) + len(runs)) // 8)
    return Tracked(text, runs)


class Tracked(str):
    """A str with its runs, whose lengths add up to its own."""

    __slots__ = ("runs",)
    runs: Sequence[Run]

    def __new__(cls, text: str, runs: Sequence[Run] | None = None):
        self = super().__new__(cls, text)
        self.runs = _runs_of(text) if runs is None else runs
        return self

    def __str__(self) -> "Tracked":
        return self

    def same(self, text: "Tracked") -> "Tracked":
        """Returns a result of a method, which `Safe` marks as safe."""
        return text

    def _cuts(self, ranges: Iterable[tuple[int, int]]) -> list["Tracked"]:
        """Returns the parts of these ranges (start, end), which are in order and do not overlap."""
        ranges, plain = list(ranges), str.__getitem__
        pieces = [
            self.same(Tracked(plain(self, slice(start, end)), runs))
            for (start, end), runs in zip(ranges, cut(self.runs, ranges), strict=True)
        ]
        meter.spend(len(self) // 100 + len(pieces) + len(self.runs) // 8)
        return pieces

    def _cut(self, start: int, end: int) -> "Tracked":
        if start == 0 and end == len(self):
            return self
        return self._cuts([(start, max(start, end))])[0]

    def look_for(self, needle: str) -> None:
        """Notes that the template looks for one of its texts in this one."""
        if needle and not of_turns(_runs_of(needle)):
            for _, source, _ in self.runs:
                if source is not None:
                    source.needles.add(str.__str__(needle))

    def _find_at(self, start: int, end: int, needle: str) -> None:
        """Notes that the template found one of its texts at one place."""
        if not of_turns(_runs_of(needle)):
            for length, source, offset in cut(self.runs, [(start, end)])[0]:
                if source is not None and offset is not None:
                    source.found.append((offset, offset + length))

    def __getitem__(self, key: Any) -> "Tracked":
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step == 1:
                return self._cut(start, max(start, stop))
            return self.same(concat(self._character(number) for number in range(start, stop, step)))
        return self._character(range(len(self))[key])

    def _character(self, number: int) -> "Tracked":
        return self._cut(number, number + 1)

    def __iter__(self) -> Iterator["Tracked"]:
        if len(self) > meter.left:  # counted as it is cut, which would come too late
            meter.spend(len(self))
        return iter(self._cuts((number, number + 1) for number in range(len(self))))

    def __reversed__(self) -> Iterator["Tracked"]:
        return reversed(list(iter(self)))

    def __add__(self, other: Any) -> "Tracked":
        return concat([self, other]) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> "Tracked":
        return concat([other, self]) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: Any) -> "Tracked":
        if not isinstance(count, int):
            return NotImplemented
        meter.spend(
            (len(self) // 100 + len(self.runs) + 1) * max(count, 0) // 8
            + len(self) * max(count, 0) // 100
        )
        return self.same(concat([self] * count))

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> "Tracked":
        return percent(self, values)

    # Methods by which templates cut.

    def strip(self, chars: str | None = None) -> "Tracked":
        left = len(self) - len(str.lstrip(self, chars))
        return self._cut(left, left + len(str.strip(self, chars)))

    def lstrip(self, chars: str | None = None) -> "Tracked":
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None) -> "Tracked":
        return self._cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str) -> "Tracked":
        return self._cut(len(prefix), len(self)) if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> "Tracked":
        return self._cut(0, len(self) - len(suffix)) if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: int = -1) -> list["Tracked"]:
        meter.spend(self._parts(sep))
        return self._where(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: int = -1) -> list["Tracked"]:
        meter.spend(self._parts(sep))
        return self._where(str.rsplit(self, sep, maxsplit), sep)

    def _parts(self, sep: str | None) -> int:
        """Returns at most how many parts a text is split into."""
        return len(self) // 100 + (
            len(self) // 2 if sep is None else str.count(self, sep) if sep else 0
        )

    def _where(self, parts: list[str], sep: str | None) -> list["Tracked"]:
        """Returns the parts that a method of str has split this text into, cut out of it."""
        if sep is not None:
            self.look_for(sep)
        ranges, at = [], 0
        for part in parts:
            start = str.index(self, part, at) if sep is None else at
            at = start + len(part)
            ranges.append((start, at))
            at += len(sep or "")
        return self._cuts(ranges)

    def splitlines(self, keepends: bool = False) -> list["Tracked"]:
        meter.spend(len(self) // 8)
        ranges, at = [], 0
        for whole, part in zip(
            str.splitlines(self, True), str.splitlines(self, keepends), strict=True
        ):
            ranges.append((at, at + len(part)))
            at += len(whole)
        return self._cuts(ranges)

    def partition(self, sep: str) -> tuple["Tracked", ...]:
        self.look_for(sep)
        return (
            self._three(sep, str.find(self, sep), (self, Tracked(""), Tracked("")))
            if sep
            else self._empty_separator()
        )

    def rpartition(self, sep: str) -> tuple["Tracked", ...]:
        self.look_for(sep)
        return (
            self._three(sep, str.rfind(self, sep), (Tracked(""), Tracked(""), self))
            if sep
            else self._empty_separator()
        )

    def _empty_separator(self) -> NoReturn:
        raise ValueError("empty separator")

    def _three(self, sep: str, start: int, absent: tuple["Tracked", ...]) -> tuple["Tracked", ...]:
        end = start + len(sep)
        return (
            absent if start < 0 else tuple(self._cuts([(0, start), (start, end), (end, len(self))]))
        )

    # Methods by which templates join and replace.

    def replace(self, old: str, new: str, count: int = -1) -> "Tracked":
        if not old:
            raise TemplateError("the chat template replaces an empty text, which is not allowed")
        self.look_for(old)
        if old not in self or not count:
            return self
        times = str.count(self, old)
        meter.spend((len(self) + times * len(new)) // 100 + times * (1 + len(_runs_of(new)) // 8))
        return self.same(Tracked(new).join(self.split(old, count)))

    def join(self, parts: Iterable[Any]) -> "Tracked":
        joined: list[str] = []
        for number, part in enumerate(parts):
            if not isinstance(part, str):
                raise TypeError(
                    f"sequence item {number}: expected str instance, {type(part).__name__} found"
                )
            meter.spend(1 + len(part) // 100 + len(self) // 100)
            if number:
                joined.append(self)
            joined.append(part)
        return self.same(concat(joined))

    def format(self, *values: Any, **named: Any) -> "Tracked":
        """Returns str.format's result for fields without widths and attributes."""
        pieces: list[str] = []
        numbers = iter(range(len(values)))
        for text, field, spec, conversion in string.Formatter().parse(self):
            pieces.append(Tracked(text))
            if field is None:
                continue
            if spec or conversion or not re.fullmatch(r"\d{0,3}|[A-Za-z]\w*", field):
                raise TemplateError(
                    "the chat template formats a text with a width or an attribute, which is not "
                    "allowed"
                )
            value = (
                named[field]
                if field.isidentifier()
                else values[int(field) if field else next(numbers)]
            )
            pieces.append(text_of(value))
        return concat(pieces)

    # Methods by which templates look.

    def __contains__(self, needle: Any) -> bool:
        if isinstance(needle, str):
            self.look_for(needle)
        return str.__contains__(self, needle)

    def startswith(self, prefix: Any, *borders: int) -> bool:
        for needle in prefix if isinstance(prefix, tuple) else (prefix,):
            if str.startswith(self, needle, *borders):
                self._find_at(0, len(needle), needle) if not borders else self.look_for(needle)
                return True
        return False

    def endswith(self, suffix: Any, *borders: int) -> bool:
        for needle in suffix if isinstance(suffix, tuple) else (suffix,):
            if str.endswith(self, needle, *borders):
                self._find_at(
                    len(self) - len(needle), len(self), needle
                ) if not borders else self.look_for(needle)
                return True
        return False

    def find(self, needle: str, *borders: int) -> int:
        self.look_for(needle)
        return str.find(self, needle, *borders)

    def rfind(self, needle: str, *borders: int) -> int:
        self.look_for(needle)
        return str.rfind(self, needle, *borders)

    def index(self, needle: str, *borders: int) -> int:
        self.look_for(needle)
        return str.index(self, needle, *borders)

    def count(self, needle: str, *borders: int) -> int:
        self.look_for(needle)
        return str.count(self, needle, *borders)

    # Methods that change letters.

    def upper(self) -> "Tracked":
        return self.mapped(str.upper)

    def lower(self) -> "Tracked":
        return self.mapped(str.lower)

    def capitalize(self) -> "Tracked":
        return self.mapped(str.capitalize)

    def title(self) -> "Tracked":
        return self.mapped(str.title)

    def mapped(self, change: Callable[[str], str]) -> "Tracked":
        """Returns `change` of this text, which gives a letter for a letter.

        Raises:
          TemplateError: the result has another length, so that its letters cannot be matched.
        """
        meter.spend(len(self) // 100)
        text = change(str.__str__(self))
        if len(text) != len(self) and of_turns(self.runs):
            raise TemplateError(
                "the chat template changes the letters of a turn's text into others, which cannot "
                "be followed"
            )
        return self.same(Tracked(text, self.runs if len(text) == len(self) else None))


class Safe(Tracked):
    """A text that a template marked as `safe`; text added to it is escaped, as in Jinja."""

    __slots__ = ()

    def __str__(self) -> Tracked:
        return Tracked(str.__str__(self), self.runs)

    def same(self, text: Tracked) -> "Safe":
        return Safe(str.__str__(text), text.runs)

    def __add__(self, other: Any) -> Tracked:
        return (
            self.same(concat([self, _escaped(other)])) if isinstance(other, str) else NotImplemented
        )

    def __radd__(self, other: Any) -> Tracked:
        return (
            self.same(concat([_escaped(other), self])) if isinstance(other, str) else NotImplemented
        )

    def _not_followed(self, *values: Any, **named: Any) -> Tracked:
        raise TemplateError(
            "the chat template changes a text that it has marked as `safe`, which is not allowed"
        )

    replace = join = format = __mod__ = _not_followed


def _escaped(text: str) -> str:
    if isinstance(text, Safe):
        return text
    for letter, entity in (
        ("&", "&amp;"),
        (">", "&gt;"),
        ("<", "&lt;"),
        ("'", "&#39;"),
        ('"', "&#34;"),
    ):
        if letter in str.__str__(text):
            text = concat(_between(Tracked(text)._where(str.split(text, letter), letter), entity))
    return text


def _between(pieces: Sequence[str], text: str) -> Iterator[str]:
    for number, piece in enumerate(pieces):
        if number:
            yield text
        yield piece


def percent(text: Tracked, values: Any) -> Tracked:
    """Returns `text % values` for the formats %s, %d and %%."""
    values = iter(values if isinstance(values, tuple) else (values,))
    pieces: list[str] = []
    at = 0
    for match in re.finditer("%(.?)", str.__str__(text), re.DOTALL):
        pieces.append(text[at : match.start()])
        at = match.end()
        if match[1] == "%":
            pieces.append("%")
        elif match[1] in ("s", "d"):
            try:
                value = next(values)
            except StopIteration:
                raise TypeError("not enough arguments for format string") from None
            pieces.append(text_of(value) if match[1] == "s" else "%d" % value)  # noqa: UP031 - only of numbers
        else:
            raise TemplateError(
                "the chat template formats a text by % with a width or a kind other than %s and "
                "%d, which is not allowed"
            )
    if next(values, values) is not values:
        raise TypeError("not all arguments converted during string formatting")
    return concat([*pieces, text[at:]])


def text_of(value: Any) -> str:
    """Returns str(value), which for lists and dictionaries still knows where their texts came from.

    Raises:
      TemplateError: it is a value that no conversation contains, such as a function.
    """
    if type(value) is Tracked:
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list | tuple | dict):
        parts: list[str] = []
        _represent(value, parts)
        return concat(parts)
    if value is None or isinstance(value, bool | int | float | Undefined | range):
        return str(value)
    raise TemplateError(f"the chat template prints a {type(value).__name__}, which is not allowed")


def _represent(value: Any, parts: list[str]) -> None:
    """Adds the parts of repr(value) to a list."""
    meter.spend(4)
    if isinstance(value, Safe):
        raise TemplateError(
            "the chat template prints a list of texts that it has marked as `safe`, which is not "
            "allowed"
        )
    if isinstance(value, str):
        parts.append(quoted(value, str.__repr__(value), _like_repr))
    elif isinstance(value, dict):
        parts.append("{")
        for number, (key, item) in enumerate(value.items()):
            if number:
                parts.append(", ")
            _represent(key, parts)
            parts.append(": ")
            _represent(item, parts)
        parts.append("}")
    elif isinstance(value, list | tuple):
        parts.append("[" if isinstance(value, list) else "(")
        for number, item in enumerate(value):
            if number:
                parts.append(", ")
            _represent(item, parts)
        parts.append("]" if isinstance(value, list) else ",)" if len(value) == 1 else ")")
    elif value is None or isinstance(value, bool | int | float | Undefined | range):
        parts.append(repr(value))
    else:
        raise TemplateError(
            f"the chat template prints a {type(value).__name__}, which is not allowed"
        )


def _like_repr(part: str, whole: str) -> str:
    """Returns the letters of a part as they are in the representation of a whole text."""
    other = (
        "'" if whole[0] == '"' else '"'
    )  # makes repr choose the same quotes; stands first, and is never escaped
    return str.__repr__(other + part)[2:-1]


def quoted(text: str, whole: str, quote_part: Callable[[str, str], str]) -> str:
    """Returns a text in quotes, tracked.

    Args:
      text: the text.
      whole: the text in quotes.
      quote_part: (part, whole) -> the letters of a part of the text as they stand within the
        quotes.
    """
    meter.spend(1 + len(whole) // 100)
    if not isinstance(text, Tracked):
        return whole
    if len(whole) == len(text) + 2:
        return Tracked(whole, [(1, None, 0), *text.runs, (1, None, 0)])
    pieces: list[Run] = [(1, None, 0)]
    letters, at = [whole[0]], 0
    for length, source, _ in text.runs:
        letters.append(quote_part(str.__getitem__(text, slice(at, at + length)), whole))
        pieces.append((len(letters[-1]), source, None))
        at += length
    if "".join(letters) + whole[-1] != whole:
        raise TemplateError(
            "the chat template quotes a turn's text in a way that cannot be followed"
        )
    return Tracked(whole, [*pieces, (1, None, 0)])


def track(value: Any, turn: int, field: str, sources: list[Source]) -> Any:
    """Returns a JSON value with all its texts tracked; adds their sources to `sources`."""
    if isinstance(value, str):
        source = Source(turn, field, value)
        sources.append(source)
        return Tracked(value, ((len(value), source, 0),) if value else ())
    if isinstance(value, dict):
        return {
            track(key, turn, field, sources): track(item, turn, field, sources)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [track(item, turn, field, sources) for item in value]
    return value
