"""The run's configuration: typed sections, read from a YAML recipe and overridden by `--section.field value`."""

import contextlib
import dataclasses
import difflib
import pathlib
import re
import sys
from collections.abc import Iterable
from typing import Any

import yaml

from data.errors import UserError
from model.config import POSITIONS

from .checks import check
from .schema import (
    VERSION,
    AttentionConfig,
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    LoggingConfig,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    Row,
    RunConfig,
    SourceConfig,
    TrainConfig,
)
from .yaml_text import InvalidYAML, parse

__all__ = [
    "VERSION", "AttentionConfig", "CheckpointConfig", "DataConfig", "EvaluateConfig", "LoggingConfig",
    "MemoryConfig", "MeshConfig", "ModelConfig", "OptimizerConfig", "RunConfig", "SourceConfig", "TrainConfig", "check",
    "dump", "load", "resolved", "upgraded",
]


def _sections(cls: type, prefix: str = "") -> dict[str, type]:
    """{dotted name: dataclass} of every section, those within others too."""
    found = {}
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            found |= {prefix + field.name: field.type} | _sections(field.type, f"{prefix}{field.name}.")
    return found


SECTIONS = _sections(RunConfig)
LEAVES = tuple(
    name
    for section, cls in {"": RunConfig, **SECTIONS}.items()
    for name in (f"{section}.{field.name}".lstrip(".") for field in dataclasses.fields(cls))
    if name not in SECTIONS
)


# Reading


def load(argv: list[str] | None = None, own: Iterable[str] = ()) -> RunConfig:
    """The configuration of `--config RECIPE.yaml [--section.field value ...]`; UserError for whatever is wrong.

    own: names of the flags of the command that passes on what it does not know; a misspelt one is told the nearest of both.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if {"-h", "--help"} & set(argv):
        parser.parse_args(["--help"])  # prints and exits
    recipe, flags = _split(argv, own)
    _check_values(flags)
    written = _read(recipe)
    given = {flag.split("=", 1)[0].removeprefix("--") for flag in flags if flag.startswith("--")}
    _replace_shorthands(written, given)
    base = _parse(lambda: parser.parse_object(written), recipe)
    if flags:
        base = _parse(lambda: parser.parse_args(flags, namespace=base), "command line")
    where = f"{recipe} with the command line" if flags else recipe
    config = _parse(lambda: parser.instantiate_classes(base), where)
    config = RunConfig(**{field.name: config[field.name] for field in dataclasses.fields(RunConfig)})
    if not config.name:
        config = dataclasses.replace(config, name=pathlib.Path(recipe).stem)
    return check(_one_source(config), where)


def resolved(config: RunConfig) -> Row:
    """The configuration as plain dicts, lists and scalars, every default filled in: what config.yaml holds."""
    return _plain(dataclasses.asdict(config))


def dump(config: RunConfig) -> str:
    """`resolved` as YAML."""
    return yaml.safe_dump(resolved(config), sort_keys=False)


def _parser():
    """The jsonargparse parser of RunConfig. Built on demand: its settings are global to the process."""
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    # Abbreviations are off because `--mesh.seq` would be taken silently.
    parser = jsonargparse.ArgumentParser(
        prog="train.py", description="Fine-tune a model.", exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("--config", metavar="RECIPE.yaml", help="The recipe (required).")
    parser.add_class_arguments(RunConfig)
    return parser


def _split(argv: list[str], own: Iterable[str] = ()) -> tuple[str, list[str]]:
    """The recipe's path and the other arguments, each flag checked for its name."""
    recipes, flags, position = [], [], 0
    while position < len(argv):
        word = argv[position]
        if word == "--config" or word.startswith("--config="):
            if word == "--config":
                position += 1
            if position == len(argv):
                raise UserError("command line: --config needs the path of a recipe, such as configs/quickstart.yaml")
            recipes.append(argv[position].removeprefix("--config="))
        else:
            flag = word.split("=", 1)[0]
            if not flag.startswith("--"):
                raise UserError(f"command line: {word!r} belongs to no flag; write --section.field value")
            _check_flag(flag.removeprefix("--"), own)
            flags.append(word)
            if "=" not in word:
                position += 1
                if position == len(argv) or argv[position].startswith("--"):
                    raise UserError(f"command line: {flag} needs a value")
                flags.append(argv[position])
        position += 1
    if len(recipes) != 1:
        raise UserError(f"command line: give one --config RECIPE.yaml, found {len(recipes)}")
    return recipes[0], flags


