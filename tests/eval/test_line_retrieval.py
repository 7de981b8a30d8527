"""The command of line retrieval refuses wrong options before it opens the model, and cases that
would be counted twice."""

import shutil
from types import SimpleNamespace

import pytest

from data.errors import UserError
from eval import line_cases, line_retrieval
from tests.conftest import REPOSITORY
from trainer import inference

CASES = REPOSITORY / "data/fixtures/line_cases.jsonl"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--output {file} --lines 2", "taken.txt: cannot be a folder for results (File exists)"),
        (
            "--output {file}/within --lines 2",
            "within: cannot be a folder for results (Not a directory)",
        ),
        (
            "--output {folder}",
            "nothing to evaluate: give --cases FILE.jsonl, --lines 20 50 or --tokens 4096",
        ),
        (
            "--output {folder} --lines 2 --cases 4",
            "--cases: found 4, which is not a file of cases; --count 4 would generate",
        ),
        (
            "--output {folder} --lines 2 --rows 3 --fsdp 2",
            "--rows: 3 is not a multiple of --fsdp 2; 4 would work",
        ),
        (
            "--output {folder} --lines 2 --limit 2",
            "--limit: is for the files of --cases, and there are none; --count sets",
        ),
        *(
            (
                f"--output {{folder}} --cases {{cases}} {words}",
                f"{words.split()[0]}: is for generated cases, and there are none; with --lines",
            )
            for words in (
                "--count 50",
                "--questions 2",
                "--keys short",
                "--unseen",
                "--like {cases}",
                "--seed 0",
            )
        ),
        *(
            (
                f"--output {{folder}} --lines 2 {words}",
                f"{words.split()[0]}: is for sampled answers",
            )
            for words in ("--top-p 0.9", "--sample-seed 3")
        ),
        (
            "--output {folder} --lines 20 --keys short",
            "20 lines cannot be generated; short has keys for 1 to 8 lines",
        ),
        (
            "--output {folder} --lines 2 --count 0",
            "--count: 0 cases of each length; 1 or more would work",
        ),
    ],
)
def test_refused_before_the_model_is_opened(tmp_path, capsys, monkeypatch, flags, words):
    monkeypatch.setattr(
        inference, "open_for_inference", lambda *_, **__: pytest.fail("the model was opened")
    )
    (tmp_path / "taken.txt").write_text("")
    flags = flags.format(file=tmp_path / "taken.txt", folder=tmp_path / "out", cases=CASES)
    assert line_retrieval.main(["--checkpoint", "nowhere", *flags.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line


def letters(*flags):
    """Returns the command's arguments, and a respondent whose tokens are letters."""
    args = line_retrieval.parse(["--checkpoint", "c", "--output", "o", "--count", "5", *flags])
    return args, SimpleNamespace(length=lambda prompt: len(prompt.text))


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("--tokens 1700 1702", "1702 tokens hold 27 lines, as many as --tokens 1700"),
        ("--lines 27 --tokens 1700", "1700 tokens hold 27 lines, as many as --lines 27"),
    ],
)
def test_cases_of_equal_numbers_of_lines_are_refused(flags, found):
    """They are the same cases: 10 in a row of results would be 5."""
    args, respondent = letters(*flags.split())
    with pytest.raises(UserError) as refused:
        line_retrieval._cases_of_tokens(args, respondent)
    assert str(refused.value) == (
        f"--tokens: {found}: the same cases would be counted twice; either without the other would "
        "work"
    )
    args, respondent = letters("--tokens", "1700", "2700", "--lines", "5")
    cases = line_retrieval._cases_of_tokens(args, respondent)
    assert len({case.num_lines for case in cases}) == 2 and len(cases) == 10


def test_a_length_that_the_keys_cannot_fill_is_refused():
    args, respondent = letters("--tokens", "8192", "--keys", "short")
    with pytest.raises(UserError) as refused:
        line_retrieval.cases_that_fill(8192, args, respondent)
    message = str(refused.value)
    assert message.startswith(
        "--tokens: found 8192, but a case of 8 lines, the most that --keys short has keys for, takes "
    )
    most = int(message.split("; ")[1].split()[0])
    cases = line_retrieval.cases_that_fill(most, args, respondent)
    assert {case.num_lines for case in cases} == {8}
    assert max(len(case.prompt) for case in cases) + 100 == most


def test_files_of_one_name_are_told_apart(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shutil.copy(CASES, tmp_path / name / "test.jsonl")
    line_cases.write(line_cases.generate(5, 2), tmp_path / "other.jsonl")
    files = [str(tmp_path / name) for name in ("a/test.jsonl", "b/test.jsonl", "other.jsonl")]
    args, _ = letters("--cases", *files, "--limit", "2", "--lines", "2")
    sources = [case.source for case in line_retrieval.gather_cases(args)]
    assert sources == [
        *("a/test.jsonl",) * 2,
        *("b/test.jsonl",) * 2,
        *("other.jsonl",) * 2,
        *("generated",) * 5,
    ]
    again = f"{tmp_path}/a/../a/test.jsonl"
    args, _ = letters("--cases", files[0], again, "--lines", "2")
    with pytest.raises(UserError, match=r"--cases: found .*/a/test\.jsonl twice"):
        line_retrieval.gather_cases(args)
    (tmp_path / "loop").symlink_to("loop")
    args, _ = letters("--cases", str(tmp_path / "loop"), "--lines", "2")
    with pytest.raises(UserError, match=r"loop: cannot read the line cases \(Too many levels"):
        line_retrieval.gather_cases(args)
