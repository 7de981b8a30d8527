"""A resumed run's logs, and the messages about lost or changed lines."""

import hashlib
import json

import pytest

from trainer.run.logs import Written, cut_back

LINES = [json.dumps({"step": step, "loss": 1 / step}).encode() + b"\n" for step in range(1, 6)]
SAVED = {"lines": 4, "sha256": hashlib.sha256(b"".join(LINES[:4])).hexdigest()}


def test_the_record_of_logs_in_a_checkpoint():
    assert Written.of(LINES[:4]).data == SAVED
    assert Written.of([]).data == {"lines": 0, "sha256": hashlib.sha256().hexdigest()}


def test_an_untouched_log_is_cut_silently(tmp_path, capfd):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(LINES) + b'{"step": 6, "lo')
    assert cut_back(path, 4, SAVED).data == SAVED
    assert path.read_bytes() == b"".join(LINES[:4]) and capfd.readouterr().err == ""
    assert cut_back(tmp_path / "none.jsonl", 4).lines == 0
    assert not (tmp_path / "none.jsonl").exists() and capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("content", "left", "words"),
    [
        (LINES[:2], 2, "4 lines had been written up to step 4, and 2 are left"),
        (LINES[1:], 3, "4 lines had been written up to step 4, and 3 are left"),
        (None, 0, "4 lines had been written up to step 4, and 0 are left"),
        (
            [LINES[0], LINES[1].replace(b"0.5", b"0.6"), *LINES[2:]],
            4,
            "its lines up to step 4 have changed",
        ),
        (
            [LINES[0], b"?\n", *LINES[2:]],
            3,
            "line 2 cannot be read; moved to metrics.jsonl.unreadable",
        ),
    ],
    ids=["end", "beginning", "file", "number", "unreadable"],
)
def test_lost_or_changed_lines_are_reported(tmp_path, capfd, content, left, words):
    """Except in the last case every line is readable: only the checkpoint reveals the
    difference."""
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_bytes(b"".join(content))
    assert cut_back(path, 4, SAVED).lines == left
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"warning: {path}: {words}")
    cut_back(path, 4)
    assert capfd.readouterr().err == "", "for a checkpoint without a record of logs"
