"""Parses the values of recipes and flags with jsonargparse to the schema's types."""

import argparse
import dataclasses
import functools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, Union

import jsonargparse
from jsonargparse.typing import register_type

from data.errors import UserError
from data.lengths import FORM, tokens_of
from model.attention.names import Tokens

from .command_line import CommandLine
from .fields import FIELDS, LISTS, MAPPINGS, SECTIONS, check_keys, field_names, suggestion
from .schema import RunConfig

# What jsonargparse raises for a value of a wrong type.
_REFUSED = (
    argparse.ArgumentError,
    jsonargparse.ArgumentError,
    TypeError,
    ValueError,
    KeyError,
    OverflowError,
)


_Section = TypeVar("_Section")


class _Value(NamedTuple):
    """A field's value from a recipe or flag, and its required type."""

    field: str
    type: Any
    value: Any


@functools.cache
def _shared_parser() -> jsonargparse.ArgumentParser:
    """A parser for values; building one takes half a second."""
    return parser()


def parser() -> jsonargparse.ArgumentParser:
    """The parser of RunConfig's fields, made on demand since its settings are global."""
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    _register_tokens()
    # Abbreviations are off: `--mesh.seq` would be accepted silently.
    made = jsonargparse.ArgumentParser(
        prog="train.py", description="Fine-tune a model.", exit_on_error=False, allow_abbrev=False
    )
    made.add_argument(
        "--config",
        metavar="RECIPE.yaml",
        help="The recipe; not needed with --model.path and --data.path.",
    )
    made.add_class_arguments(RunConfig)
    return made


def _register_tokens() -> None:
    """Makes jsonargparse read the type Tokens: 64K, 1M or a plain number, as an int."""

    def number(value: Any) -> int:
        if not isinstance(value, str):
            raise ValueError(f"found {value!r}; write {FORM}")
        return tokens_of(value)

    register_type(
        Tokens,
        serializer=int,
        deserializer=number,
        type_check=lambda value, _: type(value) is int,
        fail_already_registered=False,
    )


# Flags of train.py that are not fields, for --help.
_FLAGS_OF_TRAIN: dict[str, dict[str, Any]] = {
    "--dry-run": {
        "metavar": "MACHINE",
        "nargs": "?",
        "help": "Say what the run would take on MACHINE, such as 8xH100 or v5p-32 (default: as "
        "many GPUs as the mesh has), and stop.",
    },
    "--gpu-memory": {"metavar": "GIB", "help": "With --dry-run: memory per GPU."},
    "--no-download": {
        "action": "store_true",
        "help": "Do not download models and data from the Hugging Face hub.",
    },
}


def help_text(section: str = "") -> str:
    """Returns the description of every field, or of a section's fields.

    Raises:
      UserError: no section of this name.
    """
    made = parser()
    if not section:
        for flag, settings in _FLAGS_OF_TRAIN.items():
            made.add_argument(flag, default=argparse.SUPPRESS, **settings)
        return made.format_help()
    if section not in SECTIONS:
        raise UserError(
            f"--help: {section} is not a section{suggestion(section, SECTIONS)}; sections are "
            f"{', '.join(SECTIONS)}"
        )
    made.usage = made.description = argparse.SUPPRESS
    made._action_groups = [
        group
        for group in made._action_groups
        if any(action.dest.startswith(f"{section}.") for action in group._group_actions)
    ]
    return made.format_help()


def build(recipe: Mapping[str, Any], command_line: CommandLine) -> RunConfig:
    """Builds the configuration from a recipe (whose names are checked) and flags.

    Raises:
      UserError: a value has the wrong type or breaks a rule of its section.
    """
    made = _shared_parser()
    try:
        namespace = made.parse_object(dict(recipe))
    except _REFUSED as error:
        _raise_refused(_recipe_values(recipe), command_line.recipe, error)
    _refuse_null(_recipe_values(recipe), command_line.recipe)
    source = command_line.recipe
    if command_line.flags:
        source = f"{source} with the command line"
        try:
            namespace = made.parse_args(
                [word for flag in command_line.flags for word in flag.words], namespace=namespace
            )
        except _REFUSED as error:
            _raise_refused(_flag_values(command_line), "command line", error)
        _refuse_null(
            (_Value(field, kind, namespace.get(field)) for field, kind in FIELDS.items()),
            "command line",
        )
    try:
        sections = made.instantiate(namespace)
        return RunConfig(**{name: sections[name] for name in field_names(RunConfig)})
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
    values = [_Value(f"{field}.{name}", kinds[name], value) for name, value in written.items()]
    _refuse_null(values, "configuration")
    _register_tokens()
    made = jsonargparse.ArgumentParser(exit_on_error=False)
    for name in written:
        made.add_argument(f"--{name}", type=kinds[name])
    try:
        parsed = made.parse_object(dict(written))
    except _REFUSED as error:
        _raise_refused(iter(values), "configuration", error)
    try:
        return cls(**{name: parsed[name] for name in written})
    except ValueError as error:
        raise UserError(f"configuration: {error}") from error


def _raise_refused(values: Iterator[_Value], source: str, error: Exception) -> typing.NoReturn:
    """Raises a UserError that names the first value that jsonargparse refuses alone.

    jsonargparse reports the field and its type only in a message, so each value is parsed again
    alone.
    """
    for field, kind, value in values:
        single = jsonargparse.ArgumentParser(exit_on_error=False)
        single.add_argument("--value", type=kind)
        try:
            if isinstance(value, _Words):
                # A list in another class of str is refused.
                single.parse_args(["--value", str(value)])
            else:
                single.parse_object({"value": value})
        except _REFUSED:
            raise UserError(
                f"{source}: {field}: found {value}, expects {describe(kind)}"
            ) from error
    raise UserError(f"{source}: {' '.join(str(error).split())}") from error


def _refuse_null(values: Iterable[_Value], source: str) -> None:
    """Raises a UserError for the first invalid null; jsonargparse accepts null for any type."""
    for field, kind, value in values:
        if value is None and kind is not Any and type(None) not in typing.get_args(kind):
            raise UserError(
                f"{source}: {field}: found null, expects {describe(kind)}; if left out, it has its "
                "default"
            )


class _Words(str):
    """The text of a flag, which jsonargparse parses as YAML."""


def _recipe_values(recipe: Mapping[str, Any]) -> Iterator[_Value]:
    """Every value of a recipe, including each one in lists of sections."""
    for field, kind in FIELDS.items():
        *sections, name = field.split(".")
        section = recipe
        for part in sections:
            section = section.get(part, {})
        if name not in section:
            continue
        if field in LISTS:
            for index, entry in enumerate(section[name] or []):
                yield from _entry_values(field, index, entry)
        yield _Value(field, kind, section[name])


def _entry_values(name: str, index: int, entry: Mapping[str, Any]) -> Iterator[_Value]:
    for field in dataclasses.fields(LISTS[name]):
        if field.name in entry:
            yield _Value(f"{name}[{index}].{field.name}", field.type, entry[field.name])


def _flag_values(command_line: CommandLine) -> Iterator[_Value]:
    for flag in command_line.flags:
        mapping = next((name for name in MAPPINGS if flag.name.startswith(f"{name}.")), None)
        yield _Value(flag.name, Any if mapping else FIELDS[flag.name], _Words(flag.text))


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
        return "mapping"
    if kind is type(None):
        return "null"
    if kind is Tokens:
        return FORM
    if kind is float:
        return "a finite number"
    if dataclasses.is_dataclass(kind):
        return f"{{{', '.join(field_names(typing.cast(type, kind)))}}}"
    return getattr(kind, "__name__", str(kind))
