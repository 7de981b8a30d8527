"""Two racing starts of one run: at the end it is complete, and bitwise equal to a run that was
started once."""

import pathlib
import signal
import subprocess
import time

import numpy as np

from tests import small_run
from tests.soak.attacks import ROOT, Case, Failed, error_line
from tests.soak.forks import Forked
from tests.soak.kills import check_run, finish, run_result, start
from trainer.run.outcome import TRY_AGAIN

LONGEST_WAIT = 300


def races(base: pathlib.Path) -> Case:
    """Returns the case: another start a moment later, or one that stalls for a while at a random
    instant."""
    recipe = small_run.recipe(base, ROOT, conversations=24)
    truth: list[tuple[dict, float]] = []

    def undisturbed() -> tuple[dict, float]:
        """Returns the result of a run that was started once, and its seconds."""
        for name in (
            ("first", "whole") if not truth else ()
        ):  # the first fills the cache of compiled programs
            began = time.monotonic()
            finish(start(recipe, base / name, 1, base, base / f"prepared {name}"), base)
            truth[:] = [(run_result(base / name, base), time.monotonic() - began)]
        return truth[0]

    def case(generator: np.random.Generator, folder: pathlib.Path) -> str:
        expected, seconds = undisturbed()
        run, logs = folder / "run", [folder / "a", folder / "b"]

        def begin(log: pathlib.Path) -> Forked:
            log.mkdir()
            return start(recipe, run, 1, log, folder / "prepared")[0]

        disturbance = str(generator.choice(["later", "stopped", "stopped until the end"]))
        first = begin(logs[0])
        if disturbance == "later":
            time.sleep(float(generator.uniform(0, seconds)))
        second = begin(logs[1])
        if disturbance != "later":
            time.sleep(float(generator.uniform(0, seconds)))
            stopped, other = (first, second) if generator.random() < 0.5 else (second, first)
            stopped.send_signal(signal.SIGSTOP)
            _wait(
                other,
                float(generator.uniform(0, seconds)) if disturbance == "stopped" else 3 * seconds,
            )
            stopped.send_signal(signal.SIGCONT)
        codes = [_wait(process, LONGEST_WAIT) for process in (first, second)]
        for code, log in zip(codes, logs, strict=True):
            output = (log / "log").read_text(encoding="utf-8")
            error = error_line(code, output, disturbance, (TRY_AGAIN,))
            if error and (str(run) not in error or "is training there" not in error):
                raise Failed(f"{disturbance}: {error[:400]}")
        if all(codes):
            raise Failed(f"{disturbance}: neither start trained")
        check_run(run, folder, expected, f"{disturbance}, ended with {codes}")
        return f"{disturbance}: {'one was refused' if any(codes) else 'both ended well'}"

    return case


def _wait(process: Forked, seconds: float) -> int | None:
    """Returns the process's exit code, or None if it has not ended within this many seconds."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
