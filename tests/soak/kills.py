"""Kills: a run that is killed at random instants, started again each time, ends as one that nobody touched."""

import json
import pathlib
import signal
import subprocess
import time

import numpy as np

from tests import small_run
from tests.soak.attacks import ROOT, Case, Fell

STEPS, SAVE_EVERY, EVALUATE_EVERY = 24, 5, 8
FLAGS = ("--mesh.fsdp", "1", "--mesh.tensor", "1", "--mesh.sequence", "2", "--mesh.simulate", "2", "--train.steps", str(STEPS),
         "--checkpoint.every", str(SAVE_EVERY), "--train.evaluate_every", str(EVALUATE_EVERY))


def kills(base: pathlib.Path) -> Case:
    """Returns the case: one to three kills by SIGKILL, at instants over the whole of an uninterrupted run's time."""
    recipe = small_run.recipe(base, ROOT)
    started = time.monotonic()
    small_run.finish(small_run.start(ROOT, recipe, base / "whole", *FLAGS), base / "whole")
    seconds = time.monotonic() - started
    truth = _losses(base / "whole")

    def case(generator: np.random.Generator, folder: pathlib.Path) -> str:
        run = folder / "run"
        flags = (*FLAGS, "--data.prepared", str(folder / "prepared"))
        count, phases = int(generator.integers(1, 4)), []
        for _ in range(count):
            process = small_run.start(ROOT, recipe, run, *flags)
            try:
                process.wait(timeout=float(generator.uniform(0, seconds)))
                break
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait(timeout=60)
                phases.append(_phase(run))
        small_run.finish(small_run.start(ROOT, recipe, run, *flags), run)
        if (losses := _losses(run)) != truth:
            first = next((step for step in truth if losses.get(step) != truth[step]), None)
            raise Fell(f"killed {phases}: other losses from step {first} on, or {len(losses)} rows in place of {len(truth)}")
        if leftovers := [path.name for path in (run / "checkpoints").iterdir() if path.name.endswith(".tmp")]:
            raise Fell(f"left {leftovers}")
        return f"killed {', then '.join(phases)}" if phases else "ended before it was killed"

    return case


def _losses(run: pathlib.Path) -> dict[int, tuple]:
    """Returns what a run logged of each step but times: equal to the bit, or it is another run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["step"]: (row["loss_nats_per_target"], row["grad_norm"], row["target_tokens"]) for row in rows}


def _phase(run: pathlib.Path) -> str:
    """Returns how far a run came, by its files."""
    if not run.exists():
        return "at the start"
    steps = small_run.steps_logged(run) if (run / "metrics.jsonl").exists() else 0
    if not steps:
        return "before the first step"
    return "in training" if steps < STEPS else "at the end"
