"""Another user, who may at most read shared data, models and runs: a command works, or says in one
line what to do."""

import os
import pathlib
import shutil

import numpy as np

from eval import line_cases
from tests import small_model, small_run
from tests.soak.attacks import ROOT, Case, Failed, Impossible, error_line
from tests.soak.forks import server
from tests.soak.kills import FLAGS, finish, run_result, start
from trainer.run.outcome import TRY_AGAIN, WRONG_INPUT

NOBODY = 65534
ONE_DEVICE = ("--mesh.sequence", "1", "--mesh.simulate", "1")


def accounts(base: pathlib.Path) -> Case:
    """Returns the case: an unprivileged user's command; one file may be unreadable for them. Raises
    Impossible without root, or without a Python and a checkout that other users may read."""
    for folder in (pathlib.Path(os.__file__).parent, ROOT):
        if closed := next(
            (path for path in (folder, *folder.parents) if not path.stat().st_mode & 0o001), None
        ):
            raise Impossible(
                f"{closed} is not readable by other users: the attacks need a Python and a checkout "
                "that they may read"
            )
    os.chmod(base.parent, 0o755)
    shared = base / "shared"
    shared.mkdir()
    recipe, model = small_run.recipe(shared, ROOT, conversations=24), small_model.write(shared)
    line_cases.write(line_cases.generate(4, 2, key_style="short"), shared / "cases.jsonl")
    finish(start(recipe, shared / "run", 1, base, shared / "prepared"), base)
    if server().run("scripts.import_hf", [model, shared / "imported"], base / "log"):
        raise Failed((base / "log").read_text()[-500:])
    shutil.rmtree(shared / "xla")
    truth = run_result(shared / "run", base)
    _for_others(shared)
    files = sorted(path for path in shared.rglob("*") if path != shared / "log")

    def case(generator: np.random.Generator, folder: pathlib.Path) -> str:
        private, log = folder / "own", folder / "log"
        private.mkdir()
        os.chown(private, NOBODY, NOBODY)
        commands = _commands(shared, recipe, model, private)
        name = list(commands)[generator.integers(len(commands))]
        module, arguments, works = commands[name]
        home = "/nonexistent" if name == "train without a home" else str(private)
        closed = files[generator.integers(len(files))] if generator.random() < 0.5 else None
        if closed:
            mode = closed.stat().st_mode
            os.chmod(closed, 0o700 if closed.is_dir() else 0o600)
        before = _listing(shared)
        try:
            code = server().run(module, arguments, log, uid=NOBODY, environment={"HOME": home})
        finally:
            if closed:
                os.chmod(closed, mode)
        label = f"{name}, {f'{closed.relative_to(shared)} closed' if closed else 'all to be read'}"
        output = log.read_text(encoding="utf-8")
        error = error_line(code, output, label, (WRONG_INPUT, TRY_AGAIN))
        if error and str(shared) not in error:
            raise Failed(f"{label}: names nothing shared: {error[:400]}")
        if works and error and not closed:
            raise Failed(f"{label}: {error[:400]}")
        if (
            code == 0
            and name in ("train on shared data", "train without a home")
            and run_result(private / "run", folder) != truth
        ):
            raise Failed(f"{label}: another result")
        if _listing(shared) != before:
            raise Failed(f"{label}: something shared has changed")
        return (
            f"{name}: {'works' if code == 0 else 'one line'}{', a file closed' if closed else ''}"
        )

    return case


def _commands(
    shared: pathlib.Path, recipe: pathlib.Path, model: pathlib.Path, private: pathlib.Path
) -> dict[str, tuple[str, list, bool]]:
    """Returns name -> module, arguments, and whether it must work when everything is readable.

    Args:
        shared: the folder that others may read, with a recipe and a model.
        private: the user's own folder.
    """
    train = ["--config", recipe, *FLAGS, *ONE_DEVICE, "--data.prepared", shared / "prepared"]
    retrieval = ["--cases", shared / "cases.jsonl"]
    retrieval += ["--max-new-tokens", "2", "--compute-dtype", "float32"]
    return {
        "train on shared data": ("train", [*train, "--run_dir", private / "run"], True),
        "train without a home": ("train", [*train, "--run_dir", private / "run"], True),
        "train a shared model": (
            "train",
            [
                *(*train, "--model.path", model, "--model.overrides", "{}"),
                *("--run_dir", private / "run", "--data.prepared", private / "prepared"),
            ],
            True,
        ),
        "continue a shared run": ("train", [*train, "--run_dir", shared / "run"], False),
        "lengthen a shared run": (
            "train",
            [*train, "--run_dir", shared / "run", "--train.log_every", "2"],
            False,
        ),
        "prepare what is there": ("scripts.prepare", train, True),
        "prepare other data": ("scripts.prepare", [*train, "--data.context_length", "64"], False),
        "export a shared run": (
            "scripts.export_hf",
            [shared / "run", private / "exported"],
            True,
        ),
        "export into shared": ("scripts.export_hf", [shared / "run", shared / "exported"], False),
        "import a shared model": ("scripts.import_hf", [model, private / "imported"], True),
        "import into shared": ("scripts.import_hf", [model, shared / "new"], False),
        "evaluate a shared model": (
            "eval.line_retrieval",
            ["--checkpoint", model, "--output", private / "out", *retrieval],
            True,
        ),
        "evaluate a shared run": (
            "eval.line_retrieval",
            ["--checkpoint", shared / "run", "--output", private / "out", *retrieval],
            True,
        ),
        "evaluate into shared": (
            "eval.line_retrieval",
            ["--checkpoint", model, "--output", shared / "out", *retrieval],
            False,
        ),
    }


def _for_others(folder: pathlib.Path) -> None:
    """Lets other users read, but not write."""
    for path in [folder, *folder.rglob("*")]:
        os.chmod(path, 0o755 if path.is_dir() else 0o644)


def _listing(folder: pathlib.Path) -> list[tuple]:
    return sorted(
        (str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")
    )
