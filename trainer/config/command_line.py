"""Splits and checks the command line `--config RECIPE.yaml [--section.field value ...]`."""

import collections
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

from data.errors import UserError

from .fields import (
    AUTO,
    FIELDS,
    LISTS,
    MAPPINGS,
    RECORDED,
    SECTIONS,
    check_list,
    clean_set,
    is_text,
    suggestion,
)
from .other_trainers import MEANT_SECTIONS
from .yaml_text import InvalidYAML, parse

PROFILE = "logging.profile_steps"  # whose value may be FIRST:LAST
CLEAN = "data.clean"  # a section that a set's name may replace
ALIASES = {"profile_steps": PROFILE}


class Flag(NamedTuple):
    """One `--NAME TEXT` (or `--NAME=TEXT`)."""

    name: str
    text: str


class CommandLine(NamedTuple):
    """A recipe's path, "" without one; the flags that change its fields, in order; and the sections
    left to the planner."""

    recipe: str
    flags: list[Flag]
    auto: tuple[str, ...] = ()


def value_of(flag: Flag, kind: Any) -> Any:
    """Returns a flag's value before its conversion to the field's type.

    A field of text gets what was written, with None for the word null. Other fields get it parsed
    as YAML, or as written if it is not YAML. For a list of texts, YAML that is not a list is one
    text, as written: no, for example, or a text with a colon.
    """
    if is_text(kind):
        return None if flag.text == "null" else flag.text
    try:
        value = parse(flag.text, f"command line: --{flag.name}")
    except InvalidYAML:
        return flag.text
    is_written = kind == tuple[str, ...] and not isinstance(value, list) and value is not None
    return flag.text if is_written else value


def with_recipe_named(words: Sequence[str]) -> list[str]:
    """Returns a command's words with `--config` before the first one that belongs to no flag."""
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        is_value = before.startswith("--") and "=" not in before
        if not word.startswith("--") and not is_value:
            return [*words[:index], "--config", *words[index:]]
    return list(words)


def split(argv: Iterable[str], command_flags: Iterable[str] = ()) -> CommandLine:
    """Splits a command line into the recipe's path and the other flags, and checks their names.

    A flag may be written with - or _: --run-dir is --run_dir. Flags of single cleaning rules
    replace those of a set, --data.clean SET, before or after it.

    Args:
      command_flags: the calling command's flags, offered in spelling suggestions.

    Raises:
      UserError: a flag without value, a word without flag, an unknown field, a list or
        data file given twice, or not exactly one --config, which may be omitted only with a model
        and data.
    """
    recipes: list[str] = []
    of_sets: list[Flag] = []
    flags: list[Flag] = []
    auto: list[str] = []
    for written, text in _pairs(argv):
        name = written.replace("-", "_")
        if name == "config":
            recipes.append(_recipe(text))
        elif name in AUTO:
            auto.append(_automatic(name, text))
        elif name == CLEAN:
            of_sets += _clean_flags(text)
        else:
            flags.append(_field(written, text, command_flags))
    _require_recipe(recipes, {flag.name for flag in flags})
    _check_values(flags)
    return CommandLine(recipes[0] if recipes else "", [*of_sets, *flags], tuple(auto))


