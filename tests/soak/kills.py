"""Kills at random instants: a run and its export, started again each time, end like undisturbed
ones."""

import json
import pathlib
import re
import subprocess
import time

import numpy as np

from scripts.launch_local import free_port
from tests import small_run
from tests.soak.attacks import ROOT, Case, Failed
from tests.soak.forks import Forked, server

STEPS, SAVE_EVERY, EVALUATE_EVERY = 12, 3, 4
FLAGS = (
    *("--mesh.fsdp", "1", "--mesh.tensor", "1", "--train.steps", str(STEPS)),
    *("--checkpoint.every", str(SAVE_EVERY), "--train.evaluate_every", str(EVALUATE_EVERY)),
)
PHASES = ("start", "preparation", "compile", "training", "save", "evaluation", "export")
# The phases at which each kill of a case aims: everything before the first step, then what follows
# it.
AIMS = (
    ("start", "preparation", "compile"),
    ("compile", "training", "save", "evaluation"),
    ("training", "save", "evaluation"),
)
LONGEST_DELAY = {
    "start": 1.0,
    "preparation": 0.05,
    "compile": 2.0,
    "training": 0.3,
    "save": 0.3,
    "evaluation": 0.03,
}
# The time within which a process ends after its peer was killed: at the start it waits 60 s for the
# other process.
ALONE_SECONDS = 90


def kills(base: pathlib.Path) -> Case:
    """Returns the case: three kills of a run with one or two processes, and one of its export; the
    results are compared with an undisturbed run."""
    recipe = small_run.recipe(base, ROOT, conversations=24)
    truths: dict[int, tuple] = {}

    def truth(processes: int) -> tuple:
        if processes not in truths:
            run = base / f"run of {processes}"
            finish(start(recipe, run, processes, base, base / "prepared"), base)
            began = time.monotonic()
            export = _export(run, base / f"exported of {processes}", base)
            finish([export], base)
            truths[processes] = (
                run_result(run, base),
                _files(base / f"exported of {processes}"),
                time.monotonic() - began,
            )
        return truths[processes]

    def case(generator: np.random.Generator, folder: pathlib.Path) -> str:
        processes = int(generator.choice([1, 1, 2]))
        expected, exported, export_seconds = truth(processes)
        run, prepared = folder / "run", folder / "prepared"
        killed: list[str] = []
        for aims in AIMS:
            aim, step = str(generator.choice(aims)), int(generator.integers(1, STEPS))
            delay = float(generator.uniform(0, LONGEST_DELAY[aim]))
            dies = int(generator.integers(-1, processes))  # -1: all of them
            started = start(recipe, run, processes, folder, prepared)
            if _wait_for(aim, step, started, folder):
                time.sleep(delay)
            if any(process.poll() is not None for process in started):
                continue
            for process in started if dies < 0 else [started[dies]]:
                process.kill()
            phase = _phase(run, folder)
            for number, process in enumerate(started):
                try:
                    code = process.wait(ALONE_SECONDS)
                except subprocess.TimeoutExpired:
                    raise Failed(
                        f"process {number} had not ended after {ALONE_SECONDS} s, killed in {phase}"
                    ) from None
                if code == 1:
                    raise Failed(f"process {number} ended with 1: {_log(folder)[-400:]}")
            killed.append(phase)
        finish(start(recipe, run, processes, folder, prepared), folder)
        check_run(run, folder, expected, f"killed in {killed}")
        export, out = _export(run, folder / "exported", folder), folder / "exported"
        time.sleep(float(generator.uniform(0, export_seconds)))
        if export.poll() is None:
            export.kill()
            export.wait(ALONE_SECONDS)
            killed.append("export")
        if not (out / "README.md").exists():
            finish([_export(run, out, folder)], folder)
        if _files(out) != exported:
            raise Failed("another export")
        if leftovers := [
            path.name for path in folder.iterdir() if "exported" in path.name and path != out
        ]:
            raise Failed(f"killed in {killed}: left {leftovers}")
        return f"{processes} processes, killed in {', '.join(killed) or 'nothing'}"

    return case


def count(outcomes: dict[str, int]) -> dict[str, int]:
    """Returns how often cases with these outcomes were killed in each phase."""
    return {
        phase: sum(number * outcome.count(phase) for outcome, number in outcomes.items())
        for phase in PHASES
    }


