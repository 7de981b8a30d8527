"""Two racing starts of one run: at the end it is complete, and bitwise equal to a run that was
started once."""

import pathlib
import signal
import subprocess
import time

import numpy as np

from tests import small_run
from tests.soak.attacks import ROOT, Case, Failed
from tests.soak.forks import Forked
from tests.soak.kills import finish, run_result, start

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
            errors = [line for line in output.splitlines() if line.startswith("error: ")]
            if (
                code not in (0, 2, 75)
                or "Traceback" in output
                or (code in (2, 75)) != (len(errors) == 1)
            ):
                raise Failed(f"{disturbance}: ended with {code}: {output[-500:]}")
            if errors and (str(run) not in errors[0] or "is training there" not in errors[0]):
                raise Failed(f"{disturbance}: {errors[0][:400]}")
        if codes == [2, 2]:
            raise Failed(f"{disturbance}: neither start trained")
        if (received := run_result(run, folder)) != expected:
            difference = next(name for name in expected if expected[name] != received[name])
            raise Failed(
                f"{disturbance}, ended with {codes}: another {difference}: "
                f"{str(received[difference])[:300]}"
            )
        if leftovers := [
            path.name
            for parent in (run / "checkpoints", folder / "prepared")
            for path in parent.iterdir()
            if path.name.endswith(".tmp") or path.name.startswith(".")
        ]:
            raise Failed(f"{disturbance}: left {leftovers}")
        return f"{disturbance}: {'one was refused' if 2 in codes else 'both ended well'}"

    return case


def _wait(process: Forked, seconds: float) -> int | None:
    """Returns the process's exit code, or None if it has not ended within this many seconds."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