def _pairs(argv: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Yields the name of each flag, as written after its dashes, and its value; None if it has
    none, since the next word is a flag or there is no other word."""
    words = collections.deque(argv)
    name, text = "", None
    while words:
        word = words.popleft()
        if not word.startswith("--"):
            meant = _remedy_for(word, name.replace("-", "_"), text)
            raise UserError(f"command line: {word!r} belongs to no flag; {meant}")
        name, equals, text = word[2:].partition("=")
        if not equals:
            has_value = bool(words) and not words[0].startswith("--")
            text = words.popleft() if has_value else None
        yield name, text


def _remedy_for(word: str, name: str, text: str | None) -> str:
    """What to do about a word that belongs to no flag, after the flag `name` with the value `text`,
    of which it may be a further part: a list is written as one word."""
    if word.endswith((".yaml", ".yml")):
        return f"write --config {word}"
    if text and text.startswith(("[", "{")):
        return f"put the value of --{name} in quotes"
    if name == "data.path":
        sources = f"[{{path: {text}}}, {{path: {word}}}]"
        return f"write --data.sources '{sources}', or put a pattern in quotes"
    if FIELDS.get(name) == tuple[str, ...]:
        return f"write --{name} '[{text}, {word}]'"
    return "write --section.field value"


def _recipe(path: str | None) -> str:
    """The path of --config; raises UserError without one."""
    if not path:
        raise UserError(
            "command line: --config needs the path of a recipe, such as configs/quickstart.yaml"
        )
    return path


def _automatic(section: str, text: str | None) -> str:
    """The section of a flag such as --mesh auto; raises UserError for another value."""
    if text != "auto":
        raise UserError(
            f"command line: --{section} is a section, found {text or ''!r}; auto would work, or "
            f"its fields {', '.join(_fields_of(section))}"
        )
    return section


def _clean_flags(text: str | None) -> list[Flag]:
    """The flags of single rules for which --data.clean SET stands."""
    rules = clean_set(_value(CLEAN, text), f"command line: --{CLEAN}")
    return [
        Flag(f"{CLEAN}.{field}", rule if isinstance(rule, str) else json.dumps(rule))
        for field, rule in rules.items()
    ]


def _field(written: str, text: str | None, command_flags: Iterable[str]) -> Flag:
    """The flag of a field in the field's spelling.

    Raises:
      UserError: an unknown field, or no value.
    """
    name = written.replace("-", "_")
    name = ALIASES.get(name, name)
    _check_name(name, written, command_flags)
    value = _value(name, text)
    if not value.strip() and not is_text(FIELDS.get(name)):  # YAML would read it as null
        raise UserError(f"command line: --{name}: found {value!r}, needs a value")
    if name == PROFILE:
        value = re.sub(r"^(\d+):(\d+)$", r"[\1, \2]", value)
    return Flag(name, value)


def _value(name: str, text: str | None) -> str:
    """A flag's value; raises UserError without one."""
    if text is None:
        raise UserError(f"command line: --{name} needs a value")
    return text


def _require_recipe(recipes: Sequence[str], names: Set[str]) -> None:
    """Requires one --config, or instead the model and data among the `names` of fields."""
    enough = "model.path" in names and not names.isdisjoint(("data.path", "data.sources"))
    if len(recipes) > 1 or not (recipes or enough):
        raise UserError(
            f"command line: give one --config RECIPE.yaml, found {len(recipes)}; --model.path and "
            "--data.path suffice without one"
        )


def _check_name(name: str, written: str, command_flags: Iterable[str]) -> None:
    """Refuses an unknown field, and names the nearest field or flag of the command.

    Args:
      written: the name as on the command line, for messages.
    """
    if name.startswith(("data.sources.", "data.sources+")):
        raise UserError(
            f"command line: --{written} cannot edit one of the sources; give --data.path FILE for "
            'one source, or the whole list as --data.sources \'[{"path": "FILE"}]\''
        )
    if name in SECTIONS:
        meant = f" (did you mean --{MEANT_SECTIONS[name]}?)" if name in MEANT_SECTIONS else ""
        raise UserError(
            f"command line: --{written} is a section{meant}; its fields are "
            f"{', '.join(_fields_of(name))}"
        )
    if name in RECORDED:
        raise UserError(
            f"command line: --{written} is recorded by runs and not a flag; leave it out"
        )
    if name in FIELDS or name.startswith(tuple(f"{mapping}." for mapping in MAPPINGS)):
        return
    section = name.split(".")[0]
    if section in SECTIONS:
        valid = _fields_of(section)
    else:  # the sections, not all of their fields
        valid = [
            *command_flags,
            *(field for field in FIELDS if "." not in field and field not in RECORDED),
            *(f"{part}.*" for part in SECTIONS if "." not in part),
        ]
    known = [
        *command_flags,
        "config",
        "help",
        *(field for field in FIELDS if field not in RECORDED),
    ]
    hint = suggestion(written, known, "--")
    raise UserError(f"command line: unknown field --{written}{hint}; valid: {', '.join(valid)}")


def _fields_of(section: str) -> list[str]:
    return [field for field in FIELDS if field.startswith(f"{section}.")]


def _check_values(flags: list[Flag]) -> None:
    """Refuses values that would lose a part: keys written twice in one value, lists, mappings and
    data files given by two flags, and mappings that a later flag would replace. If any other flag
    is given twice, the last one wins, as in other programs, and a warning names the first."""
    earlier: list[tuple[Flag, Any]] = []
    for flag in flags:
        value = value_of(flag, FIELDS.get(flag.name, Any))
        for other, other_value in earlier:
            if other.name == flag.name and other_value != value:
                if remedy := _remedy(flag.name, other, flag):
                    raise UserError(
                        f"command line: --{flag.name} is given twice, as {other.text} and "
                        f"{flag.text}; {remedy}"
                    )
                warnings.warn(
                    f"command line: --{flag.name} {flag.text} replaces {other.text}, given before",
                    stacklevel=2,
                )
            if other.name.startswith(f"{flag.name}."):
                raise UserError(
                    f"command line: --{flag.name} {flag.text} would drop --{other.name} "
                    f"{other.text} before it; write both as one --{flag.name}"
                )
        if flag.name in LISTS and isinstance(value, list):
            check_list(flag.name, value, "command line")
        earlier.append((flag, value))


def _remedy(name: str, first: Flag, second: Flag) -> str:
    """What would work instead of a flag that is given twice; "" if the second can only mean to
    replace the first."""
    if name == "data.path":
        paths = json.dumps([{"path": first.text}, {"path": second.text}], ensure_ascii=False)
        return f"for both, --data.sources '{paths}' would work"
    values = (value_of(flag, FIELDS.get(name, Any)) for flag in (first, second))
    has_parts = all(isinstance(value, dict | list) for value in values)
    return f"write both as one --{name}" if has_parts else ""
