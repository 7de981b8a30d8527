"""Measures stale results and writes docs/results and BENCHMARKS.md: `make bench`.

    python -m scripts.benchmarks                       # stale results; resumes if interrupted
    python -m scripts.benchmarks --only step kernels   # these, fresh or not
    python -m scripts.benchmarks --stale               # lists stale results, measures nothing
    python -m scripts.benchmarks --fresh step          # fails if one of these is stale
    python -m scripts.benchmarks --draw 10             # a reviewer's sample of figures to remake

A result is fresh while the programs it depends on are unchanged since its measurement: see
`freshness`. For results carried over from the previous page, the commit that recorded them counts.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

from data.errors import UserError
from data.outputs import check_own, new_folder
from scripts.benchmarks import page
from scripts.benchmarks.commands import read_json, write_json
from scripts.benchmarks.measurements import CONVERSATIONS, MEASUREMENTS, words
from scripts.benchmarks.results import Result, changed, commit, fingerprint, load, load_all, renew
from trainer.options import command, option


def stale_results() -> dict[str, list[str]]:
    """Returns the patterns whose files have changed since the measurement, by stale result."""
    return {name: patterns for name, result in load_all().items() if (patterns := changed(result))}


def report_stale() -> None:
    """Prints each stale result: its origin, how to repeat it, and what has changed."""
    results = load_all()
    for name, patterns in stale_results().items():
        result = results[name]
        origin = (
            f"{'carried over, ' if result.carried else ''}{result.date}, commit {result.commit}"
        )
        took = f", took {result.seconds:.0f} s" if result.seconds else ""
        how = (
            f"measure with --only {name}"
            if name in MEASUREMENTS
            else f"measured by {result.command or 'hand'}"
        )
        print(f"{name}: {origin}{took}; {how}\n    changed: {', '.join(patterns)}")


def report_drawn(count: int, commit_id: str) -> None:
    """Prints `count` figures with their commands, drawn by a commit's id so that nobody chooses."""
    rows = [
        (f"{name}.{row_id}", row, row.get("command", result.command))
        for name, result in load_all().items()
        if name != "drawn"  # earlier figures, made again
        for row_id, row in result.rows.items()
    ]
    for name, row, command_text in random.Random(commit_id).sample(rows, min(count, len(rows))):
        print(f"{name}: {row['what']}: {row['found']}\n    {command_text}")


def report_fresh(names: tuple[str, ...]) -> int:
    """Prints whether each result is fresh; returns 1 if any is stale.

    Raises:
      UserError: a result does not exist.
    """
    known, stale = load_all(), stale_results()
    for name in names:
        if name not in known:
            raise UserError(f"--fresh: found {name!r}; expected one of: {', '.join(known)}")
        why = f"stale, changed: {', '.join(stale[name])}" if name in stale else "fresh"
        print(f"{name}, {known[name].date}: {why}")
    return int(any(name in stale for name in names))


def run_commands(name: str, folder: Path, conversations: Path) -> float:
    """Runs a measurement's commands in FOLDER/NAME and returns their seconds.

    An interrupted measurement continues with the first unfinished command, unless the measured
    files have changed since.

    Raises:
      subprocess.CalledProcessError: a command failed.
      UserError: the folder has other files.
    """
    inputs = {pattern: fingerprint(pattern) for pattern in load(name).depends_on}
    out = folder / name
    progress = out / "progress.json"
    if out.exists() and not progress.exists():
        new_folder(out)  # refuses one that has other files
    elif out.exists() and read_json(progress)["inputs"] != inputs:
        check_own(progress, b'"seconds"')
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    seconds = read_json(progress)["seconds"] if progress.exists() else []
    write_json(progress, {"inputs": inputs, "seconds": seconds})
    for command_text in MEASUREMENTS[name].commands[len(seconds) :]:
        arguments = [
            word.format(out=out, models=folder, conversations=conversations)
            for word in words(command_text)
        ]
        print("\n$ python " + " ".join(arguments), flush=True)
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True)
        seconds.append(round(time.perf_counter() - start, 1))
        write_json(progress, {"inputs": inputs, "seconds": seconds})
    return sum(seconds)


def measure(name: str, folder: Path, conversations: Path) -> Result:
    """Measures one result in FOLDER/NAME and writes it to docs/results."""
    measurement, out = MEASUREMENTS[name], folder / name
    seconds = run_commands(name, folder, conversations)
    start = time.perf_counter()
    rows = measurement.summarize(out)
    seconds = round(seconds + time.perf_counter() - start, 1)
    result = renew(name, rows, command=measurement.command(name), seconds=seconds)
    for fact in result.facts:
        print(f"docs/results/{name}.json keeps this fact; check that it still holds: {fact}")
    # Complete: the next start measures again, in the same folder.
    write_json(out / "progress.json", {"inputs": {}, "seconds": []})
    return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    only: tuple[str, ...] = option(
        f"measure these, fresh or not: {', '.join(MEASUREMENTS)}",
        (),
        choices=MEASUREMENTS,
        metavar="NAME",
    )
    stale: bool = option("only list results whose code has changed")
    fresh: tuple[str, ...] = option(
        "only print whether these are fresh; exit with 1 if one is not", (), metavar="NAME"
    )
    draw: int = option("only print this many figures, drawn by the checked-out commit's id", 0)
    conversations: Path = option("identity conversations", CONVERSATIONS)
    output: Path = option("folder for the commands' output", Path("runs/bench"))


def work(args: Options) -> int:
    """Returns 1 if a measurement failed (the rest still run) or one of `fresh` is stale, else 0."""
    if args.fresh:
        return report_fresh(args.fresh)
    if args.stale:
        report_stale()
        return 0
    if args.draw:
        report_drawn(args.draw, commit().removesuffix("+changes"))
        return 0
    stale, known, failed = stale_results(), load_all(), []
    for name in args.only or (
        name for name, measurement in MEASUREMENTS.items() if not measurement.takes_hours
    ):
        if not args.only and name in known and name not in stale:
            print(f"{name}: fresh")
            continue
        if MEASUREMENTS[name].needs_conversations and not args.conversations.exists():
            print(f"{name}: skipped; {args.conversations} does not exist (--conversations)")
            continue
        try:
            result = measure(name, args.output, args.conversations)
            print(f"{name}: {result.seconds:.0f} s")
        except subprocess.CalledProcessError as error:
            print(f"{name}: failed with {error.returncode}", file=sys.stderr)
            failed.append(name)
        page.write()
    page.write()  # even if everything was fresh
    return int(bool(failed))


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