def _check_flag(name: str, own: Iterable[str] = ()) -> None:
    """Refuse flags that are no leaf field, with the nearest one, or the nearest of the command's `own`."""
    if name.startswith(("data.sources.", "data.sources+")):
        raise UserError(
            f"command line: --{name} cannot edit one of the sources; give --data.path FILE for one source, "
            "or the whole list as --data.sources '[{\"path\": \"FILE\"}]'"
        )
    if name in SECTIONS:
        raise UserError(f"command line: --{name} is a section; its fields are {_fields(name + '.')}")
    if name in LEAVES or name.startswith(("model.overrides.", "attention.schedule.")):
        return
    section = name.split(".")[0]
    valid = [leaf for leaf in LEAVES if leaf.startswith(section + ".")]
    if section not in SECTIONS:  # not all ninety
        valid = [*own, *(leaf for leaf in LEAVES if "." not in leaf), *(f"{part}.*" for part in SECTIONS if "." not in part)]
    raise UserError(f"command line: unknown field --{name}{_nearest(name, [*own, *LEAVES], '--')}; valid: {', '.join(valid)}")


def _check_values(flags: list[str]) -> None:
    """Refuse what would be lost without a word: a key that is written twice, and what a later flag replaces as a whole."""
    words, earlier = iter(flags), []
    for word in words:
        flag, equals, text = word.partition("=")
        text, value = text if equals else next(words), None
        with contextlib.suppress(InvalidYAML):  # a name such as `a: b: c`
            value = parse(text, f"command line: {flag}")
        for name, given, old in earlier:
            if name.startswith(flag + ".") or (name == flag and isinstance(old, dict | list)):
                raise UserError(f"command line: {flag} {text} would drop {name} {given} before it; write both as one {flag}")
        earlier.append((flag, text, value))


def _fields(prefix: str) -> str:
    return ", ".join(leaf for leaf in LEAVES if leaf.startswith(prefix))


def _nearest(name: str, valid, prefix: str = "") -> str:
    """', did you mean X?' or nothing."""
    found = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f" (did you mean {prefix}{found[0]}?)" if found else ""


def _read(recipe: str) -> Row:
    """The recipe as a dict whose field names are all known."""
    try:
        text = pathlib.Path(recipe).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        folder = pathlib.Path(recipe).parent
        there = sorted(str(path) for path in folder.glob("*.yaml")) if folder.is_dir() else []
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{recipe}: cannot read the recipe ({reason}); there: {', '.join(there) or 'none'}") from error
    written = parse(text, recipe)
    if not isinstance(written, dict):
        raise UserError(f"{recipe}: expected sections such as model: and data:, found {type(written).__name__}")
    written = upgraded(written, recipe)
    _check_names(written, recipe)
    return written


def _from_1(written: Row) -> Row:
    """Version 2 left out train.seed, from which nothing was drawn."""
    train = written.get("train")
    return {**written, "train": {k: v for k, v in train.items() if k != "seed"}} if isinstance(train, dict) else written


# What brings a configuration of a version to the next one.
MIGRATIONS = {1: _from_1}


