"""Splits and checks the command line `--config RECIPE.yaml [--section.field value ...]`."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from data.errors import UserError

from .fields import (
    AUTO,
    FIELDS,
    LISTS,
    MAPPINGS,
    SECTIONS,
    check_list,
    clean_set,
    is_text,
    suggestion,
)
from .yaml_text import InvalidYAML, parse

PROFILE = "--logging.profile_steps"  # whose value may be FIRST:LAST
ALIASES = {"--profile_steps": PROFILE}


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
    """Returns a flag's value before its conversion to the field's type: its text, where only the
    word null is null, for a text; else that of the text as YAML, or the text if it is none."""
    if is_text(kind):
        return None if flag.text == "null" else flag.text
    try:
        return parse(flag.text, f"command line: --{flag.name}")
    except InvalidYAML:
        return flag.text


def with_recipe_named(words: Sequence[str]) -> list[str]:
    """Returns a command's words with `--config` before the first one that belongs to no flag."""
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        is_value = before.startswith("--") and "=" not in before
        if not word.startswith("--") and not is_value:
            return [*words[:index], "--config", *words[index:]]
    return list(words)


def split(argv: list[str], own: Iterable[str] = ()) -> CommandLine:
    """Splits a command line into the recipe's path and the other flags, and checks their names.

    Args:
      own: the calling command's flags, offered in spelling suggestions.

    Raises:
      UserError: a flag without value, a word without flag, an unknown field, or not exactly one
        --config, which may be omitted only with a model and data.
    """
    recipes, flags, auto = [], [], []
    words = iter(argv)
    for word in words:
        name, equals, text = word.partition("=")
        if name == "--config":
            recipe = text if equals else next(words, None)
            if not recipe:
                raise UserError(
                    "command line: --config needs the path of a recipe, such as "
                    "configs/quickstart.yaml"
                )
            recipes.append(recipe)
            continue
        if not name.startswith("--"):
            flag = (
                f"--config {word}" if word.endswith((".yaml", ".yml")) else "--section.field value"
            )
            raise UserError(f"command line: {word!r} belongs to no flag; write {flag}")
        is_set = name == "--data.clean"  # a section that a set's name may replace
        if (section := name.removeprefix("--")) in AUTO:
            value = text if equals else next(words, "")
            if value != "auto":
                raise UserError(
                    f"command line: {name} is a section, found {value!r}; auto would work, or its "
                    f"fields {', '.join(_fields_of(section))}"
                )
            auto.append(section)
            continue
        name = ALIASES.get(name, name)
        if not is_set:
            _check_name(name.removeprefix("--"), own)
        value = text if equals else next(words, "--")
        if name == PROFILE:
            value = re.sub(r"^(\d+):(\d+)$", r"[\1, \2]", value)
        if not equals and value.startswith("--"):
            raise UserError(f"command line: {name} needs a value")
        if is_set:
            rules = clean_set(value, "command line: --data.clean")
            flags += [
                Flag(f"data.clean.{field}", rule if isinstance(rule, str) else json.dumps(rule))
                for field, rule in rules.items()
            ]
            continue
        flags.append(Flag(name.removeprefix("--"), value))
    names = {flag.name for flag in flags}
    enough = "model.path" in names and {"data.path", "data.sources"} & names
    if len(recipes) > 1 or not (recipes or enough):
        raise UserError(
            f"command line: give one --config RECIPE.yaml, found {len(recipes)}; --model.path and "
            "--data.path suffice without one"
        )
    _check_values(flags)
    return CommandLine(recipes[0] if recipes else "", flags, tuple(auto))


def _check_name(name: str, own: Iterable[str]) -> None:
    """Refuses an unknown field, and names the nearest field or flag of `own`."""
    if name.startswith(("data.sources.", "data.sources+")):
        raise UserError(
            f"command line: --{name} cannot edit one of the sources; give --data.path FILE for one "
            'source, or the whole list as --data.sources \'[{"path": "FILE"}]\''
        )
    if name in SECTIONS:
        raise UserError(
            f"command line: --{name} is a section; its fields are {', '.join(_fields_of(name))}"
        )
    if name in FIELDS or name.startswith(tuple(f"{mapping}." for mapping in MAPPINGS)):
        return
    section = name.split(".")[0]
    if section in SECTIONS:
        valid = _fields_of(section)
    else:  # the sections, not all their ninety fields
        valid = [
            *own,
            *(field for field in FIELDS if "." not in field),
            *(f"{part}.*" for part in SECTIONS if "." not in part),
        ]
    hint = suggestion(name, [*own, "config", "help", *FIELDS], "--")
    raise UserError(f"command line: unknown field --{name}{hint}; valid: {', '.join(valid)}")


def _fields_of(section: str) -> list[str]:
    return [field for field in FIELDS if field.startswith(f"{section}.")]


def _check_values(flags: list[Flag]) -> None:
    """Refuses values that would silently lose a part.

    That is: keys written twice in one value, and lists or mappings that a later flag would replace.
    """
    earlier: list[tuple[Flag, Any]] = []
    for flag in flags:
        value = value_of(flag, FIELDS.get(flag.name, Any))
        for other, other_value in earlier:
            replaced = other.name == flag.name and isinstance(other_value, dict | list)
            if replaced or other.name.startswith(f"{flag.name}."):
                raise UserError(
                    f"command line: --{flag.name} {flag.text} would drop --{other.name} "
                    f"{other.text} before it; write both as one --{flag.name}"
                )
        if flag.name in LISTS and isinstance(value, list):
            check_list(flag.name, value, "command line")
        earlier.append((flag, value))
