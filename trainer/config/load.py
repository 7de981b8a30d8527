"""Loads a run's configuration: a YAML recipe with `--section.field value` overrides."""

import contextlib
import dataclasses
import operator
import os
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from data.errors import UserError
from data.paths import expanded, on_this_machine
from data.printable import printable
from data.untrusted_files import read_text
from model.attention.choice import LIMITS
from model.config import ADJUSTABLE

from . import command_line, parsing
from .checks import SWITCHES, check, check_switches
from .data import TODAY, SourceConfig, Today
from .fields import AUTO, FIELDS, check_names, clean_set, entry_of, field_names
from .mesh import MeshConfig
from .optimizer import ADAPTERS_LEARNING_RATE
from .schema import VERSION, RunConfig
from .stage import STAGED
from .yaml_text import MAX_BYTES, parse

# The value of a section that the planner fills in, and fields of it that it does not choose.
AUTOMATIC = "auto"
NOT_PLANNED = ("mesh.simulate",)
# Fields that the planner always chooses. It keeps what else a recipe with `auto` says of memory.
PLANNED = (
    *(f"mesh.{name}" for name in field_names(MeshConfig) if f"mesh.{name}" not in NOT_PLANNED),
    "memory.remat",
    "memory.every_k",
)
# For runs without a recipe, and the recipes that scripts.plan writes.
WARMUP_FRACTION, EPOCHS = 0.03, 1


def load(argv: Sequence[str], command_flags: Iterable[str] = ()) -> RunConfig:
    """Reads the configuration of `--config RECIPE.yaml [--section.field value ...]`, or of a model
    and data without a recipe.

    Args:
      argv: the words of the command line.
      command_flags: the calling command's flags, offered in spelling suggestions.

    Raises:
      UserError: one line that names the recipe or command line, the field, what was found and what
        would work.
    """
    return _config_of(*_recipe_of(command_line.split(argv, command_flags)))


def _recipe_of(
    words: command_line.CommandLine,
) -> tuple[dict[str, Any], command_line.CommandLine]:
    """The recipe without what the command line replaces; and the command line without --auto.

    This comes before the values have their types, since what is replaced need not agree with what
    replaces it: a recipe's sources would contradict --data.path.
    """
    flags = _texts(words)
    _require_name_and_data(flags)
    recipe = _read(words.recipe) if words.recipe else _without_recipe(flags)
    _refuse_two_lengths(recipe, words.recipe, flags)
    recipe, words = _merge_auto_flag(recipe, words)  # before the recipe's `auto` is settled
    return _drop_replaced_fields(_apply_auto(recipe, words), flags), words


def _config_of(recipe: dict[str, Any], words: command_line.CommandLine) -> RunConfig:
    """The checked configuration of a recipe and the flags for its fields.

    Its name gives the run's folder, so the defaults stored there come after it; the checks are
    last, since everything before may change a field.
    """
    flags, source = _texts(words), words.recipe or "command line"
    config = _reset_disabled_fields(_path_as_source(parsing.build(recipe, words)), flags)
    _refuse_fields_of_stages(flags, config)
    _refuse_planned_fields(config, source)
    if not config.name:
        config = dataclasses.replace(config, name=_name(words.recipe, flags))
    if config.adapter.rank and not _is_given(RATE, recipe, flags):
        config = _with_value(config, RATE.split("."), ADAPTERS_LEARNING_RATE)
    config = _keep_stored_defaults(config, recipe, flags)
    if words.recipe and words.flags:
        source = f"{source} with the command line"
    check_switches(config, source)
    return check(config, source)


def _texts(words: command_line.CommandLine) -> dict[str, str]:
    """The flags' texts by name."""
    return {flag.name: flag.text for flag in words.flags}


