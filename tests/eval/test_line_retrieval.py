"""The command of line retrieval refuses wrong options before it opens the model."""

import pytest

from eval import line_retrieval
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
