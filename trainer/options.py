"""A command's options as a dataclass: a field for each option, in the order of --help.

@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    model: str = option("a preset")                      # required
    lengths: tuple[Tokens, ...] = option("of the rows", (4096, 8192))
    compiled: bool = option("compile the model")         # a switch

main = command(Options, work)
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, TypeVar

from data.errors import UserError
from trainer import arguments, entry

T = TypeVar("T")
Tokens = Annotated[int, arguments.tokens]
TokensOr0 = Annotated[int, arguments.tokens_or_0]
AtLeastOne = Annotated[int, arguments.at_least_one]
AtLeastZero = Annotated[int, arguments.at_least_zero]
AboveZero = Annotated[float, arguments.above_zero]
NotNegative = Annotated[float, arguments.not_negative]
Finite = Annotated[float, arguments.finite]
FreeText = Annotated[str, arguments.free_text]
JsonObject = Annotated[dict[str, Any], arguments.json_object]
StorePath = Annotated[str, arguments.store_path]
REQUIRED: Any = object()
FIELDS = (
    "Instead of a recipe, --model.path and --data.path suffice, as for train.py. The recipe's "
    "fields are described by python train.py --help."
)


def option(text: str, default: Any = REQUIRED, *, positional: bool = False, **more: Any) -> Any:
    """Returns a field of a dataclass of options.

    Args:
      text: its help, to which the default is added unless the text gives it.
      default: its value if not given; without a default it is required, but a switch is False.
      positional: whether it is given without a name.
      more: further arguments of argparse, such as `choices` or `metavar`.
    """
    about = {"text": text, "default": default, "positional": positional, "more": more}
    return dataclasses.field(metadata=about)


def other_words(metavar: str, text: str = "") -> Any:
    """Returns a field for all words that are not the command's options, such as a recipe's fields.

    Args:
      metavar: how the usage names them; text: what the help ends with.
    """
    return dataclasses.field(metadata={"metavar": metavar, "text": text})


def no_download() -> Any:
    """Returns the field of --no-download, which takes effect on parsing."""
    return option("", action=arguments.NoDownload)


def check_each_once(name: str, values: Iterable[object]) -> None:
    """Raises UserError if a list has a value twice, which would count the same cases twice."""
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise UserError(f"{name}: found {value} twice; each value once would work")
        seen.add(value)


class EachOnce(arguments.Joined):
    """The argparse action of a list that may have each value only once, however it is written."""

    def check(
        self, parser: argparse.ArgumentParser, option_string: str | None, joined: list[Any]
    ) -> None:
        """Calls `parser.error` if a value is there twice."""
        try:
            check_each_once(str(option_string), joined)
        except UserError as error:
            parser.error(str(error))


def command(
    options: type[T], work: Callable[[T], object], output: str = "output"
) -> Callable[..., int]:
    """Returns a command's `main`, which takes arguments (sys.argv's by default) for its exit code.

    Its name and description are those of the module that defines `options`.

    Args:
      work: what the command does; it may return an exit code.
      output: the option that names what the command writes, if it has this option, for full-disk
        errors without a name.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        given = parse(options, argv)
        return entry.run(lambda: work(given), getattr(given, output, None))

    return main


def parse(options: type[T], argv: Sequence[str] | None = None) -> T:
    """Returns the options of a command line. Raises SystemExit(2) after one line if it is wrong.

    The help begins with the class's docstring, or, if that is "The command's options.", with the
    first line of the module's.
    """
    parser = parser_of(options)
    others = next(filter(_takes_others, _fields(options)), None)
    if others is None:
        values = vars(parser.parse_args(argv))
    else:
        usage = parser.format_usage().removeprefix("usage: ").rstrip().replace("%", "%%")
        parser.usage = f"{usage} {others.metadata['metavar']}"
        parser.epilog = others.metadata["text"]
        known, words = parser.parse_known_args(argv)
        values = {**vars(known), others.name: words}
    return options(**{key: _frozen(value) for key, value in values.items()})


def parser_of(options: type) -> arguments.CommandParser:
    """Returns the parser of a dataclass of options, named and described as in `parse`."""
    module = sys.modules[options.__module__]
    name = module.__spec__.name if module.__spec__ else module.__name__
    parser = arguments.CommandParser(
        prog=f"python -m {name.removesuffix('.__main__')}",
        description=_description(options, module),
        allow_abbrev=False,
    )
    add_options(parser, options)
    return parser


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Adds the fields of a dataclass of options to a parser."""
    hints = typing.get_type_hints(options, include_extras=True)
    for field in itertools.filterfalse(_takes_others, _fields(options)):
        about, hint = field.metadata, hints[field.name]
        more, default, text = dict(about["more"]), about["default"], about["text"]
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            hint = next(part for part in typing.get_args(hint) if part is not type(None))
        if typing.get_origin(hint) is tuple:
            more.setdefault("nargs", "+")
            more.setdefault("action", arguments.Joined)
            hint = typing.get_args(hint)[0]
        elif typing.get_origin(hint) is list:  # an option that may be repeated
            more.setdefault("action", "append")
            hint = typing.get_args(hint)[0]
        if hint is bool:
            more.setdefault("action", "store_true")
        else:
            more["type"] = hint.__metadata__[0] if typing.get_origin(hint) is Annotated else hint
            if default is REQUIRED and not about["positional"]:
                more["required"] = True
            elif default is not REQUIRED:
                more["default"] = default
            if about["positional"] and default is not REQUIRED:
                more.setdefault("nargs", "?")
        if text != argparse.SUPPRESS and "default" not in text:
            text = f"{text} {_default_text(default)}".strip()
        flag = field.name if about["positional"] else "--" + field.name.replace("_", "-")
        if text:
            more["help"] = text
        parser.add_argument(flag, **more)


def _fields(options: type) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(options)


def _takes_others(field: dataclasses.Field) -> bool:
    """Whether a field is of `other_words`."""
    return "default" not in field.metadata


def _description(options: type, module: types.ModuleType) -> str:
    if options.__doc__ and not options.__doc__.startswith(("The command's", options.__name__)):
        return inspect.cleandoc(options.__doc__)
    return (module.__doc__ or "").partition("\n")[0]


def _default_text(default: Any) -> str:
    if default is REQUIRED or default in (None, "", (), []):
        return ""
    values = default if isinstance(default, tuple | list) else [default]
    return f"(default {' '.join(map(str, values))})".replace("%", "%%")


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