def resolved(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain values with every default filled in, as in config.yaml."""
    return _plain(dataclasses.asdict(config))


def dump(config: RunConfig) -> str:
    """`resolved` as YAML."""
    return yaml.safe_dump(resolved(config), sort_keys=False)


def check_version(written: Mapping[str, Any], source: str) -> None:
    """Raises UserError if a configuration has another version; VERSION is the default."""
    version = written.get("config_version", VERSION)
    if version != VERSION:
        raise UserError(
            f"{source}: config_version: found {version!r}, needs {VERSION}, which is all that "
            "this code reads"
        )


def _read(recipe: str) -> dict[str, Any]:
    """Reads a recipe as a dict and checks its version and names."""
    try:
        text = read_text(on_this_machine(recipe), most=MAX_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        folder = pathlib.Path(recipe).parent
        recipes = sorted(str(path) for path in folder.glob("[!.]*.yaml")) if folder.is_dir() else []
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{recipe}: cannot read the recipe ({reason}); recipes next to it: "
            f"{', '.join(recipes) or 'none'}"
        ) from error
    written = parse(text, recipe)
    if not isinstance(written, dict):
        raise UserError(
            f"{recipe}: expected sections such as model: and data:, found {type(written).__name__}"
        )
    check_version(written, recipe)
    data = written.get("data")
    if isinstance(data, dict) and isinstance(data.get("clean"), str):
        written = {
            **written,
            "data": {**data, "clean": clean_set(data["clean"], f"{recipe}: data.clean")},
        }
    for section in AUTO:
        if written.get(section) == AUTOMATIC:
            auto = [*(written.get("auto") or []), section]
            written = {**written, section: {}, "auto": list(dict.fromkeys(auto))}
    check_names(written, recipe)
    return written


def _without_recipe(flags: Mapping[str, str]) -> dict[str, Any]:
    """The recipe of a command that names only a model and data."""

    def value(field: str) -> Any:
        flag = command_line.Flag(field, flags.get(field, "null"))
        return command_line.value_of(flag, FIELDS[field])

    warmup = {} if "optimizer.warmup_steps" in flags else {"warmup_fraction": WARMUP_FRACTION}
    return {
        "config_version": VERSION,
        "auto": ["mesh", "memory", "positions"],
        "optimizer": warmup,
        "train": {} if "train.steps" in flags or value("stages") else {"epochs": EPOCHS},
    }


def _refuse_two_lengths(recipe: Mapping[str, Any], source: str, flags: Mapping[str, str]) -> None:
    """Raises UserError for a recipe with both steps and epochs, of which only epochs would count,
    unless a flag replaces one, or a run has recorded it, with the steps of its epochs."""
    train = recipe.get("train", {})
    steps, epochs = train.get("steps"), train.get("epochs")
    is_recorded = "planned" in recipe
    if None in (steps, epochs) or is_recorded or flags.keys() & {"train.steps", "train.epochs"}:
        return
    raise UserError(
        f"{source}: train.steps: found {steps!r} with train.epochs {epochs!r}; keep one of them"
    )


def _name(recipe: str, flags: Mapping[str, str]) -> str:
    """A run's name: the recipe's, or without one that of the model's folder or on the hub."""
    if recipe:
        return pathlib.Path(recipe).stem
    model = flags["model.path"]
    folder = expanded(model)
    if folder.is_dir():
        path = pathlib.Path(os.path.abspath(folder))
    else:
        path = pathlib.Path(model.partition("@")[0])  # a revision may contain slashes
    if not (name := path.name.lower()):
        raise UserError(f"command line: model.path: found {model!r}, needs a folder with a name")
    return name


def _require_name_and_data(flags: Mapping[str, str]) -> None:
    """Raises UserError for an empty --name or a --data.path of null, such as from a shell variable
    that is not set; other fields' values are checked with their types."""
    if flags.get("name") == "":
        raise UserError("command line: name: found '', needs a name")
    if flags.get("data.path") == "null":
        raise UserError("command line: data.path: found null, needs a path")


def _merge_auto_flag(
    recipe: dict[str, Any], words: command_line.CommandLine
) -> tuple[dict[str, Any], command_line.CommandLine]:
    """The recipe and command line, with the sections of --auto treated like that of --mesh auto.

    A list replaces the recipe's; any other value stays, to be refused with the field's type.
    """
    flag = next((flag for flag in words.flags if flag.name == "auto"), None)
    listed = command_line.value_of(flag, FIELDS["auto"]) if flag else None
    if not isinstance(listed, list) or not set(map(str, listed)) <= {*AUTO, "positions"}:
        return recipe, words
    flags = [other for other in words.flags if other is not flag]
    auto = (*words.auto, *map(str, listed))
    return {**recipe, "auto": []}, words._replace(flags=flags, auto=auto)


def _apply_auto(recipe: dict[str, Any], words: command_line.CommandLine) -> dict[str, Any]:
    """The recipe with `auto` as the command line says.

    --mesh auto and --memory auto replace the recipe's section; a flag for an axis or for memory
    takes the section back from the planner.
    """
    auto = [*dict.fromkeys([*(recipe.get("auto") or []), *words.auto])]
    given = [flag.name for flag in words.flags if flag.name not in NOT_PLANNED]
    for section in (name for name in words.auto if name in AUTO):
        if named := [name for name in given if name.startswith(f"{section}.")]:
            raise UserError(f"command line: --{section} auto and --{named[0]} exclude each other")
        kept = {
            name: value
            for name, value in recipe.get(section, {}).items()
            if f"{section}.{name}" in NOT_PLANNED
        }
        recipe = {**recipe, section: kept}
    auto = [name for name in auto if not any(each.startswith(f"{name}.") for each in given)]
    if not auto:  # a run's record of an earlier answer
        recipe = {name: value for name, value in recipe.items() if name != "planned"}
    return {**recipe, "auto": auto} if auto or "auto" in recipe else recipe


def _drop_replaced_fields(recipe: Mapping[str, Any], flags: Mapping[str, str]) -> dict[str, Any]:
    """The recipe without fields that `flags` (name -> text) replace by other fields.

    --data.path and --data.sources replace each other; for a single source --data.path replaces only
    the path. --train.steps and --train.epochs replace each other; a run's recorded configuration
    has both. --model.path replaces a model from scratch: its preset, tokenizer and shape overrides,
    but not those of positions. --attention.kernel replaces tiles that the kernel does not support.
    """
    for pair in (("data.path", "data.sources"), ("train.steps", "train.epochs")):
        if set(pair) <= flags.keys():
            raise UserError(
                f"command line: --{pair[0]} and --{pair[1]} exclude each other; give one"
            )
    model, data, train, attention = (
        dict(recipe.get(section, {})) for section in ("model", "data", "train", "attention")
    )
    if "data.path" in flags and len(data.get("sources") or []) != 1:
        data.pop("sources", None)
    if "data.sources" in flags:
        data.pop("path", None)
    if "train.steps" in flags:
        train.pop("epochs", None)
    if "model.path" in flags:
        overrides = model.get("overrides")
        if (
            model.pop("preset", None)
            or not isinstance(overrides, dict)
            or not set(overrides) <= set(ADJUSTABLE)
        ):
            model.pop("overrides", None)
        if "model.tokenizer" not in flags:
            model.pop("tokenizer", None)
    if flags.get("attention.kernel") in [
        name for name, limits in LIMITS.items() if limits.own_tiles
    ]:
        attention = {
            name: value
            for name, value in attention.items()
            if name not in ("query_tile", "key_tile")
        }
    return {**recipe, "model": model, "data": data, "train": train, "attention": attention}


def _path_as_source(config: RunConfig) -> RunConfig:
    """The configuration with data.path as its only source, with the recipe's other fields."""
    if not config.data.path:
        return config
    (source,) = config.data.sources or (SourceConfig(path=""),)
    sources = (dataclasses.replace(source, path=config.data.path),)
    return dataclasses.replace(
        config, data=dataclasses.replace(config.data, path=None, sources=sources)
    )


def _reset_disabled_fields(config: RunConfig, flags: Mapping[str, str]) -> RunConfig:
    """The configuration with defaults for the recipe's fields that have no effect without a field
    that a flag turns off: --adapter.rank 0 also resets adapter.alpha."""
    defaults = RunConfig()
    for switch in SWITCHES:
        if not flags.keys() & {switch.field, *switch.others} or switch.counts(config):
            continue
        for field in switch.fields:
            if field not in flags:
                default = operator.attrgetter(field)(defaults)
                config = _with_value(config, field.split("."), default)
    return config


RATE, OLD_RATE = "optimizer.learning_rate", 2e-5  # once the default, also with adapters
# Fields whose defaults have changed; older runs keep the values in their folders.
CHANGED_DEFAULTS = ("data.template", "data.clean.html", "data.clean.rate_limits", RATE)


def _keep_stored_defaults(
    config: RunConfig, recipe: Mapping[str, Any], flags: Mapping[str, str]
) -> RunConfig:
    """The configuration with what the run in its folder began with: the old default of each field
    of CHANGED_DEFAULTS that neither the recipe nor a flag gives, and for `today` its day. A
    learning rate that was not the default must be given again.

    A line on standard error names each kept value.
    """
    stored = _stored(config)
    for field in CHANGED_DEFAULTS:
        default = operator.attrgetter(field)(config)
        value = entry_of(stored, field)
        if _is_given(field, recipe, flags) or value in (None, default):
            continue
        if not isinstance(value, type(default)):
            continue
        if field == RATE and (value != OLD_RATE or _first_stage_has_a_rate(config)):
            continue
        config = _keeping(config, field, value, f"the default is now {default}")
    field = "data.template_date"
    day, today = entry_of(stored, field), config.data.template_date
    wants_today = flags.get(field, entry_of(recipe, field)) == TODAY
    if wants_today and isinstance(day, str) and day != today:
        with contextlib.suppress(ValueError):  # no date: opening the run reports the reason
            config = _keeping(config, field, day, f"today is {today}")
    return config


def _is_given(field: str, recipe: Mapping[str, Any], flags: Mapping[str, str]) -> bool:
    """Whether the recipe or a flag gives a field."""
    return field in flags or entry_of(recipe, field) is not None


def _first_stage_has_a_rate(config: RunConfig) -> bool:
    """Whether the rate stored in the first stage's folder is its own."""
    return bool(config.stages and config.stages[0].learning_rate)


def _keeping(config: RunConfig, field: str, value: Any, otherwise: str) -> RunConfig:
    """The configuration with the value that the run's folder has for a field; a line on standard
    error says so, in process 0 if processes are numbered.

    Args:
      otherwise: what the value would be in a new run, for the message.
    """
    kept = _with_value(config, field.split("."), value)
    if not config.distributed.process_id:
        print(
            f"{config.location}: keeps {field} {printable(str(value))}, with which it began; "
            f"{otherwise}",
            file=sys.stderr,
            flush=True,
        )
    return kept


def _with_value(section: Any, names: list[str], value: Any) -> Any:
    """A section or configuration with another value at this path of field names."""
    inner = value if len(names) == 1 else _with_value(getattr(section, names[0]), names[1:], value)
    return dataclasses.replace(section, **{names[0]: inner})


def _stored(config: RunConfig) -> dict[str, Any]:
    """The configuration in a run's folder, or its first stage's; empty if unreadable: opening the
    run then reports the reason.
    """
    names = ("stages/1/config.yaml", "config.yaml")
    if config.in_bucket:
        from trainer.run.bucket import Bucket  # TensorStore, which most commands do without

        bucket = Bucket(config.location)
        contents = (bucket.version(name).content for name in names)
        content = next(filter(None, contents), b"")
        written = parse(content.decode(errors="replace"), f"{config.location}/config.yaml")
        return written if isinstance(written, dict) else {}
    folder = config.folder
    for name in names:
        try:
            written = parse(read_text(folder / name, folder, MAX_BYTES), str(folder / name))
        except (OSError, ValueError, UserError):
            continue
        if isinstance(written, dict):
            return written
    return {}


def _refuse_fields_of_stages(flags: Mapping[str, str], config: RunConfig) -> None:
    """Raises UserError for a flag whose field every stage replaces."""
    whose, remedy = (
        ("the stages of --stages", "leave the flag out, or change them")
        if "stages" in flags
        else ("the recipe's stages", "change them in the recipe, or give them as --stages")
    )
    for field, name in STAGED.items():
        if (
            field in flags
            and config.stages
            and all(stage.replaces(name) for stage in config.stages)
        ):
            raise UserError(
                f"command line: --{field} has no effect, since each of {whose} has its own {name}; "
                f"{remedy}"
            )


def _refuse_planned_fields(config: RunConfig, source: str) -> None:
    """Raises UserError for a field of the recipe that the planner would replace. A run's
    configuration may have it: it is the planner's own answer, recorded with `planned`."""
    defaults = RunConfig()
    for field in PLANNED:
        section, value = field.partition(".")[0], operator.attrgetter(field)(config)
        default = operator.attrgetter(field)(defaults)
        if section in config.auto and not config.planned and value != default:
            raise UserError(
                f"{source}: auto: found {section}, which replaces {field} {_plain(value)}; leave "
                "one of them out"
            )


def _plain(value: Any) -> Any:
    """`value` with all tuples as lists and plain texts, for YAML and JSON."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Today) else value
