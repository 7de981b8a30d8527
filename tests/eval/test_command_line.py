"""The command lines of evaluations: sizes below 1 are refused, and help and errors are accurate."""

import pytest

from eval import coreference, harness, line_retrieval, needle, ruler


@pytest.mark.parametrize(
    ("flag", "needed"),
    [
        ("max-new-tokens", "write a number of tokens such as 4096, 64K or 1M"),
        ("fsdp", "a whole number, at least 1, is needed"),
        ("tensor", "a whole number, at least 1, is needed"),
        ("sequence", "a whole number, at least 1, is needed"),
    ],
)
@pytest.mark.parametrize("wrong", ["0", "-1", "1.5"])
def test_sizes_are_at_least_one(flag, needed, wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        line_retrieval.parse(
            ["--checkpoint", "x", "--output", "y", "--lines", "2", f"--{flag}", wrong]
        )
    assert f"argument --{flag}: found {wrong}; {needed}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (needle, "--tokens 512 --seed"),
        (ruler, "--tokens 512 --seed"),
        (coreference, "--tokens 512 --seed"),
        (line_retrieval, "--lines 5 --seed"),
        (line_retrieval, "--cases a.jsonl --limit"),
    ],
)
def test_seeds_and_limits_are_at_least_zero(command, words, capsys):
    given = ["--checkpoint", "x", "--output", "y", *words.split()]
    flag = given[-1]
    assert vars(command.parse([*given, "0"]))[flag.strip("-")] == 0
    for wrong in ("-1", "1.5"):
        with pytest.raises(SystemExit, match="2"):
            command.parse([*given, wrong])
        needed = "a whole number, at least 0, is needed"
        assert f"argument {flag}: found {wrong}; {needed}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words", "repeated"),
    [
        (needle, "--tokens 4096 8K 4K", "--tokens: found 4096"),
        (needle, "--tokens 512 --depths 0.5 0.50", "--depths: found 0.5"),
        (needle, "--tokens 512 --needles 1 4 1", "--needles: found 1"),
        (ruler, "--tokens 512 512", "--tokens: found 512"),
        (ruler, "--tokens 512 --tasks vt cwe vt", "--tasks: found vt"),
        (coreference, "--tokens 512 1K 512", "--tokens: found 512"),
        (coreference, "--tokens 512 --alike 2 2", "--alike: found 2"),
        (line_retrieval, "--lines 5 5", "--lines: found 5"),
        (line_retrieval, "--lines 5 6 --lines 5", "--lines: found 5"),
        (line_retrieval, "--tokens 1K 1024", "--tokens: found 1024"),
        (line_retrieval, "--cases a.jsonl a.jsonl", "--cases: found a.jsonl"),
    ],
)
def test_a_repeated_value_is_refused(command, words, repeated, capsys):
    """The same cases, counted twice, would only make an interval narrower."""
    with pytest.raises(SystemExit, match="2"):
        command.parse(["--checkpoint", "x", "--output", "y", *words.split()])
    assert capsys.readouterr().err == (f"error: {repeated} twice; each value once would work\n")


@pytest.mark.parametrize(
    ("command", "words", "error"),
    [
        (needle, "--tokens 512 --top-p 0.9", "--top-p: is for sampled answers, and the most"),
        (ruler, "--tokens 512 --sample-seed 3", "--sample-seed: is for sampled answers, and the"),
        (ruler, "--tokens 512 --tasks vt cwe --text a.txt", "--text: none of --tasks takes a text"),
        (needle, "--tokens 512 --depths 0 2", "--depths: found [0.0, 2.0]; each needs to be from"),
        (harness, "--tasks arc_easy --template chatml", "--template: questions are asked in a"),
        (harness, '--tasks arc_easy --template-kwargs {"a":1}', "--template-kwargs: questions are"),
    ],
)
def test_a_flag_without_effect_or_out_of_range_is_refused(command, words, error, tmp_path, capsys):
    given = ["--checkpoint", "x", "--output", str(tmp_path / "y"), *words.split()]
    assert command.main(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {error}") and not (tmp_path / "y").exists()


def test_adapters_given_one_by_one_are_all_evaluated():
    flags = ["--checkpoint", "x", "--output", "y", "--lines", "5", "--adapter", "a", "b"]
    assert line_retrieval.parse(flags).adapter == ["a", "b"]
    assert line_retrieval.parse([*flags, "--adapter", "c"]).adapter == ["a", "b", "c"]


@pytest.mark.parametrize(("command", "continues"), [(line_retrieval, True), (harness, False)])
def test_only_an_evaluation_with_a_journal_claims_to_resume(command, continues, capsys):
    with pytest.raises(SystemExit):
        command.parse(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "folder for the results" in shown
        and ("repeat the command to continue" in shown) is continues
    )
    assert "quantization of the base weights" in shown
