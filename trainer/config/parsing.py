"""Converts the values of recipes and flags to the schema's types."""

import dataclasses
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union

from data.errors import UserError
from data.lengths import FORM, tokens_of
from model.attention.names import Tokens

from .command_line import CommandLine, Flag, value_of
from .fields import FIELDS, LISTS, MAPPINGS, SECTIONS, check_keys, field_names
from .other_trainers import MEANT_VALUES
from .schema import RunConfig

_Section = TypeVar("_Section")
# Numbers that arrive as text: in quotes, or like 1e-3, which PyYAML does not read as a number.
# Leading zeros are refused: 010 is eight in YAML 1.1, and must not be taken for ten.
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)", re.ASCII)
_NUMBER = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", re.ASCII)
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]", re.ASCII)
# What some fields that must not be empty need; the others of these need a path.
_NEEDS = {
    "checkpoint.best": "the name of a metric",
    "data.sources.template": "the name of a template",
    "distributed.coordinator": "HOST:PORT",
    "logging.wandb": "the name of a project",
    "model.preset": "the name of a preset",
}


class _Unfit(Exception):
    """A value is not of its field's type."""


def build(recipe: Mapping[str, Any], command_line: CommandLine) -> RunConfig:
    """Builds the configuration from a recipe (whose names are checked) and flags.

    Raises:
      UserError: a value has the wrong type or breaks a rule of its section.
    """
    values: dict[str, Any] = {}
    for field, kind in FIELDS.items():
        section: Any = recipe
        *sections, name = field.split(".")
        for part in sections:
            section = section.get(part, {})
        if name in section:
            values[field] = _checked(field, kind, section[name], command_line.recipe)
    for flag in command_line.flags:
        _set_flag(values, flag)
    source = command_line.recipe or "command line"
    if command_line.recipe and command_line.flags:
        source = f"{source} with the command line"
    try:
        return _section(RunConfig, "", values)
    except ValueError as error:  # of a section's __post_init__
        raise UserError(f"{source}: {error}") from error


def section(cls: type[_Section], written: Mapping[str, Any], field: str) -> _Section:
    """Builds a section declared outside the schema (a dataclass) from its fields.

    Args:
      field: the section's name in messages.

    Raises:
      UserError: an unknown field, a value of the wrong type, or one that breaks a rule of the
        section.
    """
    check_keys(written, cls, f"{field}.", "configuration")
    kinds = typing.get_type_hints(cls)
    values = {
        name: _checked(f"{field}.{name}", kinds[name], value, "configuration")
        for name, value in written.items()
    }
    try:
        return cls(**values)
    except ValueError as error:
        raise UserError(f"configuration: {error}") from error


def _section(cls: type[_Section], prefix: str, values: Mapping[str, Any]) -> _Section:
    """Builds a section and those within it from its fields' values by dotted name."""
    given: dict[str, Any] = {}
    for name in field_names(cls):
        field = f"{prefix}{name}"
        if field in SECTIONS:
            given[name] = _section(SECTIONS[field], f"{field}.", values)
        elif field in values:
            given[name] = values[field]
    return cls(**given)


def _set_flag(values: dict[str, Any], flag: Flag) -> None:
    """Sets a flag's field, or the entry of a mapping that it names, in `values`."""
    mapping = next((name for name in MAPPINGS if flag.name.startswith(f"{name}.")), None)
    if mapping is None:
        kind = FIELDS[flag.name]
        value = value_of(flag, kind)
        values[flag.name] = _checked(flag.name, kind, value, "command line", flag.text)
        return
    entries = values[mapping] = _copied(values.get(mapping))
    *path, last = flag.name.removeprefix(f"{mapping}.").split(".")
    for part in path:
        inner = entries[part] = _copied(entries.get(part))
        entries = inner
    entries[last] = _with_numbers(value_of(flag, Any))


def _copied(entries: Any) -> dict[str, Any]:
    """A copy of a mapping; an empty one for another value, which a flag for an entry replaces."""
    return dict(entries) if isinstance(entries, Mapping) else {}


def _checked(field: str, kind: Any, value: Any, source: str, text: str | None = None) -> Any:
    """Returns a value as its field's type.

    Args:
      source: the recipe or command line that gave the value, which begins an error.
      text: the value as written; by default `value` is shown.

    Raises:
      UserError: names the field, or the one in a list of sections, what was found and what its type
        is.
    """
    if field in LISTS and isinstance(value, list | tuple):
        return _checked_entries(field, value, source)
    expected = describe(kind)
    if value is None and kind is not Any and type(None) not in typing.get_args(kind):
        raise UserError(
            f"{source}: {field}: found null, expects {expected}; if left out, it has its default"
        )
    plain_name = re.sub(r"\[\d+\]", "", field)
    if value == "" and _must_not_be_empty(plain_name, kind):
        raise UserError(f"{source}: {field}: found '', needs {_NEEDS.get(plain_name, 'a path')}")
    try:
        return _converted(kind, value)
    except (_Unfit, ValueError, OverflowError) as error:
        found = value if text is None else text
        raise UserError(
            f"{source}: {field}: found {found!s:.200}{_meant(field, value)}, expects {expected}"
        ) from error


