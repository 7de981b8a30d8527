"""The pages of `train.py --help`, from the schema's types and docstrings."""

import dataclasses
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Union

import docstring_parser

from data.clean import SETS
from data.errors import UserError
from model.attention.names import Tokens

from .command_line import CLEAN
from .fields import AUTO, LISTS, RECORDED, SECTIONS, suggestion
from .schema import RunConfig

# Returns the kinds of a list's entries, see `_entries_page`.
Entries = Callable[[], Mapping[str, type]]
WIDTH = 100  # of the pages, in a terminal that has as many columns
ALL = "all"  # --help all
# What most runs set, for the first page.
COMMON = (
    "model.path",
    "data.path",
    "data.context_length",
    "train.batch_size",
    "train.epochs",
    "optimizer.learning_rate",
    "adapter.rank",
    "adapter.quantize",
    "mesh.fsdp",
    "mesh.sequence",
    "memory.remat",
    "run_dir",
)
# Flags of train.py that are not fields.
FLAGS = {
    "--config RECIPE.yaml": "The recipe; not needed with --model.path and --data.path",
    "--dry-run [MACHINE]": "Say what the run would take on MACHINE, such as 8xH100 or v5p-32, and "
    "stop. Without MACHINE it leaves out the time and whether the run fits, and needs a recipe "
    "without `auto`",
    "--gpu-memory GIB": "With --dry-run MACHINE: memory per GPU",
    "--no-download": "Do not download models and data from the Hugging Face hub",
}
# Values of flags by the field's type; other types have a text.
_VALUES = {Tokens: "TOKENS", int: "N", float: "NUMBER", bool: "{true, false}", Any: "VALUE"}


class Field(NamedTuple):
    """A field as --help shows it.

    Attributes:
      name: with its sections.
      value: what to give, such as N or {a, b}.
      text: its docstring on one line.
      default: as in a recipe; empty if it is nothing.
    """

    name: str
    value: str
    text: str
    default: str

    @property
    def summary(self) -> str:
        """What the text says first, the choices unless it names one, and the default."""
        text = re.split(r"[.;] |\.$", self.text)[0]
        choices = self.value[1:-1] if self.value.startswith("{") else ""
        is_named = any(choice in text for choice in choices.split(", "))
        return self._with_default(text if is_named else f"{text}: {choices}")

    @property
    def description(self) -> str:
        """The whole text and the default."""
        return self._with_default(self.text)

    def _with_default(self, text: str) -> str:
        return f"{text} (default: {self.default})" if self.default else text


def help_text(
    section: str,
    description: str,
    others: Mapping[str, Entries] | None = None,
) -> str:
    """Returns a page: the first one, all fields, or those of a section or of a list's entries.

    Args:
      section: empty, ALL, or the name of a section or list.
      description: of train.py; its last paragraph ends the first page.
      others: lists that the schema does not describe, with functions that return their entries.

    Raises:
      UserError: no section of this name.
    """
    lists: dict[str, Entries] = {name: _one_kind(cls) for name, cls in LISTS.items()}
    lists |= others or {}
    if not section:
        return _first_page(description, lists)
    if section == ALL:
        pages = [_columns("Flags of train.py", FLAGS), *map(_section_page, ("", *SECTIONS))]
        return "\n\n".join(pages + [_entries_page(name, kinds()) for name, kinds in lists.items()])
    if section in lists:
        return _entries_page(section, lists[section]())
    if section in SECTIONS:
        return _section_page(section)
    sections = [*SECTIONS, *lists]
    raise UserError(
        f"--help: {section} is not a section{suggestion(section, sections)}; sections are "
        f"{', '.join(sections)}"
    )


def _one_kind(cls: type) -> Entries:
    return lambda: {"": cls}


def _first_page(description: str, lists: Iterable[str]) -> str:
    """The page with train.py's own flags, the fields that most runs set, and a line for each
    section and list."""
    *about, ending = (
        part if part.startswith(" ") else _wrapped(" ".join(part.split()), 0)
        for part in description.strip().split("\n\n")
    )
    fields = {field.name: field for name in ("", *SECTIONS) for field in fields_of(name)}
    in_no_section = [name for name in fields if "." not in name and name not in lists]
    shown = dict.fromkeys((*COMMON, *in_no_section))
    sections = {name: re.split(r"[:;] | \(", _heading(cls))[0] for name, cls in SECTIONS.items()}
    return "\n\n".join(
        [
            *about,
            _columns("Flags of train.py", FLAGS),
            _columns(
                "Fields that most runs set, and those in no section",
                {f"--{name}": fields[name].summary for name in shown},
            ),
            _columns(
                "Sections, whose fields --help SECTION describes (--help all: every field)",
                sections | {name: f"Each entry of the list {name}" for name in lists},
            ),
            ending,
        ]
    )


