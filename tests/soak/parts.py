"""Runs the tests marked slow and the attacks, in parts that run separately and resume: python -m
tests.soak [PART ...].

This is what `make soak` runs. Each part is a separate process, and continues in a new one when it
has grown too large, since compilers keep the memory that they have used. Tests that passed are
recorded in .cache/soak/PART.passed, so that an interrupted part runs only the remaining ones when
it is started again. The record belongs to one version of JAX and one state of the Python files that
the part depends on: a change to any of them starts it over.
"""

import argparse
import hashlib
import importlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple

import pytest

from tests.soak import attacks

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORDS = ROOT / ".cache" / "soak"
ATTENTION = "tests/model/attention/test_all_pairs.py"
MESHES = "tests/trainer/test_same_everywhere.py"
KERNELS = "tests/model/attention/kernels"
MOST_MEMORY = 4 << 30  # resident bytes after a test, above which a part continues in a new process
UNFINISHED = 75  # the exit code that means so


class Part(NamedTuple):
    """Some of the slow tests; each part ends within 150 minutes on 2 cores.

    Attributes:
      paths: files or folders of the tests.
      ignored: files and folders within `paths` that are left out.
      code: git pathspecs of the Python files on which the tests depend.
    """

    paths: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    code: tuple[str, ...] = ("*.py",)


OF_ATTENTION = (
    "model/__init__.py",
    "model/attention/*.py",
    "tests/__init__.py",
    "tests/covering.py",
    "tests/errors.py",
    "tests/model/__init__.py",
    "tests/model/attention/*.py",
)
OF_TRAINING = ("data/*.py", "model/*.py", "planning/*.py", "trainer/*.py", "train.py", "tests/*.py")
PARTS: dict[str, Part] = {
    "attention": Part((ATTENTION,), code=OF_ATTENTION),
    "meshes": Part((MESHES,), code=OF_TRAINING),
    "kernels": Part((KERNELS,), code=OF_TRAINING),
    "rest": Part(("tests",), ignored=(ATTENTION, MESHES, KERNELS)),
}
ATTACKS = {f"attack-{name}": name for name in attacks.CLASSES}
# Modules of tests.soak that are separate commands and report their own result.
DRILLS = ("faults", "buckets")
EVERY = (*PARTS, *ATTACKS, *DRILLS)


class Resume:
    """A pytest plugin: leaves out tests that passed before, records those that pass, and stops once
    the process has grown too large.

    Attributes:
      unfinished: whether it stopped for that reason, so that a new process should run the rest.
    """

    def __init__(self, record: pathlib.Path, code: str):
        self.record, self.code = record, code
        lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
        self.passed = set(lines[1:]) if lines[:1] == [code] else set()
        self.unfinished = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        remaining = [item for item in items if item.nodeid not in self.passed]
        passed = [item for item in items if item.nodeid in self.passed]
        config.hook.pytest_deselected(items=passed)
        print(
            f"{len(passed)} of {len(items)} tests passed before; {len(remaining)} to run",
            flush=True,
        )
        items[:] = remaining
        self.record.parent.mkdir(parents=True, exist_ok=True)
        self.record.write_text(
            "\n".join([self.code, *sorted(self.passed)]) + "\n", encoding="utf-8"
        )

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            with self.record.open("a", encoding="utf-8") as file:
                file.write(report.nodeid + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item, nextitem):
        if nextitem is not None and resident_bytes() > MOST_MEMORY:
            self.unfinished = True
            item.session.shouldstop = (
                f"{resident_bytes() / 2**30:.1f} GiB are resident: going on in a new process"
            )


def resident_bytes() -> int:
    """Returns this process's resident memory; 0 on systems other than Linux."""
    status = pathlib.Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def code_hash(pathspecs: Sequence[str]) -> str:
    """Returns a hash of the version of JAX and of the repository's files matched by these git
    pathspecs."""
    command = ["git", "ls-files", *pathspecs]
    names = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    files = [(ROOT / name).read_bytes() for name in names if (ROOT / name).exists()]
    return hashlib.sha256(b"".join([metadata.version("jax").encode(), *files])).hexdigest()


def run_part(part: str) -> int:
    """Runs a part in this process; returns the exit code of pytest (0 also if nothing was left to
    run), or of the attacks or the drill.

    Returns UNFINISHED if a new process should run the rest: only once another test has passed, since
    otherwise the process could grow too large on a failing test forever.
    """
    if part in ATTACKS:
        return attacks.main([ATTACKS[part]])
    if part in DRILLS:
        return importlib.import_module(f"tests.soak.{part}").main([])
    paths, ignored, pathspecs = PARTS[part]
    arguments = [*paths, "-m", "slow", *(f"--ignore={path}" for path in ignored)]
    resume = Resume(RECORDS / f"{part}.passed", code_hash(pathspecs))
    code = pytest.main(arguments, plugins=[resume])
    if resume.unfinished and len(resume.record.read_text(encoding="utf-8").splitlines()) > 1 + len(
        resume.passed
    ):
        return UNFINISHED
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)


def main(argv: list[str] | None = None) -> int:
    """Runs the requested parts (by default all) one after another; returns 1 if a test failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"out of {', '.join(EVERY)}; by default all"
    )
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := [part for part in args.parts if part not in EVERY]:
        parser.error(f"{unknown[0]} is not a part; the parts are {', '.join(EVERY)}")
    if args.in_process:
        return run_part(args.parts[0])
    results = []
    for part in args.parts or EVERY:
        start = time.monotonic()
        # With the compiler's default flags, under which two programs agree bitwise wherever they do
        # for users.
        command = [sys.executable, "-m", "tests.soak", "--in-process", part]
        code = UNFINISHED
        while code == UNFINISHED:
            code = subprocess.run(
                command, cwd=ROOT, check=False, env={"XLA_FLAGS": "", **os.environ}
            ).returncode
        results.append(
            {"part": part, "exit_code": code, "minutes": round((time.monotonic() - start) / 60, 1)}
        )
        RECORDS.mkdir(parents=True, exist_ok=True)
        (RECORDS / "results.json").write_text(
            json.dumps(results, indent=1) + "\n", encoding="utf-8"
        )
    for result in results:
        print(
            f"{result['part']:12} {result['minutes']:6.1f} minutes, "
            f"{'passed' if result['exit_code'] == 0 else 'FAILED'}"
        )
    return int(any(result["exit_code"] for result in results))
