"""JSON of tracked values, as templates write tools and calls."""

import json
from collections.abc import Iterable
from typing import Any

from data.templates.meter import meter
from data.templates.tracked import Tracked, concat, quoted


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

    def text(value: str) -> str:
        return quoted(value, quote(str.__str__(value)), lambda part, _: quote(part)[1:-1])

    def key_text(key: Any) -> str:
        if isinstance(key, str):
            return text(key)
        if key is None or isinstance(key, bool | int | float):
            return f'"{json.dumps(key)}"'
        raise TypeError(f"keys must be str, int, float, bool or None, not {type(key).__name__}")

    parts: list[str] = []

    def write(value: Any, depth: int) -> None:
        meter.spend(4 + (len(indent or "") * depth + len(between) + len(colon)) // 50)
        if isinstance(value, str):
            parts.append(text(value))
        elif isinstance(value, dict | list | tuple):
            is_dict = isinstance(value, dict)
            if not value:
                parts.append("{}" if is_dict else "[]")
                return
            line = "" if indent is None else "\n" + indent * (depth + 1)
            parts.append(("{" if is_dict else "[") + line)
            items: Iterable[Any] = value
            if isinstance(value, dict):
                items = sorted(value.items()) if sort_keys else value.items()
            for number, item in enumerate(items):
                if number:
                    parts.append(between + line)
                if is_dict:
                    parts.extend((key_text(item[0]), colon))
                write(item[1] if is_dict else item, depth + 1)
            parts.append(
                ("" if indent is None else "\n" + indent * depth) + ("}" if is_dict else "]")
            )
        else:
            parts.append(json.dumps(value))

    write(value, 0)
    return concat(parts)