def start(
    recipe: pathlib.Path,
    run: pathlib.Path,
    processes: int,
    folder: pathlib.Path,
    prepared: pathlib.Path,
) -> list[Forked]:
    """Starts the run with a separate log in `folder` and a compilation cache that all cases
    share."""
    flags = small_run.command(
        recipe,
        run,
        *(*FLAGS, "--mesh.sequence", processes, "--mesh.simulate", processes),
        *("--data.prepared", prepared, "--compile_cache", recipe.parent / "xla"),
    )
    (folder / "log").write_text("")
    cluster = ["--distributed.coordinator", f"127.0.0.1:{free_port()}"]
    cluster += ["--distributed.num_processes", processes, "--distributed.process_id"]
    return [
        server().start(
            "train", [*flags, *([*cluster, number] if processes > 1 else [])], folder / "log"
        )
        for number in range(processes)
    ]


def _export(run: pathlib.Path, out: pathlib.Path, folder: pathlib.Path) -> Forked:
    return server().start("scripts.export_hf", [run, out], folder / "log")


def finish(processes: list[Forked], folder: pathlib.Path) -> None:
    """Waits until all have ended. Raises Failed unless all succeeded."""
    for process in processes:
        if code := process.wait(600):
            raise Failed(f"ended with {code}: {_log(folder)[-600:]}")


def _log(folder: pathlib.Path) -> str:
    return (folder / "log").read_text(encoding="utf-8")


def run_result(run: pathlib.Path, folder: pathlib.Path) -> dict[str, object]:
    """Returns what a run has logged, without times and memory, and a hash of its last
    checkpoint."""
    rows = {
        name: list(map(small_run.without_measured, small_run.rows(run / f"{name}.jsonl")))
        for name in ("metrics", "held_out")
    }
    (folder / "digest").unlink(missing_ok=True)
    if server().run("tests.soak.digest", [run], folder / "digest"):
        raise Failed(f"its last checkpoint: {(folder / 'digest').read_text()[-400:]}")
    return {**rows, "checkpoint": (folder / "digest").read_text().split()[:2]}


def check_run(run: pathlib.Path, folder: pathlib.Path, expected: dict, label: str) -> None:
    """Raises Failed unless a run has the expected result, and it and the prepared data in `folder`
    are without partial files."""
    if (received := run_result(run, folder)) != expected:
        difference = next(name for name in expected if expected[name] != received[name])
        raise Failed(f"{label}: another {difference}: {str(received[difference])[:300]}")
    if leftovers := [
        path.name
        for parent in (run / "checkpoints", folder / "prepared")
        for path in parent.iterdir()
        if path.name.endswith(".tmp") or path.name.startswith(".")
    ]:
        raise Failed(f"{label}: left {leftovers}")


def _files(folder: pathlib.Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.name != "README.md"
    }


def _wait_for(aim: str, step: int, processes: list[Forked], folder: pathlib.Path) -> bool:
    """Waits for the first sign of a phase at or after a step; returns False if the run ended
    before."""
    run, prepared = folder / "run", folder / "prepared"

    def seen() -> bool:
        logged = small_run.steps_logged(run)
        if aim == "start":
            return True
        if aim == "preparation":
            return any(prepared.glob(".*")) or "compiling" in _log(folder)
        if aim == "compile":
            return "compiling" in _log(folder)
        if aim == "training":
            return logged >= step
        if aim == "evaluation":
            return logged >= step and logged % EVALUATE_EVERY == 0
        return logged >= step and any((run / "checkpoints").glob("*.tmp"))

    while not seen():
        if any(process.poll() is not None for process in processes):
            return False
        time.sleep(0.003)
    return True


def _phase(run: pathlib.Path, folder: pathlib.Path) -> str:
    """Returns the phase in which a run was killed, from its files and the log of its last start."""
    log, logged = _log(folder), small_run.steps_logged(run)
    if any((run / "checkpoints").glob("*.tmp")):
        return "save"
    if "compiling" not in log:
        return "preparation" if any((folder / "prepared").glob(".*")) else "start"
    if not re.search(r"^step \d+/", log, re.MULTILINE):
        return "compile"
    held_out = run / "held_out.jsonl"
    last = (
        json.loads(held_out.read_bytes().splitlines()[-1])["step"]
        if held_out.stat().st_size
        else -1
    )
    return "evaluation" if logged % EVALUATE_EVERY == 0 and last < logged else "training"
