"""A path in a store, such as gs://bucket/folder, is read or written there, or refused by name; a
folder named `gs:` is never made."""

import argparse
import importlib
from pathlib import Path

import pytest

import train
from tests.conftest import REPOSITORY
from tests.scripts.test_help import COMMANDS
from trainer import arguments, xla_flags
from trainer.config import checks, fields

# Commands whose options hold no local path.
OTHERS = {"scripts.quickstart", "scripts.launch_tpu", "scripts.benchmarks.page"}
NO_PATHS = (int, float, arguments.at_least_one, arguments.store_path, arguments.free_text)


class ParserFound(Exception):
    """Ends a command as soon as its parser is known."""


def parser_of(main, monkeypatch) -> argparse.ArgumentParser:
    parsers = []

    def keep(parser, *_):
        parsers.append(parser)
        raise ParserFound

    with monkeypatch.context() as patch:
        for name in ("parse_args", "parse_known_args"):
            patch.setattr(argparse.ArgumentParser, name, keep)
            patch.setattr(arguments.CommandParser, name, keep)
        with pytest.raises(ParserFound):
            main([])
    return parsers[0]


def with_subcommands(parser):
    yield parser, []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield inner, [name]


def words_for(parser, action, value):
    """The command line on which `action` has this value; positionals in front of it get a name."""
    if action.option_strings:
        count = action.nargs if isinstance(action.nargs, int) else 1
        return [action.option_strings[-1], *[value] * count]
    before = [other for other in parser._actions if not other.option_strings]
    return ["name"] * before.index(action) + [value]


@pytest.mark.parametrize("command", sorted({*COMMANDS, "trainer.xla_flags"} - OTHERS))
def test_every_option_accepts_or_refuses_stores(command, tmp_path, monkeypatch, capsys):
    main = (
        xla_flags.main if command == "trainer.xla_flags" else importlib.import_module(command).main
    )
    parsers = list(with_subcommands(parser_of(main, monkeypatch)))
    monkeypatch.chdir(tmp_path)
    for parser, subcommand in parsers:
        for action in parser._actions:
            if action.nargs == 0 or action.choices or action.type in NO_PATHS:
                continue
            words = subcommand + words_for(parser, action, "gs://bucket/folder")
            with pytest.raises(SystemExit) as stopped:
                main(words)
            stderr = capsys.readouterr().err
            assert stopped.value.code == 2 and "gs://" in stderr and stderr.count("\n") == 1, (
                words,
                stderr,
            )
    assert not list(tmp_path.iterdir())


def test_the_excluded_commands_exist():
    assert set(COMMANDS) | {"scripts.quickstart"} >= OTHERS


def texts(kind: object) -> bool:
    """Whether a field of this type can hold a path."""
    return kind is str or any(texts(inner) for inner in getattr(kind, "__args__", ()))


@pytest.mark.parametrize(
    "field",
    sorted(
        name
        for name, kind in fields.FIELDS.items()
        if texts(kind)
        and name not in (*checks.IN_STORES, *checks.TEXTS)
        and name not in fields.LISTS
    ),
)
def test_every_field_accepts_or_refuses_stores(field, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = "gs://bucket/folder"
    recipe = REPOSITORY / "configs/quickstart.yaml"
    kind = fields.FIELDS[field]
    value = f"{{test: {path}}}" if "dict" in str(kind) else path
    value = f"[{value}]" if getattr(kind, "__origin__", None) is tuple else value
    flags = ["--trajectories.task", "walker_walk"] if field == "trajectories.path" else []
    assert train.main(["--config", str(recipe), f"--{field}", value, *flags]) == 2
    stderr = capsys.readouterr().err
    assert (
        field.rpartition(".")[2] in stderr
        and stderr.startswith("error: ")
        and stderr.count("\n") == 1
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["--config", "gs://bucket/recipe.yaml"],
        ["--data.sources", '[{"path": "synthetic:lines?like=gs://bucket/cases.jsonl"}]'],
        ["--data.template", "gs://bucket/t.jinja"],
        ["--evaluations", '[{"test": "line_retrieval", "like": "gs://bucket/cases.jsonl"}]'],
    ],
)
def test_paths_inside_other_values(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = ["--config", str(REPOSITORY / "configs/quickstart.yaml"), "--model.tokenizer"]
    recipe.append(str(REPOSITORY / "data/fixtures/tiny_tokenizer"))
    recipe = [] if words[0] == "--config" else recipe
    assert train.main([*recipe, *words]) == 2
    assert "gs:// is not supported here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_cache_cannot_be_in_a_store(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONGSTRIPE_CACHE", "gs://bucket/cache")
    assert train.main(["--config", str(REPOSITORY / "configs/quickstart.yaml")]) == 2
    assert "gs:// is not supported here" in capsys.readouterr().err
    assert not list(Path(tmp_path).iterdir())
