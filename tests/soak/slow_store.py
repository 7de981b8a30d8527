"""A store that answers slowly: every change to a file below a folder takes a while, and the thread
that waits is recorded."""

import builtins
import contextlib
import functools
import io
import os
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from unittest import mock

NAMES = ("mkdir", "rename", "replace", "rmdir", "unlink", "open")


class Waits:
    """The calls to a slow store, in order: name, path and whether the main thread waited."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, bool]] = []

    def main(self) -> list[str]:
        """Returns the calls that the main thread has waited for."""
        return [f"{name} {path}" for name, path, main in self.calls if main]

    def others(self) -> list[str]:
        """Returns the calls of the other threads."""
        return [f"{name} {path}" for name, path, main in self.calls if not main]


@contextlib.contextmanager
def slow_store(folder: pathlib.Path, seconds: float) -> Iterator[Waits]:
    """Delays by `seconds` every Python call that makes, renames, removes or opens for writing a
    file below `folder`."""
    waits = Waits()

    def slowed(call: Callable) -> Callable:
        @functools.wraps(call)
        def slow(path, *args, **kwargs):
            writes = call not in (builtins_open, io_open) or set("wax+") & set(
                (args or [kwargs.get("mode", "r")])[0]
            )
            writes = writes and (
                call is not os_open or (args[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            )
            if writes and isinstance(path, str | os.PathLike) and str(folder) in os.fspath(path):
                main = threading.current_thread() is threading.main_thread()
                waits.calls.append((call.__name__, os.path.relpath(path, folder), main))
                time.sleep(seconds)
            return call(path, *args, **kwargs)

        return slow

    builtins_open, io_open, os_open = builtins.open, io.open, os.open
    with contextlib.ExitStack() as stack:
        for module, name in [*((os, name) for name in NAMES), (builtins, "open"), (io, "open")]:
            stack.enter_context(mock.patch.object(module, name, slowed(getattr(module, name))))
        yield waits


DELAY = 0.3


def measure(folder: pathlib.Path) -> dict:
    """Trains a small run whose checkpoints are on a slow store; returns how long its saves delayed
    the training.

    Returns:
        held: seconds that each save delayed training, excluding the wait for the previous save.
        waited: seconds that each save waited for the previous one.
        written: seconds of the store's work in parallel with training, over all saves.
        calls: the calls to the store that training waited for.
        said: the run's messages about it.
    """
    import train
    from tests import small_run
    from tests.soak.attacks import ROOT
    from trainer.checkpoint.store import CheckpointStore

    held: list[float] = []
    waited: list[float] = []

    def timed(call: Callable, seconds: list[float]) -> Callable:
        def measured(store, *args, **kwargs):
            start = time.monotonic()
            call(store, *args, **kwargs)
            seconds.append(time.monotonic() - start)

        return measured

    recipe, printed = small_run.recipe(folder, ROOT, conversations=24), io.StringIO()
    run = folder / "run"
    command = small_run.command(
        recipe,
        run,
        *("--mesh.fsdp", 1, "--mesh.tensor", 1, "--mesh.sequence", 1, "--mesh.simulate", 1),
        *("--train.steps", 8, "--train.evaluate_every", 0, "--checkpoint.every", 2),
    )
    with (
        slow_store(run / "checkpoints", DELAY) as waits,
        contextlib.redirect_stderr(printed),
        mock.patch.object(CheckpointStore, "save", timed(CheckpointStore.save, held)),
        mock.patch.object(CheckpointStore, "wait", timed(CheckpointStore.wait, waited)),
    ):
        assert train.main(command) == 0, printed.getvalue()
    return {
        "held": held,
        "waited": waited,
        "written": DELAY * len(waits.others()),
        "calls": waits.main(),
        "said": [
            line
            for line in printed.getvalue().splitlines()
            if "for the previous checkpoint" in line
        ],
    }


def main() -> int:
    """Measures and records docs/results/slow_store.json."""
    from scripts.benchmarks.results import renew, row

    with tempfile.TemporaryDirectory() as temporary:
        result = measure(pathlib.Path(temporary))
    saves, calls = len(result["held"]), result["calls"]
    rows = {
        "calls": row(
            "file and folder operations that training waits for", str(len(calls)), "0", not calls
        ),
        "held": row(
            "longest delay of a step by a save, including the copy to the host",
            f"{max(result['held']):.1f} s",
            f"below the {result['written'] / saves:.1f} s of writing",
            max(result["held"]) < result["written"] / saves,
        ),
        "said": row(
            "saves that waited for the previous one and logged it",
            f"{len(result['said'])} of {saves - 1}",
            "all",
            len(result["said"]) == saves - 1,
        ),
    }
    renew("slow_store", rows)
    return 0


if __name__ == "__main__":
    import sys

    sys.exit(main())
