"""The command lines of evaluations: sizes below 1 are refused, and help and errors are accurate."""

import pytest

from eval import harness, line_retrieval


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
