"""The page's SkyPilot configuration: when it starts again, and what each node runs."""

import os
import re
import shlex
import subprocess

import yaml

from scripts.restarts import may_pass
from tests.docs.test_commands import ROOT

PAGE = (ROOT / "docs/skypilot.md").read_text(encoding="utf-8")
JOB = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])
RESERVED = 137  # SkyPilot's documentation forbids it in the list
FAKE_PYTHON = """#!/bin/bash
printf '%s ' "$@" >> "$RAN"; echo >> "$RAN"
case "$*" in *run_status*) echo 40 ;; *restarts*) exit "${TOO_MANY:-0}" ;; esac
"""


def ran(tmp_path, command, **variables):
    """The exit code of a node's command, and the Python commands that it runs."""
    python, log = tmp_path / "python", tmp_path / "ran"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    log.unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, "PYTHON": str(python), "RAN": str(log), **variables},
        timeout=60,
        check=False,
    )
    return done.returncode, [shlex.split(line) for line in log.read_text().splitlines()]


def test_it_starts_again_after_the_codes_for_which_another_start_may_pass():
    codes = [1, 2, 75, 126, 127, 130, 134, RESERVED, 139, 143]
    assert JOB["resources"]["job_recovery"] == {
        "recover_on_exit_codes": [code for code in codes if may_pass(code) and code != RESERVED]
    }


def test_each_start_is_counted_in_the_bucket(tmp_path):
    [bucket] = JOB["file_mounts"]
    code, (_, _, count, train) = ran(tmp_path, JOB["run"])
    assert code == 0 and train[0] == "train.py" and (ROOT / train[2]).exists()
    assert train[-2:] == ["--run_dir", f"{bucket}/qwen3_8b"]
    assert count[:5] == [
        "-m",
        "scripts.restarts",
        f"{bucket}/qwen3_8b.starts",
        "--checkpoint",
        "40",
    ]
    code, commands = ran(tmp_path, JOB["run"], TOO_MANY="2")
    assert code == 2 and "train.py" not in commands[-1]


def test_each_of_several_nodes_is_a_process_and_the_first_one_counts(tmp_path):
    flags = " ".join(line.strip() for line in PAGE.splitlines() if line.startswith("    --"))
    [variable] = re.findall(r"`(JOB_COMPLETION_INDEX=\S+)`", PAGE)
    command = f"{variable} {JOB['run'].strip()} {flags}"
    for rank in (0, 1):
        nodes = {"NODE_IPS": "10.0.0.1\n10.0.0.2\n", "NODE_RANK": str(rank), "NUM_NODES": "2"}
        variables = {f"SKYPILOT_{name}": value for name, value in nodes.items()}
        _, commands = ran(tmp_path, command, **variables)
        distributed = "coordinator 10.0.0.1:61447", f"process_id {rank}", "num_processes 2"
        assert " ".join(commands[-1]).endswith(
            " ".join(f"--distributed.{field}" for field in distributed)
        )
        assert any("scripts.restarts" in words for words in commands) == (rank == 0)
