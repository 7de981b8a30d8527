"""Shared by the benchmark commands: JSON files, memory, and measurements in new processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.errors import UserError
from scripts.benchmarks.results import ROOT, write_whole


def write_json(path: Path, value: object) -> None:
    """Writes a file of indented JSON, which appears complete."""
    write_whole(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path):
    """Returns a JSON file's content."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the values of a file of JSON lines; none if the file is missing."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def process_bytes(field: str) -> int:
    """Returns this process's memory: `VmRSS` (current) or `VmHWM` (peak since its reset)."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: bytes, and only the peak
    # On Linux ru_maxrss would begin with the memory of the parent process.
    (kib,) = re.findall(rf"{field}:\s+(\d+) kB", status.read_text())
    return int(kib) * 1024


def training_seconds(run: Path) -> float:
    """Returns the training time of a run's stages, with evaluations and saves."""
    logs = [*sorted(run.glob("stages/*/metrics.jsonl")), run / "metrics.jsonl"]
    return sum(read_lines(log)[-1]["wall_seconds"] for log in logs)


def tokens_text(count: int) -> str:
    """Returns 8192 as 8K, 8388608 as 8M and 0 as none."""
    return f"{count >> 20}M" if count >= 1 << 20 else f"{count >> 10}K" if count else "none"


def identifier(text: str) -> str:
    """Returns a text as an id: lower case, with _ for anything but letters and digits."""
    return "".join(letter if letter.isalnum() else "_" for letter in text.lower())


def last_line(output: str) -> str:
    """Returns the last line of what a failed process wrote, which says why."""
    return (output.strip().splitlines() or ["no message"])[-1]


class ProcessFailed(UserError):
    """A measurement's process failed; `reason` is its exit status and its last line on stderr."""

    def __init__(self, command: Sequence[str], reason: str):
        super().__init__(f"{' '.join(command)} {reason}")
        self.reason = reason


def run_python(words: Sequence[str]) -> None:
    """Runs Python with these arguments from the repository's folder.

    Raises:
      ProcessFailed: its exit status is not 0.
    """
    status = subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode
    if status:
        raise ProcessFailed(words, f"ended with {status}")


def python(command: str, **values: object) -> None:
    """Prints and runs a Python command of this repository, from the repository's folder.

    Args:
      command: Python's arguments, separated by spaces.
      values: text that replaces `{name}` in them, and may contain spaces.

    Raises:
      ProcessFailed: its exit status is not 0.
    """
    words = [word.format(**values) for word in command.split()]
    print("$ python " + shlex.join(words), flush=True)
    run_python(words)


def run_for(
    words: Sequence[str],
    seconds: float,
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    grace: float = 0,
) -> str:
    """Runs Python for at most `seconds`, then stops it and its child processes.

    Args:
      words: Python's arguments.
      log: the file for its output.
      environment: the process's environment; None for this process's.
      grace: seconds between SIGTERM and SIGKILL; 0: no SIGTERM.

    Returns:
      "exit STATUS", or "out of time".
    """
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            return f"exit {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            if grace:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace)
            with contextlib.suppress(ProcessLookupError):  # the group has already ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "out of time"


def in_own_process(name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Any:
    """Returns the last line, read as JSON, of `python -m scripts.benchmarks.NAME` in a new process.

    Raises:
      ProcessFailed: its exit status is not 0.
    """
    command = [sys.executable, "-m", f"scripts.benchmarks.{name}", *arguments]
    process = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    if process.returncode:
        reason = f"ended with {process.returncode}: {last_line(process.stderr)[:200]}"
        raise ProcessFailed(command, reason)
    return json.loads(process.stdout.strip().splitlines()[-1])
