"""Every command describes itself: --help prints its flags, whatever characters their descriptions
contain."""

import argparse
import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A subprocess of bench_kernels, which no user starts.
INNER = {"scripts.benchmarks.bench_kernels.case"}
COMMANDS = sorted(
    {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in ("eval", "scripts")
        for path in (ROOT / folder).glob("**/*.py")
        if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
        and re.search(
            r"^(def main\(argv|main = (runner\.)?command\()", path.read_text("utf-8"), re.MULTILINE
        )
    }
    - INNER
)
# How the help of flags that take a number of tokens begins.
TOKENS = r"(number of |our )?tokens\b(?! are)|lengths,"


def module_of_command(name: str):
    """Returns the module that `python -m NAME` runs."""
    module = importlib.import_module(name)
    return importlib.import_module(f"{name}.__main__") if hasattr(module, "__path__") else module


def test_every_command_is_listed():
    assert {"eval.line_retrieval", "scripts.chat", "scripts.benchmarks.in_context"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_printed(command, capsys, monkeypatch):
    """It describes each flag; a number of tokens may be written 64K."""
    parsers = []
    print_help = argparse.ArgumentParser.print_help
    monkeypatch.setattr(
        argparse.ArgumentParser,
        "print_help",
        lambda parser, file=None: parsers.append(parser) or print_help(parser, file),
    )
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(command).main(["--help"])
    assert stopped.value.code in (0, None)
    assert "usage: " in capsys.readouterr().out
    actions = [action for parser in parsers for action in parser._actions]
    assert [action.dest for action in actions if not action.help] == []
    for action in actions:
        if re.match(TOKENS, action.help) or action.dest in ("tokens", "length", "lengths"):
            assert action.type("64K") == 65536, action.dest
