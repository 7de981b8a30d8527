"""A command's options are typed fields: parsed, defaulted, refused in one line, and described."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import pytest

from data.errors import UserError
from trainer.options import EachOnce, Tokens, command, option, other_words, parse
from trainer.run.outcome import TRY_AGAIN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    folder: Path = option("a folder", positional=True)
    model: str = option("a model")
    lengths: tuple[Tokens, ...] = option("of the rows", (4096, 8192))
    head_dim: int | None = option("size of a head", None)
    kernel: str = option("of attention", "auto", choices=("auto", "xla"))
    compiled: bool = option("compile it")


def test_fields_hold_the_values_of_options():
    assert parse(Options, ["here", "--model", "m"]) == Options(
        folder=Path("here"),
        model="m",
        lengths=(4096, 8192),
        head_dim=None,
        kernel="auto",
        compiled=False,
    )
    words = "here --model m --lengths 1K 2 --head_dim 64 --kernel xla --compiled"
    options = parse(Options, words.split())
    assert (options.lengths, options.head_dim, options.kernel, options.compiled) == (
        (1024, 2),
        64,
        "xla",
        True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lists:
    ranks: tuple[int, ...] = option("numbers", (4, 8), choices=(2, 4, 8))
    lengths: tuple[Tokens, ...] = option("each once", (), action=EachOnce)
    add: tuple[str, ...] = option("a pair", (), nargs=2, metavar=("NAME", "FILE"))


def test_a_list_given_again_is_longer():
    """Only its first use replaces the default."""
    assert parse(Lists, []) == Lists(ranks=(4, 8), lengths=(), add=())
    words = "--ranks 4 --lengths 1K 2 --ranks 8 2 --lengths 3 --add a b"
    assert parse(Lists, words.split()) == Lists(
        ranks=(4, 8, 2), lengths=(1024, 2, 3), add=("a", "b")
    )
    assert parse(Lists, ["--ranks", "2"]).ranks == (2,)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lengths 1K 2 --lengths 1024", "--lengths: found 1024 twice; each value once"),
        ("--add a b --add c d", "argument --add: given twice; once would work"),
    ],
)
def test_a_list_that_cannot_be_joined_is_refused(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(Lists, words.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("here", "--model"),
        ("--model m", "folder"),
        ("here --model m --lengths few", "found few"),
        ("here --model m --kernel xl", "did you mean xla?"),
        ("here --model=", "argument --model: found '', needs a value"),
        ("here --model m --head-dims 1", "did you mean --head-dim?"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(Options, words.split())
    printed = capsys.readouterr().err
    assert stopped.value.code == 2 and message in printed and printed.count("\n") == 1


def test_an_empty_folder_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse(Options, ["", "--model", "m"])
    assert "argument folder: found '', needs a value" in capsys.readouterr().err


def test_help_has_every_option_and_its_default(capsys):
    with pytest.raises(SystemExit):
        parse(Options, ["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "python -m tests.trainer.test_options" in printed
    for words in ("of the rows (default 4096 8192)", "(default auto)", "compile it", "a folder"):
        assert words in printed


def test_a_commands_exit_code_is_what_its_work_returns(capsys):
    seen: list[Options] = []

    def work(options: Options) -> int:
        seen.append(options)
        if options.compiled:
            raise UserError("compiled: not here")
        return 3

    main = command(Options, work)
    assert main(["here", "--model", "m"]) == 3 and seen[0].model == "m"
    assert main(["here", "--model", "m", "--compiled"]) == 2
    assert capsys.readouterr().err == "error: compiled: not here\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """Writes a folder."""

    output: str = option("the folder")


def test_a_full_disk_is_named_by_the_option_output(capsys):
    def work(options: Written) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert command(Written, work)(["--output", "results"]) == TRY_AGAIN
    assert "error: results: No space left on device" in capsys.readouterr().err


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """Starts something."""

    processes: int = option("how many", 1)
    per_host: int = option("on each host", 1)
    others: tuple[str, ...] = other_words("--config RECIPE.yaml", "They go to another command.")


def test_arguments_that_are_no_option_keep_their_order(capsys):
    words = "--config a.yaml --processes 2 --train.batch_size 3 --per_host 4 here"
    options = parse(Launch, words.split())
    assert (options.processes, options.per_host) == (2, 4)
    assert options.others == ("--config", "a.yaml", "--train.batch_size", "3", "here")
    with pytest.raises(SystemExit):
        parse(Launch, ["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "[--per-host PER_HOST] --config RECIPE.yaml" in printed
    assert printed.endswith("They go to another command.")