def _meant(field: str, value: Any) -> str:
    """' (did you mean ...?)' for another trainer's name or form of a value, or several paths."""
    if field == "data.path" and isinstance(value, list | tuple):
        sources = ", ".join(f"{{path: {path}}}" for path in value)
        return f" (did you mean data.sources: [{sources}]?)"
    if field == "optimizer.warmup_steps" and isinstance(value, float) and 0 < value < 1:
        return " (did you mean optimizer.warmup_fraction?)"
    meant = MEANT_VALUES.get(field, {}).get(str(value))
    return f" (did you mean {meant}?)" if meant else ""


def _checked_entries(field: str, entries: Sequence[Any], source: str) -> tuple[Any, ...]:
    """Returns the entries of a list of sections, whose names are checked; raises as `_checked`."""
    cls = LISTS[field]
    hints = typing.get_type_hints(cls)
    checked = [
        {
            name: _checked(f"{field}[{index}].{name}", hints[name], value, source)
            for name, value in entry.items()
        }
        for index, entry in enumerate(entries)
    ]
    try:
        return tuple(cls(**values) for values in checked)
    except ValueError as error:  # of __post_init__
        raise UserError(f"{source}: {error}") from error


def _must_not_be_empty(field: str, kind: Any) -> bool:
    """Whether an empty text is a mistake, such as an unset shell variable: in a field that may be
    null, and for the paths that every recipe has."""
    return set(typing.get_args(kind)) == {str, type(None)} or field in (
        "data.prepared",
        "data.sources.path",
    )


def _converted(kind: Any, value: Any) -> Any:
    """Returns a value converted to a type; a single text becomes a list of one.

    Raises _Unfit, ValueError or OverflowError if the value does not fit the type.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return _as_one_of(arguments, value)
    if origin is Literal:
        return _required(value in arguments and not isinstance(value, bool), value)
    if origin is tuple:
        if arguments[0] is str and isinstance(value, str) and value:
            return (value,)
        _required(isinstance(value, list | tuple), value)
        return tuple(_converted(arguments[0], inner) for inner in value)
    if origin is dict:
        _required(isinstance(value, Mapping) and all(isinstance(key, str) for key in value), value)
        return {key: _converted(arguments[1], inner) for key, inner in value.items()}
    if kind is Any:
        return _with_numbers(value)
    return _as_plain(kind, value)


def _as_one_of(kinds: tuple[Any, ...], value: Any) -> Any:
    """Returns a value converted to the first type that it fits."""
    for kind in kinds:
        try:
            return None if value is None else _converted(kind, value)
        except (_Unfit, ValueError, OverflowError):
            continue
    raise _Unfit(value)


def _as_plain(kind: Any, value: Any) -> Any:
    """Returns a value as a text, number or boolean."""
    if isinstance(value, str):
        return _as_written(kind, value)
    is_number = type(value) in (int, float)  # not a boolean
    if kind is Tokens:
        return int(_required(is_number and value == int(value), value))
    if kind is float:
        return float(_required(is_number, value))
    return _required(type(value) is kind, value)


def _as_written(kind: Any, text: str) -> Any:
    """Returns a text unchanged, or as the number or boolean that it spells."""
    if kind is Tokens:
        return tokens_of(_required(not _LEADING_ZERO.match(text), text))
    if kind is int:
        return int(_required(_WHOLE.fullmatch(text), text))
    if kind is float:
        return float(_required(_NUMBER.fullmatch(text), text))
    if kind is bool:
        return _required(text in ("true", "false"), text) == "true"
    return _required(kind is str, text)


def _with_numbers(value: Any) -> Any:
    """Returns a value in which texts such as 1e-5, numbers that PyYAML misses, are floats."""
    if isinstance(value, Mapping):
        return {key: _with_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_numbers(inner) for inner in value]
    if isinstance(value, str) and "e" in value.lower() and _NUMBER.fullmatch(value):
        return float(value)
    return value


def _required(fits: Any, value: Any) -> Any:
    """Returns the value if it fits; raises _Unfit if not."""
    if not fits:
        raise _Unfit(value)
    return value


def describe(kind: Any) -> str:
    """A field's type in words: `int`, `one of nothing, offload`, `list of str`, `int or null`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, arguments))
    if origin is tuple:
        tokens = "numbers of tokens such as 4096 or 64K"
        return f"list of {tokens if arguments[0] is Tokens else describe(arguments[0])}"
    if origin is dict:
        return "mapping" if arguments[1] is Any else f"mapping of names to {describe(arguments[1])}"
    if kind is type(None):
        return "null"
    if kind is Tokens:
        return FORM
    if kind is float:
        return "a finite number"
    if dataclasses.is_dataclass(kind):
        return f"{{{', '.join(field_names(typing.cast(type, kind)))}}}"
    return getattr(kind, "__name__", str(kind))
