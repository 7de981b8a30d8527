"""Breaks important files at one place at a time and runs the tests beside them: what `make mutants`
runs.

    python -m tests.mutants          # a sample of each file in TESTS; goes on where it stopped
    python -m tests.mutants --files trainer/step.py --each 40 --seed 1
    python -m tests.mutants --show   # the share killed, and the survivors

The tests run in a copy of the repository, without those marked slow, as CI runs them. A mutant is
killed where they fail or take longer than --limit. Outcomes are appended to --output, a line of
JSON each. A survivor is either a missing test or an equivalent program;
tests/mutants/equivalent.txt names those.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from tests.mutants.mutations import Fault, broken, faults

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).parent / "equivalent.txt"
# File -> the tests that CI runs beside it.
TESTS = {
    "model/attention/coords.py": (
        "tests/model/attention/test_coords.py",
        "tests/model/attention/test_visited_tiles.py",
    ),
    "model/attention/partial.py": ("tests/model/attention/test_partial.py",),
    "model/attention/schedules/ring.py": ("tests/model/attention/schedules/test_schedules.py",),
    "model/loss.py": ("tests/trainer/test_step.py", "tests/model/test_llama.py"),
    "trainer/step.py": ("tests/trainer/test_step.py", "tests/trainer/test_optimizer.py"),
    "trainer/optimizer.py": ("tests/trainer/test_optimizer.py", "tests/trainer/test_step.py"),
    "trainer/checkpoint/store.py": ("tests/trainer/checkpoint/test_store.py",),
    "trainer/checkpoint/items.py": ("tests/trainer/checkpoint/test_store.py",),
    "trainer/checkpoint/readers.py": ("tests/trainer/checkpoint/test_store.py",),
    "trainer/checkpoint/manifest.py": (
        "tests/trainer/checkpoint/test_manifest.py",
        "tests/trainer/checkpoint/test_store.py",
    ),
    "trainer/huggingface/write.py": ("tests/trainer/huggingface/test_huggingface.py",),
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
    """Copies what git knows of the working tree, new files included."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), listed):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def is_killed(folder: Path, tests: tuple[str, ...], limit: float) -> bool:
    """Returns whether the tests fail in a copy of the repository, or take longer than `limit`
    seconds."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        return process.wait(limit) != 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return True


def run(args: argparse.Namespace) -> int:
    """Runs the mutants that have no outcome yet; returns 1 where the tests fail without any
    fault."""
    done = {(row["file"], row["line"], row["what"]) for row in read(args.output)}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_repository(copy)
        for file in args.files or TESTS:
            chosen = [
                fault
                for fault in sample(file, args.each, args.seed)
                if (file, fault.line, fault.what) not in done
            ]
            start = time.monotonic()
            if chosen and is_killed(copy, TESTS[file], args.limit):
                print(f"{file}: its tests fail as it is", file=sys.stderr)
                return 1
            limit = min(args.limit, 30 + 5 * (time.monotonic() - start))
            source = (ROOT / file).read_text(encoding="utf-8")
            for fault in chosen:
                (copy / file).write_text(broken(source, fault), encoding="utf-8")
                killed = is_killed(copy, TESTS[file], limit)
                row = {"file": file, "line": fault.line, "what": fault.what, "killed": killed}
                with args.output.open("a", encoding="utf-8") as output:
                    output.write(json.dumps(row) + "\n")
                print(
                    f"{file}:{fault.line}: {fault.what}: {'killed' if killed else 'SURVIVED'}",
                    flush=True,
                )
            shutil.copy2(ROOT / file, copy / file)
    return 0


def read(output: Path) -> list[dict]:
    """Returns the outcomes so far."""
    return (
        [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
        if output.exists()
        else []
    )


def show(output: Path) -> None:
    """Prints the share killed of each file, and the survivors."""
    equivalent = EQUIVALENT.read_text(encoding="utf-8").splitlines() if EQUIVALENT.exists() else []
    names = {line.partition(" # ")[0] for line in equivalent}
    by_file = defaultdict(list)
    for row in read(output):
        if f"{row['file']}:{row['line']}: {row['what']}" not in names:
            by_file[row["file"]].append(row["killed"])
    for file, outcomes in sorted(by_file.items()):
        print(f"{file:45} {sum(outcomes):4} of {len(outcomes):4} killed")
    total = [killed for outcomes in by_file.values() for killed in outcomes]
    print(
        f"{'all':45} {sum(total):4} of {len(total):4} killed "
        f"({sum(total) / max(len(total), 1):.0%})"
    )
    for row in read(output):
        if not row["killed"]:
            name = f"{row['file']}:{row['line']}: {row['what']}"
            print(f"{'equivalent' if name in names else 'survived'}: {name}")


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
        help=f"of {', '.join(TESTS)} (default all)",
    )
    parser.add_argument("--each", type=int, default=12, help="mutants of a file (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="chooses them (default 0)")
    parser.add_argument(
        "--limit", type=float, default=600, help="seconds that tests may take (default 600)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(".cache/mutants.jsonl"),
        help="outcomes (default .cache/mutants.jsonl)",
    )
    parser.add_argument(
        "--show", action="store_true", help="print the outcomes so far, and run nothing"
    )
    args = parser.parse_args(argv)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    status = 0 if args.show else run(args)
    show(args.output)
    return status


if __name__ == "__main__":
    sys.exit(main())
