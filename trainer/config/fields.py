"""The names of a configuration's sections and fields, and errors for unknown names."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from data.clean import SETS
from data.errors import UserError
from model.attention.names import Tokens
from trainer.reporting.rows import is_number

from .data import SourceConfig
from .other_trainers import MEANT, MEANT_SECTIONS, NO_FIELD, REMARKS
from .schema import RunConfig
from .stage import StageConfig


def field_names(cls: type) -> list[str]:
    """The field names of a dataclass."""
    return [field.name for field in dataclasses.fields(cls)]


def _sections(cls: type, prefix: str = "") -> dict[str, type]:
    """Dotted name -> dataclass of every section of `cls`, nested ones included."""
    sections: dict[str, type] = {}
    for field in dataclasses.fields(cls):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            sections |= {prefix + field.name: field.type} | _sections(
                field.type, f"{prefix}{field.name}."
            )
    return sections


SECTIONS = _sections(RunConfig)
# Dotted name -> type of every field that is not a section.
FIELDS: dict[str, Any] = {
    name: kind
    for section, cls in {"": RunConfig, **SECTIONS}.items()
    for field, kind in typing.get_type_hints(cls).items()  # resolves annotations that are strings
    if (name := f"{section}.{field}".lstrip(".")) not in SECTIONS
}
# Sections that `auto` may replace.
AUTO = ("mesh", "memory")
# Fields that are lists of sections; the first field of such a section is required.
LISTS = {"data.sources": SourceConfig, "stages": StageConfig}
# Fields that a run records and nobody sets.
RECORDED = ("config_version", "planned")
# Mappings; a flag may set one entry: --model.overrides.hidden_size 64.
MAPPINGS = ("model.overrides", "attention.schedule")


def is_text(kind: Any) -> bool:
    """Whether a field holds text, any or one of several values, or null: its flag's value is then
    taken as written, not parsed as YAML."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return all(part is type(None) or is_text(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return all(isinstance(name, str) for name in typing.get_args(kind))
    return kind is str


def suggestion(name: str, valid: Iterable[str], prefix: str = "") -> str:
    """Returns ' (did you mean PREFIX NAME?)' for another trainer's name, one that lacks its
    section, or a misspelt one."""
    dashes = "--" if prefix == "--" else ""
    written = name.replace("-", "_")
    plain = written.rsplit(".", 1)[-1].lower()
    if plain in NO_FIELD:
        return f" ({NO_FIELD[plain]})"
    if meant := MEANT.get(plain):
        return f" (did you mean {dashes}{meant}{REMARKS.get(plain, '')}?)"
    fields = [f"{dashes}{field}" for field in FIELDS if field.endswith(f".{written}")]
    if fields and prefix in ("", "--"):
        return f" (did you mean {' or '.join(fields)}{REMARKS.get(written, '')}?)"
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f" (did you mean {prefix}{matches[0]}?)" if matches else ""


def check_names(recipe: Mapping[str, Any], source: str) -> None:
    """Refuses unknown sections and fields of a recipe.

    Args:
      source: the recipe's path, for messages.

    Raises:
      UserError: names all unknown fields, each with the nearest valid one; or what should be a
        mapping.
    """
    check_mapping(recipe, RunConfig, "", source)
    parts = list(_parts(recipe))
    _refuse_unknown(parts, source)
    for part in parts:
        check_mapping(part.written, part.cls, part.prefix, source)
    data = recipe.get("data", {})
    if data.get("path") and data.get("sources"):
        raise UserError(f"{source}: both data.path and data.sources are given; keep one")
    for field in LISTS:
        check_list(field, entry_of(recipe, field) or [], source)


class _Part(NamedTuple):
    """A section of a recipe, or an entry of a list of sections.

    Attributes:
      written: its fields, or what is written in their place.
      cls: its dataclass.
      prefix: begins its fields' names in messages.
    """

    written: Any
    cls: type
    prefix: str


def _parts(recipe: Mapping[str, Any]) -> Iterator[_Part]:
    """Yields the parts of a recipe that should be mappings of fields."""
    yield _Part(recipe, RunConfig, "")
    for section, cls in SECTIONS.items():
        yield _Part(entry_of(recipe, section, {}), cls, f"{section}.")
    for field, cls in LISTS.items():
        entries = entry_of(recipe, field)
        for index, entry in enumerate(entries if isinstance(entries, list | tuple) else ()):
            yield _Part(entry, cls, f"{field}[{index}].")


def entry_of(recipe: Mapping[str, Any], field: str, default: Any = None) -> Any:
    """The value of a dotted field or section of a recipe."""
    value: Any = recipe
    for part in field.split("."):
        value = value.get(part, default) if isinstance(value, Mapping) else default
    return value


def clean_set(name: str, field: str) -> dict[str, Any]:
    """Returns the fields for `data.clean: NAME`, a named set of cleaning rules.

    Args:
      field: the source of the name, for messages.

    Raises:
      UserError: no set has this name.
    """
    if name not in SETS:
        raise UserError(
            f"{field}: found {name!r}; {', '.join(SETS)}, or fields of the section, would work"
        )
    return dict(SETS[name])


