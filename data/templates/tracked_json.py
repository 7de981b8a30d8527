"""JSON of tracked values, as templates write tools and calls."""

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

from data.templates.meter import meter
from data.templates.tracked import Tracked, concat, quoted, require_no_part


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> Tracked:
    """Returns JSON as transformers' templates write it, without HTML escapes."""
    quote = json.encoder.encode_basestring_ascii if ensure_ascii else json.encoder.encode_basestring
    between, colon = separators or ((", ", ": ") if indent is None else (",", ": "))
    if isinstance(indent, int):
        meter.spend(max(indent, 0) // 10)
        indent = " " * indent
    meter.spend((len(between) + len(colon)) // 10)
    writer = _Writer(quote, between, colon, indent, sort_keys)
    writer.write(value, 0)
    return concat(writer.parts)


@dataclasses.dataclass
class _Writer:
    """Writes values as JSON; the arguments are those of `to_json`."""

    quote: Callable[[str], str]
    between: str
    colon: str
    indent: str | None
    sort_keys: bool
    parts: list[str] = dataclasses.field(default_factory=list)

    def write(self, value: Any, depth: int) -> None:
        """Appends a value that is within `depth` objects and lists."""
        indent = len(self.indent or "") * depth
        meter.spend(4 + (indent + len(self.between) + len(self.colon)) // 50)
        if isinstance(value, str):
            self.parts.append(self._text(value))
        elif isinstance(value, dict | list | tuple):
            self._write_items(value, depth)
        else:
            self.parts.append(json.dumps(value))

    def _write_items(self, value: dict | list | tuple, depth: int) -> None:
        """Appends an object or a list."""
        require_no_part(value)
        is_dict = isinstance(value, dict)
        if not value:
            self.parts.append("{}" if is_dict else "[]")
            return
        line = self._line(depth + 1)
        self.parts.append(("{" if is_dict else "[") + line)
        for number, (key, item) in enumerate(self._pairs(value)):
            if number:
                self.parts.append(self.between + line)
            if is_dict:
                self.parts.extend((self._key(key), self.colon))
            self.write(item, depth + 1)
        self.parts.append(self._line(depth) + ("}" if is_dict else "]"))

    def _pairs(self, value: dict | list | tuple) -> Iterable[tuple[Any, Any]]:
        """Returns the keys and values of an object, or the items of a list, without keys."""
        if not isinstance(value, dict):
            return ((None, item) for item in value)
        return sorted(value.items()) if self.sort_keys else value.items()

    def _line(self, depth: int) -> str:
        """Returns the line end and the indent of an item, if there are any."""
        return "" if self.indent is None else "\n" + self.indent * depth

    def _key(self, key: Any) -> str:
        if isinstance(key, str):
            return self._text(key)
        if key is None or isinstance(key, bool | int | float):
            return f'"{json.dumps(key)}"'
        raise TypeError(f"keys must be str, int, float, bool or None, not {type(key).__name__}")

    def _text(self, value: str) -> str:
        return quoted(value, self.quote(str.__str__(value)), lambda part, _: self.quote(part)[1:-1])
