"""Breaks important files at one place at a time and runs their tests; `make mutants` runs this.

    python -m tests.mutants          # a sample of each file in TESTS; resumes where it stopped
    python -m tests.mutants --files trainer/step.py --each 40 --seed 1
    python -m tests.mutants --slips  # the hand-written faults of slips.toml
    python -m tests.mutants --show   # prints the share killed, and the survivors
    python -m tests.mutants --record # also writes them to docs/results/mutants.json

The tests run in a copy of the repository, without those marked slow, as in CI. A mutant is killed
if they fail, or take much more processor time than without it. Outcomes are appended to --output,
one line of JSON each. A survivor is a missing test or an equivalent program;
tests/mutants/equivalent.txt names the latter.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from scripts.benchmarks.results import renew, row
from tests.mutants.mutations import Fault, broken, faults

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).parent / "equivalent.txt"
SLIPS = Path(__file__).parent / "slips.toml"
GOAL = 0.9  # the share of mutants to kill, excluding equivalent programs
WAITING = 5  # wall-clock seconds allowed per CPU second, because other work may share the machine


@dataclasses.dataclass(frozen=True)
class Place:
    """A fault and its place.

    Attributes:
      file, line: the place.
      what: the fault in words.
      code: the line's text without its comment, which identifies the place in `equivalent.txt` when lines move.
    """

    file: str
    line: int
    what: str
    code: str

    @classmethod
    def of(cls, file: str, line: int, what: str, source: str) -> Place:
        """Describes a fault in a line of `source`, the content of `file`."""
        return cls(file, line, what, source.splitlines()[line - 1].split("  # ")[0].strip())

    @property
    def lasting(self) -> str:
        """Its description without the line number."""
        return f"{self.file}: {self.what} in {self.code}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what} in {self.code}"


# File -> its tests: files, or single tests of slow ones.
TESTS = {
    "model/attention/coords.py": (
        "tests/model/attention/test_coords.py",
        "tests/model/attention/test_visited_tiles.py",
    ),
    "model/attention/partial.py": ("tests/model/attention/test_partial.py",),
    "model/attention/schedules/ring.py": (
        "tests/planning/costs/test_costs.py",
        "tests/model/attention/schedules/test_schedules.py",
    ),
    "model/loss.py": (
        "tests/trainer/test_step.py",
        "tests/model/test_llama.py",
        "tests/trainer/test_sources.py",
    ),
    "trainer/step.py": (
        "tests/trainer/test_step.py",
        "tests/trainer/test_optimizer.py",
        "tests/trainer/test_kto.py",
        "tests/trainer/test_adapter_run.py",
    ),
    "trainer/evaluation.py": ("tests/trainer/test_evaluation.py",),
    "trainer/optimizer.py": (
        "tests/trainer/test_optimizer.py",
        "tests/trainer/test_average.py",
        "tests/trainer/test_step.py",
    ),
    "trainer/checkpoint/store.py": ("tests/trainer/checkpoint/test_store.py",),
    "trainer/checkpoint/items.py": ("tests/trainer/checkpoint/test_store.py",),
    "trainer/checkpoint/readers.py": ("tests/trainer/checkpoint/test_store.py",),
    "trainer/checkpoint/manifest.py": (
        "tests/trainer/checkpoint/test_manifest.py",
        "tests/trainer/checkpoint/test_store.py",
    ),
    "trainer/huggingface/write.py": (
        "tests/trainer/huggingface/test_huggingface.py",
        "tests/model/families/test_families.py"
        "::test_exporting_an_imported_model_gives_the_same_tensors",
    ),
    "trainer/huggingface/merge.py": ("tests/trainer/huggingface/test_peft.py",),
    "data/packing.py": ("tests/data/test_packing.py", "tests/data/test_loader.py"),
    "data/encode.py": ("tests/data/test_encode.py", "tests/data/test_turns.py"),
    "data/templates/encoder.py": (
        "tests/data/templates/test_encoder.py",
        "tests/data/templates/test_loss.py",
        "tests/data/test_turns.py",
        "tests/data/test_templates.py",
        "tests/data/templates/test_published.py",
    ),
    "eval/scoring.py": ("tests/eval/test_scoring.py", "tests/eval/test_compare.py"),
    "planning/costs/step.py": (
        "tests/planning/costs/test_costs.py",
        "tests/planning/costs/test_measured.py",
    ),
}


def sample(file: str, each: int, seed: int) -> list[Fault]:
    """Returns at most `each` of a file's faults, chosen by the seed."""
    candidates = faults((ROOT / file).read_text(encoding="utf-8"))
    return random.Random(f"{seed} {file}").sample(candidates, min(each, len(candidates)))


def copy_repository(folder: Path) -> None:
    """Copies the files of the working tree that git does not ignore, new ones included."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), listed):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def is_killed(folder: Path, tests: tuple[str, ...], limit: int) -> bool:
    """Returns whether the tests fail in a copy of the repository, or take more than `limit` seconds
    of processor time."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests],
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit)),
    )
    try:
        return process.wait(WAITING * limit) != 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return True