def check_list(field: str, entries: Any, source: str) -> None:
    """Requires a field of LISTS to be a list of mappings with known fields and the first one.

    Args:
      source: the recipe or flag that gave the value, for messages.
    """
    cls = LISTS[field]
    names = field_names(cls)
    if not isinstance(entries, list | tuple):
        raise UserError(
            f"{source}: {field} expects a list of {{{', '.join(names)}}}, found {entries!r:.200}"
        )
    for index, entry in enumerate(entries):
        check_keys(entry, cls, f"{field}[{index}].", source)
        if names[0] not in entry:
            raise UserError(
                f"{source}: {field}[{index}].{names[0]}: missing; it has {', '.join(names)}"
            )


def check_mapping(section: Any, cls: type, prefix: str, source: str) -> None:
    """Requires a section to be a mapping; arguments as in `check_keys`."""
    if not isinstance(section, Mapping):
        names = field_names(cls)
        is_entry = prefix.endswith("].") and isinstance(section, str)
        remedy = (
            f"; {{{names[0]}: {section}}} would work" if is_entry else _meant_by_section(prefix)
        )
        raise UserError(
            f"{source}: {prefix[:-1] or 'a recipe'} expects the fields {', '.join(names)}, found "
            f"{section!r:.200}{remedy}"
        )


def _meant_by_section(prefix: str) -> str:
    """'; did you mean ...?' for a section that other trainers have as a field."""
    meant = MEANT_SECTIONS.get(prefix[:-1])
    return f"; did you mean {meant}?" if meant else ""


def check_keys(section: Any, cls: type, prefix: str, source: str) -> None:
    """Requires a mapping with the fields of `cls`; `prefix` begins the names in messages."""
    check_mapping(section, cls, prefix, source)
    _refuse_unknown([_Part(section, cls, prefix)], source)


def _refuse_unknown(parts: Iterable[_Part], source: str) -> None:
    """Raises UserError that names all unknown fields, and then what is not a mapping."""
    unknown: list[str] = []
    no_mappings: list[str] = []
    valid: dict[str, list[str]] = {}
    for written, cls, prefix in parts:
        if not isinstance(written, Mapping):
            meant = _meant_by_section(prefix)
            no_mappings.append(f"{prefix[:-1]} (a section, found {written!r:.80}{meant})")
            continue
        names = field_names(cls)
        for key in (str(key) for key in written if key not in names):
            unknown.append(f"{prefix}{key}{_hint(key, names, prefix)}")
            valid[prefix] = names
    if not unknown:
        return
    unknown += no_mappings
    known = "train.py --help all lists the valid ones"
    if len(valid) == 1:
        known = f"valid: {', '.join(*valid.values())}"
    raise UserError(
        f"{source}: unknown field{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}; {known}"
    )


def _hint(key: str, names: Iterable[str], prefix: str) -> str:
    """What to write instead of an unknown field of a recipe."""
    if not prefix and key in FIELDS:
        return f" (write {': {'.join(key.split('.'))}: ...{'}' * key.count('.')})"
    if key == "type" and prefix.startswith("data."):
        key = "ds_type"  # axolotl has both
    return suggestion(key, names, prefix)


def check_kinds(section: Any, source: str, cls: type = RunConfig, prefix: str = "") -> None:
    """Refuses a stored recipe with sections that are not mappings, or values of the wrong kind.

    For code that reads single fields of a recipe from any version, or from somebody else; fields
    unknown to this version may have any value.

    Args:
      section: the recipe, or with `cls` and `prefix` a section of it, as in `check_keys`.
      source: the recipe's path, for messages.

    Raises:
      UserError: names the field.
    """
    check_mapping(section, cls, prefix, source)
    for field, kind in typing.get_type_hints(cls).items():
        name, value = f"{prefix}{field}", section.get(field)
        if value is None or (isinstance(value, str) and name in (*AUTO, "data.clean")):
            continue
        if name in SECTIONS:
            check_kinds(value, source, SECTIONS[name], f"{name}.")
        elif name in LISTS:
            if not isinstance(value, list):
                raise UserError(f"{source}: {name} expects a list, found {value!r}")
            for index, entry in enumerate(value):
                check_kinds(entry, source, LISTS[name], f"{name}[{index}].")
        elif needed := _not_a(value, kind):
            raise UserError(f"{source}: {name}: found {value!r}; {needed} is needed")


def _not_a(value: Any, kind: Any) -> str | None:
    """Returns what a value must be if it is not the text, number or boolean its type says; None if
    it is, or for other types."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    kinds = set(typing.get_args(kind) if is_union else [kind]) - {type(None)}
    if kinds == {str}:
        return None if isinstance(value, str) else "a text"
    if kinds == {bool}:
        return None if isinstance(value, bool) else "true or false"
    if kinds <= {int, float, Tokens}:
        return None if is_number(value) else "a number"
    return None
