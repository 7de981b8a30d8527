"""Strings that record the origin of each character, and meter the work a template does on them.

A chat template is rendered with the contents of turns as `Tracked` strings: however the template
slices, joins or replaces them, the result records which characters are the template's and which are
a turn's. Every operation returns exactly the characters that Python's returns.
"""

import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jinja2 import Undefined

from data.templates.errors import TemplateError
from data.templates.meter import meter
from data.templates.runs import Run, Source, cut, joined, of_turns


def _runs_of(text: str) -> Sequence[Run]:
    if isinstance(text, Tracked):
        return text.runs
    return ((len(text), None, 0),) if text else ()


def concat(pieces: Iterable[str]) -> "Tracked":
    """Returns the concatenated pieces."""
    pieces = list(pieces)
    text = "".join(pieces)
    runs = joined(map(_runs_of, pieces))
    meter.spend(len(text) // 100 + (len(pieces) + len(runs)) // 8)
    return Tracked(text, runs)


class Tracked(str):
    """A str and its runs, whose lengths add up to that of the str."""

    __slots__ = ("runs",)
    runs: Sequence[Run]

    def __new__(cls, text: str, runs: Sequence[Run] | None = None):
        self = super().__new__(cls, text)
        self.runs = _runs_of(text) if runs is None else runs
        return self

    def __str__(self) -> "Tracked":
        return self

    def same(self, text: "Tracked") -> "Tracked":
        """Wraps the result of a method; overridden by `Safe` to mark it as safe."""
        return text

    def _cuts(self, ranges: Iterable[tuple[int, int]]) -> list["Tracked"]:
        """Returns the slices [start, end) for ranges that are in order and do not overlap."""
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
        """Records that the template searches this text for one of its own texts."""
        if needle and not of_turns(_runs_of(needle)):
            for _, source, _ in self.runs:
                if source is not None:
                    source.needles.add(str.__str__(needle))

    def _find_at(self, start: int, end: int, needle: str) -> None:
        """Records that the template found one of its own texts in this range."""
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
        if len(self) > meter.left:  # _cuts would count only after cutting
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

    # Methods that cut.

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
        meter.spend(self._split_cost(sep))
        return self._cut_out(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: int = -1) -> list["Tracked"]:
        meter.spend(self._split_cost(sep))
        return self._cut_out(str.rsplit(self, sep, maxsplit), sep)

    def _split_cost(self, sep: str | None) -> int:
        """Returns the cost of a split: at least the number of parts."""
        return len(self) // 100 + (
            len(self) // 2 if sep is None else str.count(self, sep) if sep else 0
        )

    def _cut_out(self, parts: list[str], sep: str | None) -> list["Tracked"]:
        """Cuts out of this text the parts that a method of str has split it into."""
        if sep is not None:
            self.look_for(sep)
        ranges, position = [], 0
        for part in parts:
            start = str.index(self, part, position) if sep is None else position
            end = start + len(part)
            ranges.append((start, end))
            position = end + len(sep or "")
        return self._cuts(ranges)

    def splitlines(self, keepends: bool = False) -> list["Tracked"]:
        meter.spend(len(self) // 8)
        ranges, start = [], 0
        for with_end, line in zip(
            str.splitlines(self, True), str.splitlines(self, keepends), strict=True
        ):
            ranges.append((start, start + len(line)))
            start += len(with_end)
        return self._cuts(ranges)

    def partition(self, sep: str) -> tuple["Tracked", ...]:
        return self._partition_at(str.find, sep, (self, Tracked(""), Tracked("")))

    def rpartition(self, sep: str) -> tuple["Tracked", ...]:
        return self._partition_at(str.rfind, sep, (Tracked(""), Tracked(""), self))

    def _partition_at(
        self, find: Callable[[str, str], int], sep: str, absent: tuple["Tracked", ...]
    ) -> tuple["Tracked", ...]:
        self.look_for(sep)
        if not sep:
            raise ValueError("empty separator")
        start = find(self, sep)
        end = start + len(sep)
        if start < 0:
            return absent
        return tuple(self._cuts([(0, start), (start, end), (end, len(self))]))

    # Methods that join and replace.

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

    def format(self, /, *values: Any, **named: Any) -> "Tracked":
        """Formats as str.format does; fields may have neither a width nor an attribute."""
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

    # Methods that search.

    def __contains__(self, needle: Any) -> bool:
        if isinstance(needle, str):
            self.look_for(needle)
        return str.__contains__(self, needle)

    def startswith(self, prefix: Any, *borders: int) -> bool:
        for needle in prefix if isinstance(prefix, tuple) else (prefix,):
            if str.startswith(self, needle, *borders):
                if borders:
                    self.look_for(needle)
                else:
                    self._find_at(0, len(needle), needle)
                return True
        return False

    def endswith(self, suffix: Any, *borders: int) -> bool:
        for needle in suffix if isinstance(suffix, tuple) else (suffix,):
            if str.endswith(self, needle, *borders):
                if borders:
                    self.look_for(needle)
                else:
                    self._find_at(len(self) - len(needle), len(self), needle)
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

    # Methods that change case.

    def upper(self) -> "Tracked":
        return self.mapped(str.upper)

    def lower(self) -> "Tracked":
        return self.mapped(str.lower)

    def capitalize(self) -> "Tracked":
        return self.mapped(str.capitalize)

    def title(self) -> "Tracked":
        return self.mapped(str.title)

    def mapped(self, change: Callable[[str], str]) -> "Tracked":
        """Returns the text changed by `change`, which must map it character by character.

        Raises:
          TemplateError: the result has a different length, so its characters have no known origin.
        """
        meter.spend(len(self) // 100)
        text = change(str.__str__(self))
        if len(text) != len(self) and of_turns(self.runs):
            raise TemplateError(
                "the chat template changes the letters of a turn's text into more or fewer "
                "letters, which cannot be tracked"
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

    def _refuse(self, /, *values: Any, **named: Any) -> Tracked:
        raise TemplateError(
            "the chat template modifies a text that it has marked as `safe`, which is not allowed"
        )

    replace = join = format = __mod__ = _refuse


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
            text = concat(_between(Tracked(text)._cut_out(str.split(text, letter), letter), entity))
    return text


def _between(pieces: Sequence[str], text: str) -> Iterator[str]:
    for number, piece in enumerate(pieces):
        if number:
            yield text
        yield piece


def percent(text: Tracked, values: Any) -> Tracked:
    """Returns `text % values`; supports %s, %d and %%."""
    values = iter(values if isinstance(values, tuple) else (values,))
    pieces: list[str] = []
    position = 0
    for match in re.finditer("%(.?)", str.__str__(text), re.DOTALL):
        pieces.append(text[position : match.start()])
        position = match.end()
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
    return concat([*pieces, text[position:]])


class Part(dict[str, Any]):
    """A part of a content, which a template may read but not print as a whole."""


def require_no_part(value: object) -> None:
    """Raises TemplateError for a part of a content, which only its fields' texts may stand for."""
    if isinstance(value, Part):
        raise TemplateError("the chat template prints a content's list of parts")


def text_of(value: Any) -> str:
    """Returns str(value), also tracking the texts inside lists and dictionaries.

    Raises:
      TemplateError: no conversation can contain the value, such as a function.
    """
    if type(value) is Tracked:
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list | tuple | dict):
        parts: list[str] = []
        _represent(value, parts)
        return concat(parts)
    _require_printable(value)
    return str(value)


def _require_printable(value: Any) -> None:
    if value is not None and not isinstance(value, int | float | Undefined | range):
        kind = type(value).__name__
        raise TemplateError(f"the chat template prints a {kind}, which is not allowed")


def _represent(value: Any, parts: list[str]) -> None:
    """Appends the pieces of repr(value) to `parts`."""
    meter.spend(4)
    if isinstance(value, Safe):
        raise TemplateError(
            "the chat template prints a list of texts that it has marked as `safe`, which is not "
            "allowed"
        )
    if isinstance(value, str):
        parts.append(quoted(value, str.__repr__(value), _like_repr))
    elif isinstance(value, dict):
        require_no_part(value)
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
    else:
        _require_printable(value)
        parts.append(repr(value))


def _like_repr(part: str, whole: str) -> str:
    """Returns a part of a text as it appears in the repr of the whole text."""
    # Makes repr choose the same quotes; comes first and is never escaped.
    other = "'" if whole[0] == '"' else '"'
    return str.__repr__(other + part)[2:-1]


def quoted(text: str, whole: str, quote_part: Callable[[str, str], str]) -> str:
    """Returns a quoted text, tracked.

    Args:
      whole: the quoted text.
      quote_part: (part, whole) -> a part of the text as it appears between the quotes.
    """
    meter.spend(1 + len(whole) // 100)
    if not isinstance(text, Tracked):
        return whole
    if len(whole) == len(text) + 2:
        return Tracked(whole, [(1, None, 0), *text.runs, (1, None, 0)])
    runs: list[Run] = [(1, None, 0)]
    parts, start = [whole[0]], 0
    for length, source, _ in text.runs:
        parts.append(quote_part(str.__getitem__(text, slice(start, start + length)), whole))
        runs.append((len(parts[-1]), source, None))
        start += length
    if "".join(parts) + whole[-1] != whole:
        raise TemplateError(
            "the chat template quotes a turn's text in a way that cannot be tracked"
        )
    return Tracked(whole, [*runs, (1, None, 0)])


def track(value: Any, turn: int, field: str, sources: list[Source]) -> Any:
    """Returns a JSON value with all its texts tracked; appends their sources to `sources`."""
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