def run(args: argparse.Namespace) -> int:
    """Runs the faults that have no outcome yet; returns 1 if tests fail without any fault."""
    done = {place for place, _ in read(args.output)}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_repository(copy)
        for tests, faulty in slips() if args.slips else mutants(args):
            chosen = {place: text for place, text in faulty.items() if place not in done}
            if not chosen:
                continue
            limit = seconds_of_tests(copy, tests, args.limit)
            if limit is None:
                print(f"{' '.join(tests)}: fail without any fault", file=sys.stderr)
                return 1
            for place, text in chosen.items():
                (copy / place.file).write_text(text, encoding="utf-8")
                killed = is_killed(copy, tests, limit)
                shutil.copy2(ROOT / place.file, copy / place.file)
                outcome = {**dataclasses.asdict(place), "killed": killed}
                with args.output.open("a", encoding="utf-8") as output:
                    output.write(json.dumps(outcome) + "\n")
                print(f"{'killed  ' if killed else 'SURVIVED'} {place}", flush=True)
    return 0


def mutants(args: argparse.Namespace) -> Iterator[tuple[tuple[str, ...], dict[Place, str]]]:
    """Yields for each file its tests, and its faulty versions."""
    for file in args.files or TESTS:
        source = (ROOT / file).read_text(encoding="utf-8")
        yield (
            TESTS[file],
            {
                Place.of(file, fault.line, fault.what, source): broken(source, fault)
                for fault in sample(file, args.each, args.seed)
            },
        )


def slips() -> Iterator[tuple[tuple[str, ...], dict[Place, str]]]:
    """Yields for each fault of slips.toml its tests, and the faulty version of its file.

    Raises:
      ValueError: a text to replace does not occur exactly once in its file.
    """
    for slip in tomllib.loads(SLIPS.read_text(encoding="utf-8"))["slip"]:
        source = (ROOT / slip["file"]).read_text(encoding="utf-8")
        if source.count(slip["old"]) != 1:
            raise ValueError(
                f"{SLIPS.name}: {slip['what']}: {slip['old']!r} must occur exactly once"
            )
        line = source[: source.index(slip["old"])].count("\n") + 1
        place = Place.of(slip["file"], line, slip["what"], source)
        yield tuple(slip["tests"]), {place: source.replace(slip["old"], slip["new"])}


@functools.cache
def seconds_of_tests(folder: Path, tests: tuple[str, ...], most: int) -> int | None:
    """Returns the seconds of processor time that faulty versions may take, based on a run without a
    fault; None if that run fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    if is_killed(folder, tests, most):
        return None
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return min(most, 30 + int(3 * took))


def read(output: Path) -> list[tuple[Place, bool]]:
    """Returns the outcomes so far: each fault, and whether a test noticed it."""
    lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
    outcomes = [json.loads(line) for line in lines]
    return [
        (Place(**outcome), killed) for outcome in outcomes for killed in [outcome.pop("killed")]
    ]


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """The outcomes so far.

    Attributes:
      by_file: file -> (mutants killed, mutants), without equivalent programs.
      survived, equivalent: the names of mutants that no test detected.
    """

    by_file: dict[str, tuple[int, int]]
    survived: list[str]
    equivalent: list[str]

    @classmethod
    def read(cls, output: Path) -> Outcomes:
        """Reads the lines of `output`."""
        known = {line.partition(" # ")[0] for line in EQUIVALENT.read_text("utf-8").splitlines()}
        killed = defaultdict(list)
        survived, equivalent = [], []
        for place, was_killed in read(output):
            if place.lasting in known:
                equivalent.append(str(place))
                continue
            killed[place.file].append(was_killed)
            if not was_killed:
                survived.append(str(place))
        by_file = {file: (sum(rows), len(rows)) for file, rows in sorted(killed.items())}
        return cls(by_file, survived, equivalent)

    @property
    def total(self) -> tuple[int, int]:
        """(mutants killed, mutants) of all files."""
        return sum(k for k, _ in self.by_file.values()), sum(n for _, n in self.by_file.values())

    def show(self) -> None:
        """Prints the share killed per file, and the survivors."""
        for file, (killed, count) in {**self.by_file, "all": self.total}.items():
            print(f"{file:45} {killed:4} of {count:4} killed ({killed / max(count, 1):.0%})")
        for word, names in (("survived", self.survived), ("equivalent", self.equivalent)):
            for name in names:
                print(f"{word}: {name}")

    def record(self) -> None:
        """Writes the outcomes to docs/results/mutants.json."""
        rows = {
            re.sub("[/ ]", "_", file.removesuffix(".py")): row(
                f"faults in {file}: killed", f"{killed} of {count}", "90%", killed >= GOAL * count
            )
            for file, (killed, count) in {"all files": self.total, **self.by_file}.items()
        }
        facts = [f"Survived: {name}." for name in self.survived]
        facts += [f"The same program: {name}." for name in self.equivalent]
        renew("mutants", rows, facts=facts)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--files",
        nargs="+",
        choices=TESTS,
        metavar="FILE",
        help=f"some of {', '.join(TESTS)} (default all)",
    )
    parser.add_argument("--each", type=int, default=12, help="mutants per file (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default 0)")
    parser.add_argument(
        "--limit",
        type=int,
        default=600,
        help="seconds of processor time that tests may take (default 600)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(".cache/mutants.jsonl"),
        help="outcomes (default .cache/mutants.jsonl)",
    )
    parser.add_argument(
        "--slips", action="store_true", help="try the faults of slips.toml instead of mutants"
    )
    parser.add_argument(
        "--show", action="store_true", help="print the outcomes so far, and run nothing"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="print the outcomes so far and write them to docs/results/mutants.json",
    )
    args = parser.parse_args(argv)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    status = 0 if args.show or args.record else run(args)
    outcomes = Outcomes.read(args.output)
    outcomes.show()
    if args.record:
        outcomes.record()
    return status


if __name__ == "__main__":
    sys.exit(main())
