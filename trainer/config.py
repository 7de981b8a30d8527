"""The run's configuration: typed sections, read from a YAML recipe and overridden by `--section.field value`."""

import dataclasses
import difflib
import math
import pathlib
import re
import sys
from typing import Any

import yaml

from data.errors import UserError

from .schema import (
    SCHEDULES,
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

__all__ = [
    "SCHEDULES",
    "VERSION",
    "AttentionConfig",
    "CheckpointConfig",
    "DataConfig",
    "EvaluateConfig",
    "LoggingConfig",
    "MemoryConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "SourceConfig",
    "TrainConfig",
    "check",
    "check_devices",
    "dump",
    "from_resolved",
    "load",
    "resolved",
    "schedule_name",
    "upgraded",
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


def load(argv: list[str] | None = None) -> RunConfig:
    """The configuration of `--config RECIPE.yaml [--section.field value ...]`; UserError for whatever is wrong."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if {"-h", "--help"} & set(argv):
        parser.parse_args(["--help"])  # prints and exits
    recipe, flags = _split(argv)
    written = _read(recipe)
    given = {flag.split("=", 1)[0].removeprefix("--") for flag in flags if flag.startswith("--")}
    _replace_shorthands(written, given)
    base = _parse(lambda: parser.parse_object(written), recipe)
    if flags:
        base = _parse(lambda: parser.parse_args(flags, namespace=base), "command line")
    config = parser.instantiate_classes(base)
    config = RunConfig(**{field.name: config[field.name] for field in dataclasses.fields(RunConfig)})
    if not config.name:
        config = dataclasses.replace(config, name=pathlib.Path(recipe).stem)
    return check(_one_source(config), f"{recipe} with the command line" if flags else recipe)


def resolved(config: RunConfig) -> Row:
    """The configuration as plain dicts, lists and scalars, every default filled in: what config.yaml holds."""
    return _plain(dataclasses.asdict(config))


def from_resolved(written: Row, where: str = "config.yaml") -> RunConfig:
    """The RunConfig that `resolved` made a dict of, as checkpoints keep it."""
    written = upgraded(written, where)
    _check_names(written, where)
    parser = _parser()
    config = parser.instantiate_classes(_parse(lambda: parser.parse_object(written), where))
    return check(RunConfig(**{field.name: config[field.name] for field in dataclasses.fields(RunConfig)}), where)


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


def _split(argv: list[str]) -> tuple[str, list[str]]:
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
            _check_flag(flag.removeprefix("--"))
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


def _check_flag(name: str) -> None:
    """Refuse flags that are no leaf field, with the nearest one."""
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
    valid = [leaf for leaf in LEAVES if leaf.startswith(section + ".")] if section in SECTIONS else list(LEAVES)
    raise UserError(f"command line: unknown field --{name}{_nearest(name, LEAVES, '--')}; valid: {', '.join(valid)}")


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
    try:
        written = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{recipe}: not valid YAML: {' '.join(str(error).split())}") from error
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
        model_section.pop("preset", None)
        model_section.pop("overrides", None)
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


# Checking what types cannot


def check(config: RunConfig, where: str = "configuration") -> RunConfig:
    """`config` itself, or a UserError naming the field, what was found and what would be right. Needs no device."""

    def need(right: bool, field: str, expected: str) -> None:
        if not right:
            found = config
            for part in field.split("."):
                found = getattr(found, part)
            raise UserError(f"{where}: {field} is {found!r}; {expected}")

    need(config.config_version == VERSION, "config_version", f"this code reads {VERSION}")
    model, data, mesh, train = config.model, config.data, config.mesh, config.train
    attention, optimizer = config.attention, config.optimizer
    axes = ("data", "fsdp", "tensor", "sequence")
    for field in axes:
        need(getattr(mesh, field) >= 1, f"mesh.{field}", "at least 1 is needed")
    need(all(axis in axes and isinstance(factor, int) and factor >= 1 and getattr(mesh, axis) % factor == 0
             for axis, factor in mesh.dcn.items()), "mesh.dcn",
         f"factors of the axes are needed, such as {{data: 2}}, each a divisor of its axis in {_product(mesh)}")
    need(sorted(mesh.order) in ([], sorted(axes)), "mesh.order", f"all four axes are needed, each once: {', '.join(axes)}")
    at_least_one = ("data.context_length", "train.steps", "train.batch_size", "train.log_every", "checkpoint.keep",
                    "evaluate.max_new_tokens", "train.accumulation", "memory.every_k",
                    "memory.attention_groups")  # fmt: skip
    not_negative = ("mesh.simulate", "train.evaluate_every", "checkpoint.every", "attention.query_tile",
                    "attention.key_tile", "memory.feed_forward_chunk", "memory.projection_chunk", "memory.loss_chunk",
                    "optimizer.warmup_steps", "optimizer.weight_decay", "optimizer.clip_norm")  # fmt: skip
    for field in at_least_one + not_negative:
        section, name = field.split(".")
        least = 1 if field in at_least_one else 0
        need(getattr(getattr(config, section), name) >= least, field, f"at least {least} is needed")
    need(0 < optimizer.learning_rate < math.inf, "optimizer.learning_rate", "a positive number is needed")
    need(0 <= optimizer.final_fraction <= 1, "optimizer.final_fraction", "a share between 0 and 1 is needed")
    need(optimizer.epsilon > 0, "optimizer.epsilon", "a positive number is needed")
    for field in ("beta1", "beta2"):
        need(0 <= getattr(optimizer, field) < 1, f"optimizer.{field}", "a number from 0 to below 1 is needed")
        # bfloat16 has 8 bits: a moment that loses less than 1/256 of itself a step would never shrink.
        need(optimizer.moment_dtype == "float32" or getattr(optimizer, field) <= 0.99, f"optimizer.{field}",
             "with optimizer.moment_dtype bfloat16 at most 0.99 is needed")
    profiled = config.logging.profile_steps
    need(not profiled or (len(profiled) == 2 and 1 <= profiled[0] <= profiled[1] <= train.steps), "logging.profile_steps",
         f"the first and the last step of a profile are needed, from 1 to train.steps = {train.steps}, or []")
    need(0 <= data.held_out_fraction < 1, "data.held_out_fraction", "a share from 0 to below 1 is needed")

    need(bool(data.sources), "data.sources", "no data: give --data.path FILE, or sources in the recipe")
    for number, source in enumerate(data.sources):
        if not source.weight > 0:
            raise UserError(f"{where}: data.sources[{number}].weight is {source.weight!r}; a positive number is needed")
    need(not (model.path and model.preset), "model.preset", "model.path is given too; keep one of them")
    need(not (model.path and model.overrides), "model.overrides", "model.path fixes the shape; leave overrides out")
    need(bool(model.path or model.preset or model.overrides), "model.path",
         "no model: give --model.path HF_DIR, or for a model from scratch model.preset or model.overrides")  # fmt: skip
    need(bool(model.path or model.tokenizer), "model.tokenizer", "a model from scratch needs a tokenizer's folder")
    try:
        re.compile(model.trainable)
    except re.error as error:
        raise UserError(f"{where}: model.trainable is {model.trainable!r}, no regular expression: {error}") from error

    schedule = schedule_name(attention)
    need(schedule in SCHEDULES, "attention.schedule",
         f"valid: {', '.join(SCHEDULES)}, or a mapping whose `name` is one of them")  # fmt: skip
    need(schedule != "local" or mesh.sequence == 1, "attention.schedule",
         f"local cannot attend across mesh.sequence = {mesh.sequence} shards; use ring or all_gather")  # fmt: skip

    twice = attention.layout == "zigzag"
    shards, length = mesh.sequence * (2 if twice else 1), data.context_length
    up, down = -(-length // shards) * shards, length // shards * shards
    below = f" (or {down})" if down else ""
    need(length % shards == 0, "data.context_length",
         f"it must be a multiple of {'2 * ' if twice else ''}mesh.sequence = {shards}{' (zigzag)' if twice else ''}; "
         f"the next good length is {up}{below}")  # fmt: skip
    parts = mesh.sequence * mesh.tensor
    need(not mesh.sequence_parallel or length % parts == 0, "data.context_length",
         f"with mesh.sequence_parallel it must be a multiple of mesh.sequence * mesh.tensor = {parts}")  # fmt: skip
    rows = mesh.data * mesh.fsdp * train.accumulation
    need(train.batch_size % rows == 0, "train.batch_size",
         f"it must be a multiple of mesh.data * mesh.fsdp * train.accumulation = {rows}; the next good size is "
         f"{-(-train.batch_size // rows) * rows}")  # fmt: skip
    need(mesh.simulate in (0, mesh.devices), "mesh.simulate",
         f"the mesh takes {_product(mesh)} devices; simulate {mesh.devices}, or change the mesh")  # fmt: skip
    return config


def schedule_name(attention: AttentionConfig) -> str | None:
    """The schedule's name, whether given plainly or in a mapping."""
    return attention.schedule.get("name") if isinstance(attention.schedule, dict) else attention.schedule


def check_devices(config: RunConfig, n: int) -> None:
    """UserError unless the mesh takes just the `n` devices there are (simulated ones may be more)."""
    mesh = config.mesh
    if mesh.devices == n or (mesh.simulate and mesh.devices <= n):
        return
    raise UserError(
        f"mesh: {_product(mesh)} devices are asked for, {n} found; change --mesh.data, --mesh.fsdp, --mesh.tensor or "
        f"--mesh.sequence so that their product is {n}, or try it on the CPU with --mesh.simulate {mesh.devices}"
    )


def _product(mesh: MeshConfig) -> str:
    return (
        f"data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor} x sequence {mesh.sequence} = {mesh.devices}"
    )
