"""A training split into calls of minutes: a call resumes where the last one ended, and the files
carried between calls are few and complete."""

import json

import pytest

from scripts.benchmarks import gpu_results
from trainer.options import parse

TEXTS = "--book a.txt --other-book b.txt --cases 200.jsonl 400.jsonl --model m --output"
WORDS = TEXTS.split()


def test_the_steps_in_order(tmp_path):
    args = parse(gpu_results.Options, [*WORDS, str(tmp_path)])
    steps = {step.name: step.words for step in gpu_results.steps(args)}
    assert list(steps) == [
        "train",
        *("lines_after", "needles_after", "merged", "book_after"),
        *("lines_before", "needles_before", "book_before"),
    ]
    assert steps["lines_after"][-3:] == ["--cases", "200.jsonl", "400.jsonl"]
    assert str(tmp_path / "run") in steps["lines_after"] and "m" in steps["lines_before"]
    sources = json.loads(steps["train"][steps["train"].index("--data.sources") + 1])
    assert sources[-1] == {"path": "a.txt", "format": "text"} and len(sources) == 6


def test_a_call_resumes_where_the_last_one_ended(tmp_path, monkeypatch, capsys):
    """The second step fails in the first call; the second call begins with it."""
    programs = [("first", "open('first', 'x')"), ("second", "open('first').read(); open('no')")]
    made = tmp_path / "made"
    monkeypatch.setattr(
        gpu_results,
        "steps",
        lambda args: [
            gpu_results.Step("model", ["-c", f"import os; os.mkdir({str(made)!r})"], made),
            *(
                gpu_results.Step(name, ["-c", f"import os; os.chdir({str(tmp_path)!r}); {text}"])
                for name, text in programs
            ),
        ],
    )
    output, packed = tmp_path / "output", tmp_path / "packed"
    words = [*WORDS, str(output), "--pack", str(packed)]
    assert gpu_results.main(words) == 1
    (tmp_path / "no").touch()
    made.rmdir()  # another machine
    (packed / "part.1").touch()  # from a larger call
    assert gpu_results.main(words) == 0
    assert [part.name for part in packed.iterdir()] == ["part.0"]
    rows = [json.loads(line) for line in (output / "steps.jsonl").read_text().splitlines()]
    assert [(row["step"], row["status"]) for row in rows] == [
        ("model", "exit 0"),
        ("first", "exit 0"),
        ("second", "exit 1"),
        ("model", "exit 0"),
        ("second", "exit 0"),
    ]
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert gpu_results.main([*WORDS, str(output), "--pack", str(output / "packed")]) == 2
    assert "--pack" in capsys.readouterr().err


def test_the_carried_archive_has_the_newest_stages_checkpoint_and_unpacks_completely(
    tmp_path, monkeypatch
):
    output = tmp_path / "output"
    for name in (
        "model/model.safetensors",
        "merged/model.safetensors",
        "run/stages/1/checkpoints/9/a",
        "run/stages/1/config.yaml",
        "run/stages/2/checkpoints/3/a",
        "run/config.yaml",
        "steps.jsonl",
    ):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_bytes(name.encode() * 99)
    monkeypatch.setattr(gpu_results, "PIECE", 100)
    gpu_results.pack(output, tmp_path / "packed")
    parts = list((tmp_path / "packed").iterdir())
    assert len(parts) > 2 and all(part.stat().st_size <= 100 for part in parts)
    back = tmp_path / "back"
    gpu_results.unpack(tmp_path / "packed", back)
    assert sorted(str(path.relative_to(back)) for path in back.rglob("*") if path.is_file()) == [
        "run/config.yaml",
        "run/stages/1/config.yaml",
        "run/stages/2/checkpoints/3/a",
        "steps.jsonl",
    ]
    assert (back / "steps.jsonl").read_bytes() == b"steps.jsonl" * 99
    with pytest.raises(gpu_results.UserError, match="not empty"):
        gpu_results.unpack(tmp_path / "packed", back)
