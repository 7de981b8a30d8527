"""A run's logs are cut back to the step from which it resumes."""

import json

import pytest

from trainer.run.directory import RunDirectory


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path)


def test_logs_are_cut_back_to_the_step(run):
    lines = [json.dumps({"step": step, "loss": 1 / step}) for step in range(1, 6)]
    run.metrics.write_text("\n".join(lines) + '\n{"step": 6, "lo')
    run.cut_back(3)
    assert run.metrics.read_text() == "\n".join(lines[:3]) + "\n"
    assert not run.held_out.exists()
    run.held_out.write_text("\n".join(lines))
    run.cut_back(3)
    assert run.held_out.read_text() == "\n".join(lines[:3]) + "\n"
    run.cut_back(3, evaluated=False)
    assert run.held_out.read_text() == "\n".join(lines[:2]) + "\n", (
        "the evaluation of step 3 is repeated"
    )
    run.cut_back(0)
    assert run.metrics.read_text() == run.held_out.read_text() == ""


@pytest.mark.parametrize("name", ["metrics", "held_out"])
def test_unreadable_lines_are_moved_to_a_separate_file(run, name, capfd):
    """The run resumes whatever a line holds; only a line that a kill truncated at the end is
    dropped silently."""
    path = getattr(run, name)
    aside = path.with_name(path.name + ".unreadable")
    good = [json.dumps({"step": step, "loss": 1 / step}).encode() for step in range(1, 4)]
    path.write_bytes(b"\n".join([good[0], b"", good[1], good[2], b'{"step": 4, "lo']))
    run.cut_back(3)
    assert path.read_bytes() == b"".join(line + b"\n" for line in good)
    assert not aside.exists() and capfd.readouterr().err == ""

    bad = [
        b'{"step": 1, "lo',
        b'{"step": 2, "loss": "\xff"}',
        b'{"loss": 0.5}',
        b'{"step": "2"}',
        b'{"step": NaN}',
        b"[1]",
        b"\0\0",
    ]
    path.write_bytes(
        b"\n".join([good[0], bad[0], good[1], bad[1], good[2], *bad[2:], b'{"step": 4, "l\xc3'])
    )
    run.cut_back(2)
    assert path.read_bytes() == b"".join(line + b"\n" for line in good[:2])
    assert aside.read_bytes() == b"".join(line + b"\n" for line in bad)
    error = capfd.readouterr().err
    assert (
        error
        == f"warning: {path}: lines 2, 4, 6, 7, 8, ... cannot be read; moved to {aside.name}\n"
    )

    path.write_bytes(good[0] + b"\n" + bad[0] + b"\n")
    run.cut_back(2)
    assert path.read_bytes() == good[0] + b"\n" and aside.read_bytes().splitlines() == [
        *bad,
        bad[0],
    ]
    assert (
        capfd.readouterr().err == f"warning: {path}: line 2 cannot be read; moved to {aside.name}\n"
    )
