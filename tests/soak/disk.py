"""A disk that fills up at a random moment: one line of error, and with more room the same command
gives the same result."""

import contextlib
import hashlib
import pathlib
import subprocess
from collections.abc import Callable, Iterator

import numpy as np

from eval import line_cases
from tests import small_model, small_run
from tests.soak.attacks import ROOT, Case, Failed, Impossible, error_line
from tests.soak.forks import server
from tests.soak.kills import FLAGS, run_result
from trainer.run.outcome import TRY_AGAIN

LARGE = 200_000  # KiB, with which every command has room
KINDS = ("prepare", "train", "train", "metrics", "export", "import", "retrieval", "compile cache")
ONE_DEVICE = ("--mesh.sequence", "1", "--mesh.simulate", "1")


def disk(base: pathlib.Path) -> Case:
    """Returns the case: a command whose output, or all that it makes, is on a disk of random size;
    needs root."""
    recipe, model = small_run.recipe(base, ROOT, conversations=24), small_model.write(base)
    cases = base / "cases.jsonl"
    line_cases.write(line_cases.generate(4, 2, key_style="short"), cases)
    flags = ["--config", recipe, *FLAGS, *ONE_DEVICE]

    def train(folder: pathlib.Path, *extra: object) -> tuple[str, list]:
        places = ["--run_dir", folder / "run", "--data.prepared", folder / "prepared"]
        return "train", [*flags, *places, "--compile_cache", base / "xla", *extra]

    def command(kind: str, folder: pathlib.Path) -> tuple[str, list]:
        """Returns the module and the arguments of a command that writes into `folder`."""
        return {
            "prepare": lambda: (
                "scripts.prepare",
                [*flags, "--data.prepared", folder / "prepared"],
            ),
            "train": lambda: train(folder, "--logging.tensorboard", "true"),
            # As large as the run without its data, so that the disk fills up later.
            "metrics": lambda: train(folder, "--data.prepared", base / "prepared"),
            "compile cache": lambda: train(
                base / kind / folder.parent.name, "--compile_cache", folder / "xla"
            ),
            "export": lambda: ("scripts.export_hf", [base / "imported", folder / "exported"]),
            "import": lambda: ("scripts.import_hf", [model, folder / "imported"]),
            "retrieval": lambda: (
                "eval.line_retrieval",
                [
                    *("--checkpoint", model, "--cases", cases, "--output", folder / "out"),
                    *("--max-new-tokens", "2", "--compute-dtype", "float32"),
                ],
            ),
        }[kind]()

    def result(kind: str, folder: pathlib.Path) -> object:
        if kind in ("train", "metrics"):
            return run_result(folder / "run", base)
        if kind == "compile cache":
            return run_result(base / kind / folder.parent.name / "run", base)
        if kind == "import":
            return _digests(folder / "imported" / "assets")
        return _digests(next(folder.iterdir()))

    truths: dict[str, tuple[object, int]] = {}

    def truth(kind: str) -> tuple[object, int]:
        """Returns a command's result, and the KiB that it has written."""
        if kind not in truths:
            folder = base / f"whole {kind}" / "disk"
            folder.mkdir(parents=True)
            log = base / f"{kind}.log"
            if server().run(*command(kind, folder), log):
                raise Failed(f"{kind}: {log.read_text()[-600:]}")
            used = subprocess.run(
                ["du", "-sk", folder], check=True, capture_output=True, text=True
            ).stdout.split()[0]
            truths[kind] = result(kind, folder), int(used)
        return truths[kind]

    server().run("scripts.import_hf", [model, base / "imported"], base / "log")
    server().run("scripts.prepare", [*flags, "--data.prepared", base / "prepared"], base / "log")

    def case(generator: np.random.Generator, folder: pathlib.Path) -> str:
        kind = str(generator.choice(KINDS))
        expected, used = truth(kind)
        disk_folder, log = folder / "disk", folder / "log"
        kib = int(generator.integers(4, max(8, int(0.95 * used))))
        with mounted(disk_folder, kib) as resize:
            code = server().run(*command(kind, disk_folder), log)
            label = f"{kind}, {kib} of {used} KiB"
            error = error_line(code, log.read_text(), label, (TRY_AGAIN,))
            if error and (str(disk_folder) not in error or "No space left" not in error):
                raise Failed(f"{label}: names neither the disk nor its state: {error[:400]}")
            resize(LARGE)
            log.unlink()
            if code and (again := server().run(*command(kind, disk_folder), log)):
                raise Failed(
                    f"{label}: with more room it ended with {again}: {log.read_text()[-500:]}"
                )
            if (received := result(kind, disk_folder)) != expected:
                raise Failed(f"{label}: another result: {_difference(received, expected)}")
            if leftovers := [
                path.name
                for path in disk_folder.rglob("*")
                if path.name.startswith(".") or ".tmp" in path.name
            ]:
                raise Failed(f"{label}: left {leftovers}")
        return f"{kind}: {'full' if code else 'went on without it'}"

    return case


@contextlib.contextmanager
def mounted(folder: pathlib.Path, kib: int) -> Iterator[Callable[[int], None]]:
    """Mounts a disk of this many KiB at a new folder; yields a function that changes its size.
    Raises Impossible without root."""
    folder.mkdir()

    def mount(kib: int, *options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", ",".join([*options, f"size={kib}k"]), "tmpfs"]
        if subprocess.run([*command, folder], check=False, capture_output=True).returncode:
            raise Impossible("a small disk cannot be mounted: it needs root")

    mount(kib)
    try:
        yield lambda kib: mount(kib, "remount")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _digests(folder: pathlib.Path) -> dict[str, str]:
    """Returns a hash of every file, excluding the folder's own path, files that hold times, and
    locks."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(
            path.read_bytes().replace(str(folder).encode(), b"")
        ).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("lock", "README.md")
    }


def _difference(received: object, expected: object) -> str:
    if isinstance(received, dict) and isinstance(expected, dict):
        names = [
            name for name in {**expected, **received} if received.get(name) != expected.get(name)
        ]
        return f"{', '.join(names)}: {str(received.get(names[0]))[:200]}"
    return str(received)[:200]
