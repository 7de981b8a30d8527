"""Seeded attacks that imitate mistakes of users and faults of machines: python -m
tests.soak.attacks CLASS [--cases N] [--seed S].

Each case is made from its seed alone, so that a range of seeds can be run again or in parts. A case
holds when the attacked code gives the same result as without the attack, or one line of error that
names the file or the field. Counts and the seeds that failed go to .cache/soak/attacks/CLASS.json,
to which another range of seeds is added; `--record` writes the table of all classes to
docs/results/robustness.json and docs/notes/robustness.md.
"""

import argparse
import collections
import contextlib
import datetime
import functools
import importlib
import io
import json
import logging
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator

import numpy as np

from data.errors import UserError
from trainer.run.outcome import WRONG_INPUT, one_line

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "soak" / "attacks"
LONGEST = 60  # seconds that a case may take
LONGER = {
    "kills": 900,
    "disk": 600,
    "races": 600,
    "accounts": 600,
    "runs": 300,
}  # for classes whose cases are several runs
Case = Callable[[np.random.Generator, pathlib.Path], str]
"""Attacks once, in an empty folder; returns the outcome in a few words, and raises `Failed` or
anything else if it failed."""

# Class -> module of tests.soak whose function of the same name makes its `Case` in an empty folder,
# and the number of cases.
CLASSES = {
    "recipes": ("recipes", 2000),
    "models": ("folders", 2000),
    "records": ("records", 100_000),
    "line_cases": ("folders", 500),
    "trajectories": ("folders", 500),
    "adapters": ("folders", 500),
    "checkpoints": ("saved", 300),
    "prepared": ("saved", 300),
    "runs": ("runs", 100),
    "commands": ("commands", 100),
    "kills": ("kills", 28),
    "disk": ("disk", 20),
    "races": ("races", 50),
    "accounts": ("accounts", 50),
}


class Impossible(Exception):
    """A class of attacks cannot be tried on this machine, or as this user."""


class Failed(Exception):
    """The attacked code did something it must not do."""


@contextlib.contextmanager
def refusal(*names: str) -> Iterator[list[str]]:
    """Catches the error that a user may be shown, and appends its message to the list that it
    yields.

    Args:
        names: texts of which the message must contain at least one, such as the attacked file.

    Raises:
        Failed: another error; a message that names none of `names`, or is not one line.
    """
    messages: list[str] = []
    try:
        yield messages
    except (UserError, ValueError, OSError) as error:
        message = str(error)
        messages.append(message)
        if not any(name in message for name in names):
            raise Failed(
                f"the message names none of {', '.join(names)}: {type(error).__name__}: "
                f"{message[:300]}"
            ) from error
        if "\n" in one_line(message) or not message.strip() or "Traceback" in message:
            raise Failed(f"not one line: {message[:300]!r}") from error


def error_line(
    code: int | None, output: str, label: str, refusals: tuple[int, ...] = (WRONG_INPUT,)
) -> str:
    """Returns the line with which a command refused; an empty text if it succeeded.

    Args:
        refusals: the exit codes that a refusal may have.

    Raises:
        Failed: another exit code, a traceback, or not one line of error.
    """
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    if "Traceback" in output or code not in (0, *refusals) or len(errors) != bool(code):
        raise Failed(f"{label}: ended with {code}: {output[-600:]}")
    return errors[0] if errors else ""


