"""The processes of one start of the launcher share a secret, and none waits for a reader of its
messages."""

import os
import subprocess
import sys

import pytest

from scripts import launch_local

WRITES_ITS_TOKEN = """
import os, sys
number = sys.argv[sys.argv.index("--distributed.process_id") + 1]
with open(os.path.join(os.path.dirname(__file__), "token " + number), "w") as file:
    file.write(os.environ.get("LONGSTRIPE_TOKEN", ""))
"""


@pytest.fixture
def tokens_of_a_start(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(WRITES_ITS_TOKEN)
    monkeypatch.setattr(launch_local, "TRAIN", tmp_path / "train.py")

    def start():
        assert launch_local.wait(launch_local.start(2, [])) == 0
        return [(tmp_path / f"token {number}").read_text() for number in range(2)]

    return start


def test_processes_share_a_token_that_is_new_at_each_start(tokens_of_a_start, monkeypatch):
    monkeypatch.delenv("LONGSTRIPE_TOKEN", raising=False)
    first, second = tokens_of_a_start(), tokens_of_a_start()
    assert first[0] == first[1] and second[0] == second[1]
    assert len(first[0]) >= 32 and first[0] != second[0]


def test_a_token_in_the_environment_is_kept(tokens_of_a_start, monkeypatch):
    monkeypatch.setenv("LONGSTRIPE_TOKEN", "secret")
    assert tokens_of_a_start() == ["secret", "secret"]


def test_processes_go_on_when_nobody_reads_their_messages():
    """As with `2>&1 | head`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    stderr = os.dup(2)
    talks = "import sys; sys.stderr.write('a line\\n' * 50_000)"  # more than a pipe holds
    with subprocess.Popen([sys.executable, "-c", talks], stderr=subprocess.PIPE) as process:
        os.dup2(write_end, 2)
        try:
            launch_local._forward_stderr(process, process)
        finally:
            os.dup2(stderr, 2)
            for end in (stderr, write_end):
                os.close(end)
            process.kill()
    assert process.returncode == 0