def upgraded(written: Row, where: str) -> Row:
    """A recipe or resolved configuration of any known version as one of VERSION; one that tells none is VERSION's.

    UserError for a version that is not known.
    """
    while (version := written.get("config_version", VERSION)) != VERSION:
        if not isinstance(version, int) or version not in MIGRATIONS:
            known = ", ".join(map(str, [*MIGRATIONS, VERSION]))
            raise UserError(f"{where}: config_version {version!r} is not known; this code reads {known}")
        written = {**MIGRATIONS[version](written), "config_version": version + 1}
    return written


def _check_names(written: Row, where: str) -> None:
    """Refuse unknown sections and fields of a recipe."""

    def check_keys(found, cls, prefix):
        valid = [f.name for f in dataclasses.fields(cls)]
        if not isinstance(found, dict):
            raise UserError(f"{where}: {prefix[:-1]} expects the fields {', '.join(valid)}, found {found!r}")
        for key in found:
            if key not in valid:
                hint = _nearest(str(key), valid, prefix)
                raise UserError(f"{where}: unknown field {prefix}{key}{hint}; valid: {', '.join(valid)}")

    check_keys(written, RunConfig, "")
    for name, cls in SECTIONS.items():
        found = written
        for part in name.split("."):
            found = found.get(part, cls) if isinstance(found, dict) else cls
        if found is not cls:  # it is there, be it as nothing
            check_keys(found, cls, f"{name}.")
    data = written.get("data", {})
    sources = data.get("sources") or []
    if data.get("path") and sources:
        raise UserError(f"{where}: both data.path and data.sources are given; keep one")
    if not isinstance(sources, list | tuple):
        fields = ", ".join(f.name for f in dataclasses.fields(SourceConfig))
        raise UserError(f"{where}: data.sources expects a list of {{{fields}}}, found {sources!r}")
    for number, source in enumerate(sources):
        check_keys(source, SourceConfig, f"data.sources[{number}].")


def _replace_shorthands(written: Row, given: set[str]) -> None:
    """What the command line gives replaces what the recipe says in another way; edits `written`."""
    if {"data.path", "data.sources"} <= given:
        raise UserError("command line: --data.path and --data.sources exclude each other; give one")
    model_section, data_section = written.setdefault("model", {}), written.setdefault("data", {})
    if "data.path" in given:
        data_section.pop("sources", None)
    if "data.sources" in given:
        data_section.pop("path", None)
    if "model.path" in given:
        overrides = model_section.get("overrides")
        if model_section.pop("preset", None) or not isinstance(overrides, dict) or not set(overrides) <= set(POSITIONS):
            model_section.pop("overrides", None)  # they make a shape
        if "model.tokenizer" not in given:
            model_section.pop("tokenizer", None)


def _parse(call, where: str):
    """Run a jsonargparse call; its errors become UserErrors that name the field, what was found and what is valid."""
    import argparse

    import jsonargparse

    try:
        return call()
    except (argparse.ArgumentError, jsonargparse.ArgumentError, TypeError, ValueError, KeyError) as error:
        raise UserError(f"{where}: {_readable(' '.join(str(error).split()))}") from error


def _readable(text: str) -> str:
    """jsonargparse's message in words: which field, what it expects, what was found."""
    text = text.removeprefix("Validation failed: ")
    text = re.sub(r"Parser key \"([^\"]+)\":?", r"\1:", text)
    text = re.sub(r"Expected an? <class '(\w+)'>", r"expects \1", text)
    text = re.sub(r"Expected an? typing\.Literal\[(.*?)\]", r"expects one of \1", text)
    text = re.sub(r"\. Got value: (.*)", r", found \1", text)
    fields = ", ".join(f.name for f in dataclasses.fields(SourceConfig))
    return text.replace(f"Problem with given class_path '{SourceConfig.__module__}.SourceConfig'", f"a source has {fields}")


def _one_source(config: RunConfig) -> RunConfig:
    """data.path written out as the one source."""
    if not config.data.path:
        return config
    sources = (SourceConfig(path=config.data.path),)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, path=None, sources=sources))


def _plain(value: Any) -> Any:
    """Tuples to lists, all the way down, for YAML and JSON."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