@contextlib.contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raises Failed in the main thread when the block takes longer."""

    def late(*_: object) -> None:
        raise Failed(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attempt(case: Case, name: str, seed: int, folder: pathlib.Path, longest: int) -> dict:
    """Runs one case of a class in a new folder, which is removed; returns counts like `attack`."""
    folder.mkdir()
    outcomes, failures, began = {}, [], time.monotonic()
    try:
        with (
            deadline(longest),
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            outcomes[case(np.random.default_rng([seed, *name.encode()]), folder)] = 1
    except (KeyboardInterrupt, Impossible):
        raise
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{pathlib.Path(frame.filename).name}:{frame.lineno}"
        what = f"{type(error).__name__}: {str(error)[:400]} ({where})"
        failures.append({"seed": seed, "what": what})
    seconds = time.monotonic() - began
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "tried": 1,
        "held": 1 - len(failures),
        "outcomes": outcomes,
        "fell": failures,
        "slowest": round(seconds, 2),
        "seconds": round(seconds, 1),
    }


def attack(
    name: str,
    seeds: range,
    progress: bool = False,
    longest: int = LONGEST,
    save: Callable[[range, dict], object] | None = None,
) -> dict:
    """Runs the cases of a class with these seeds; returns counts, the slowest case's seconds, and
    failures with their seeds.

    Args:
        longest: seconds that a case may take.
        save: called after each case with its seed, as a range of one, and its result.
    """
    outcomes: collections.Counter[str] = collections.Counter()
    failures: list[dict] = []
    slowest, start = 0.0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="longstripe-attack-") as temporary:
        root = pathlib.Path(temporary)
        (root / "base").mkdir()
        module = importlib.import_module(f"tests.soak.{CLASSES[name][0]}")
        case: Case = getattr(module, name)(root / "base")
        for seed in seeds:
            result = attempt(case, name, seed, root / f"case{seed}", longest)
            outcomes.update(result["outcomes"])
            failures += result["fell"]
            slowest = max(slowest, result["slowest"])
            if save:
                save(range(seed, seed + 1), result)
            if progress and result["fell"]:
                print(f"seed {seed} failed: {failures[-1]['what']}", flush=True)
            if progress and (seed + 1) % 500 == 0:
                done = seed + 1 - seeds.start
                print(f"{name}: {done} of {len(seeds)}, {len(failures)} failed", flush=True)
    return {
        "tried": len(seeds),
        "held": len(seeds) - len(failures),
        "outcomes": dict(outcomes.most_common()),
        "fell": failures,
        "slowest": slowest,
        "seconds": round(time.monotonic() - start, 1),
    }


def merge(name: str, seeds: range, result: dict) -> pathlib.Path:
    """Adds a range of seeds to the class's file, replacing an earlier run that overlaps; returns
    the file's path."""
    from scripts.benchmarks.results import commit

    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    parts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    parts = [
        part for part in parts if part["seeds"][1] <= seeds.start or part["seeds"][0] >= seeds.stop
    ]
    parts.append(
        {
            "seeds": [seeds.start, seeds.stop],
            "date": datetime.date.today().isoformat(),
            "commit": commit(),
            **result,
        }
    )
    path.write_text(
        json.dumps(sorted(parts, key=lambda part: part["seeds"]), indent=1) + "\n", encoding="utf-8"
    )
    return path


def main(argv: list[str] | None = None) -> int:
    """Runs a class, or records all results; returns 1 if a case failed."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.attacks", allow_abbrev=False, description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "name", nargs="?", metavar="CLASS", choices=CLASSES, help=", ".join(CLASSES)
    )
    parser.add_argument("--cases", type=int, help="number of cases; by default all of the class")
    parser.add_argument(
        "--seed", type=int, default=0, help="the first case's seed; the others follow"
    )
    parser.add_argument("--record", action="store_true", help="write the table of results")
    args = parser.parse_args(argv)
    if args.record:
        from tests.soak.table import record

        record(FOLDER)
        return 0
    if not args.name:
        parser.error(f"a class is needed: {', '.join(CLASSES)}")
    logging.getLogger("absl").setLevel(logging.ERROR)
    seeds = range(args.seed, args.seed + (args.cases or CLASSES[args.name][1]))
    save = functools.partial(merge, args.name) if args.name in LONGER else None
    result = attack(
        args.name, seeds, progress=True, longest=LONGER.get(args.name, LONGEST), save=save
    )
    path = FOLDER / f"{args.name}.json" if save else merge(args.name, seeds, result)
    print(json.dumps({key: value for key, value in result.items() if key != "fell"}, indent=1))
    print(f"{result['held']} of {result['tried']} held; {path}")
    return int(result["held"] < result["tried"])


if __name__ == "__main__":
    sys.exit(main())