def _section_page(section: str) -> str:
    """The page of a section; of the fields in no section, if it is empty."""
    parts = [f"{_heading(SECTIONS[section]) if section else 'Fields in no section'}:"]
    if section in AUTO:
        about = "The planner chooses the section for the available devices."
        parts.append(_entry(f"--{section} auto", about))
    if section == CLEAN:
        about = "A named set of rules; flags for single ones may follow."
        parts.append(_entry(f"--{section} {{{','.join(SETS)}}}", about))
    fields = fields_of(section)
    parts += [_entry(f"--{field.name} {field.value}", field.description) for field in fields]
    return "\n".join(parts)


def _entries_page(name: str, kinds: Mapping[str, type]) -> str:
    """The page of a list's entries.

    Args:
      kinds: what sets a kind of entries apart -> its dataclass; "" for all of them, the first one.
    """
    written = (
        f"Fields of each entry of {name}, written {name}: [{{...}}] in a recipe, and --{name} "
        "'[{...}]' on the command line, where it replaces the recipe's list."
    )
    parts = [_wrapped(written, 0)]
    common: set[str] = set()
    for kind, cls in kinds.items():
        title = f"{kind}: {_heading(cls)}" if kind else _heading(cls)
        fields = [field for field in _described(cls) if field.name not in common]
        lines = [_entry(f"{field.name} {field.value}", field.description) for field in fields]
        parts.append("\n".join([f"{title}:", *lines] if fields else [f"{title}; no other fields"]))
        common |= set() if kind else {field.name for field in fields}
    return "\n\n".join(parts)


def fields_of(section: str) -> list[Field]:
    """Returns the fields of a section that may be set, or with "" those in no section."""
    described = _described(SECTIONS.get(section, RunConfig), f"{section}." if section else "")
    return [field for field in described if field.name not in (*RECORDED, *SECTIONS)]


def _described(cls: type, prefix: str = "") -> Iterator[Field]:
    """Yields the fields of a dataclass, in order."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            for param in docstring_parser.parse_from_object(base).params:
                texts[param.arg_name] = " ".join((param.description or "").split())
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield Field(
            f"{prefix}{field.name}",
            _value(hints[field.name]),
            texts.get(field.name, ""),
            _default(field),
        )


def _value(kind: Any) -> str:
    """What a flag of this type takes, in a few letters."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return "|".join(_value(part) for part in arguments if part is not type(None))
    if origin is Literal:
        return f"{{{', '.join(map(str, arguments))}}}"
    if origin is tuple:
        return f"[{_value(arguments[0])}, ...]"
    if origin is dict:
        return f"{{NAME: {_value(arguments[1])}, ...}}"
    if dataclasses.is_dataclass(kind):
        return "{...}"
    return _VALUES.get(kind, "TEXT")


def _default(field: dataclasses.Field) -> str:
    """A field's default as in a recipe; empty if it is nothing, or required."""
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        value = None if field.default is dataclasses.MISSING else field.default
    if value is None or value in ("", (), {}):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value)


def _heading(section: type) -> str:
    """Returns the first paragraph of a section's docstring as one line."""
    return " ".join((section.__doc__ or "").partition("\n\n")[0].split()).rstrip(".")


def _wrapped(text: str, indent: int) -> str:
    """A text in lines of the page's width, each indented by `indent` spaces."""
    width = min(WIDTH, shutil.get_terminal_size().columns)
    wrapper = textwrap.TextWrapper(width, break_on_hyphens=False, break_long_words=False)
    wrapper.initial_indent = wrapper.subsequent_indent = " " * indent
    return wrapper.fill(text)


def _entry(flag: str, text: str) -> str:
    """A flag and, indented below it, its description."""
    return f"  {flag}\n{_wrapped(text, 6)}"


def _columns(title: str, rows: Mapping[str, str]) -> str:
    """A title and its rows, names to the left of their descriptions."""
    left = 4 + max(map(len, rows))
    lines = [f"  {name}".ljust(left) + _wrapped(text, left)[left:] for name, text in rows.items()]
    return "\n".join([f"{title}:", *lines])
