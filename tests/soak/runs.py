"""Attacks on the files of a run's folder other than checkpoints: logged rows, configuration,
assets, lock."""

import pathlib
import signal
import time

import numpy as np

from tests import small_run
from tests.soak.attacks import ROOT, Case, Failed, error_line
from tests.soak.damage import copied, damage_file
from tests.soak.kills import SAVE_EVERY, finish, run_result, start


def runs(base: pathlib.Path) -> Case:
    """Returns the case: a file of a stopped run is damaged, and the same command is started again.
    It is refused by name, or ends with the checkpoint and logged rows of an undisturbed run; lost
    or changed rows are reported."""
    recipe = small_run.recipe(base, ROOT, conversations=24)
    expected: dict[str, object] = {}
    stopped = base / "stopped"

    def stop() -> None:
        finish(start(recipe, base / "whole", 1, base, base / "prepared"), base)
        expected.update(run_result(base / "whole", base))
        process = start(recipe, stopped, 1, base, base / "prepared")[0]
        while (
            process.poll() is None and not (stopped / "checkpoints" / str(2 * SAVE_EVERY)).is_dir()
        ):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait(60)

    def case(generator: np.random.Generator, folder: pathlib.Path) -> str:
        if not expected:
            stop()
        run, log = copied(stopped, folder / "run"), folder / "log"
        part = run / "assets" if generator.random() < 0.25 else run
        files = sorted(path.relative_to(run) for path in part.iterdir() if path.is_file())
        name = files[generator.integers(len(files))]
        way = damage_file(run / name, generator)
        code = start(recipe, run, 1, folder, base / "prepared")[0].wait(300)
        output = log.read_text(encoding="utf-8")
        if error := error_line(code, output, f"{name} {way}"):
            # Half a configuration may be a valid one of another run: then the folder is named, and
            # the field that differs.
            if str(run) not in error:
                raise Failed(f"{name} {way}: {error}")
            return "refused by name"
        received = run_result(run, folder)
        if received["checkpoint"] != expected["checkpoint"]:
            raise Failed(f"{name} {way}: another checkpoint")
        outcome = "the same rows"
        for file in ("metrics", "held_out"):
            rows, truth = (
                {row["step"]: row for row in result[file]} for result in (received, expected)
            )
            if rows != truth:
                outcome = "lost or changed rows told of"
                if name.name not in output:
                    raise Failed(
                        f"{name} {way}: {file} lost or changed rows silently: {len(rows)} "
                        f"of {len(truth)} left"
                    )
        return f"the same checkpoint, {outcome}"

    return case
