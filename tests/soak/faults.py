"""Eight processes survive twelve faults without manual repair: python -m tests.soak.faults.

--processes runs fewer; the victims' numbers are then taken modulo their count.

A run in a bucket (S3 on the loopback) is trained twice by scripts.launch_local: undisturbed, and
with one fault after another, where every restart is the launcher's. The losses of all steps and the
exported weights must be bitwise equal. On two idle cores it takes about a quarter of an hour.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator

import yaml

from scripts import export_hf
from scripts.tpu.workers import write_archive
from tests import s3_server, small_run
from tests.soak import injected
from tests.soak.attacks import ROOT, Failed
from trainer.run.bucket import Bucket
from trainer.run.mirror import logs_and_others

PROCESSES = 8
STEPS = 48
SAVE_EVERY = 3  # the launcher gives up without a new checkpoint, so each start makes one if it can
PATIENCE = 1800  # seconds of waiting for anything
STOPPED_SECONDS = 60
FAILING_SECONDS = 60
FLAGS = ("--train.evaluate_every", "0", "--checkpoint.every", str(SAVE_EVERY))
AGAIN = "starting again in"


class Run:
    """A run under the launcher.

    Attributes:
      store: the bucket's objects.
      folder: for logs and faults.
    """

    def __init__(
        self, store: s3_server.Server, recipe: pathlib.Path, name: str, processes: int, steps: int
    ) -> None:
        self.store, self.name, self.processes = store.store, name, processes
        self.url = f"s3://bucket/{name}"
        self.folder = recipe.parent / name
        (self.folder / "faults").mkdir(parents=True)
        self.log = self.folder / "log"
        command = [sys.executable, "-m", "scripts.launch_local", "--processes", str(processes)]
        command += ["--restarts", "5", "--config", str(recipe), "--run_dir", self.url]
        environment = {
            **os.environ,
            **store.environment,
            injected.FOLDER: str(self.folder / "faults"),
            "PYTHONPATH": f"{recipe.parent / 'site'}:{ROOT}",
            "LONGSTRIPE_CACHE": str(self.folder / "cache"),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
        }
        self._command = [*command, "--train.steps", str(steps), *FLAGS]
        self._environment = environment

    def start(self) -> None:
        """Starts the launcher."""
        with self.log.open("wb") as log:
            self.launcher = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, stdout=log, stderr=log
            )

    def output(self) -> str:
        """Returns the output of the launcher and the processes."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Waits for a condition. Raises Failed if it does not become true, or if the launcher has
        ended."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"waited in vain for {what}: {self.output()[-2000:]}")
            time.sleep(0.01)

    def wait_for_step(self) -> None:
        """Waits until the current start logs a step."""
        self.wait_until(lambda: "\nstep " in self.output().rpartition(AGAIN)[2], "a step")

    def wait_for_output(self, words: str) -> None:
        """Waits until these words are printed after everything printed so far."""
        before = self.output().count(words)
        self.wait_until(lambda: self.output().count(words) > before, words)

    def wait_for_restart(self, starts: int) -> None:
        """Waits until the launcher has printed that this many starts were followed by another."""
        self.wait_until(lambda: self.output().count(AGAIN) >= starts, "another start")

    def plant(self, number: int, fault: Callable[[], None]) -> None:
        """Gives a process a fault for its next start."""
        (self.folder / "faults" / str(number % self.processes)).write_text(fault.__name__)

    def signal(self, number: int, kind: signal.Signals) -> None:
        """Sends a signal to a process."""
        words = f"{injected.NUMBER}\0{number % self.processes}\0".encode()
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                line = path.read_bytes()
                if words in line and self.url.encode() in line:
                    os.kill(int(path.parent.name), kind)

    def wait_for_checkpoint(self) -> None:
        """Waits for a new complete checkpoint."""
        before = self._checkpoints()[0]
        self.wait_until(lambda: self._checkpoints()[0] - before, "another checkpoint")

    def is_saving(self) -> bool:
        """Returns whether a checkpoint is being written now."""
        return bool(self._checkpoints()[1])

    def _checkpoints(self) -> tuple[set[str], set[str]]:
        """Returns the steps of complete checkpoints, and of partial ones."""
        pattern = re.compile(rf"{self.name}/checkpoints/(\d+)/(.*)")
        names = [match for name in self.store.names() if (match := pattern.fullmatch(name))]
        whole = {match[1] for match in names if match[2] == "manifest.json"}
        return whole, {match[1] for match in names} - whole

    def result(self) -> tuple[list[dict], str]:
        """Returns the logged rows without times, and the digest of the exported weights."""
        logs, _ = logs_and_others(Bucket(self.url).read_all("metrics.jsonl"))
        rows = [json.loads(line) for line in logs["metrics.jsonl"][1].splitlines()]
        exported = self.folder / "exported"
        if export_hf.main([self.url, str(exported)]):
            raise Failed("the run could not be exported")
        weights = (exported / "model.safetensors").read_bytes()
        kept = list(map(small_run.without_measured, rows))
        return kept, hashlib.sha256(weights).hexdigest()

    def end(self) -> None:
        """Waits for success. Raises Failed otherwise."""
        if code := self.launcher.wait(PATIENCE):
            raise Failed(f"ended with {code}: {self.output()[-2000:]}")


def disturb(run: Run) -> Iterator[str]:
    """Brings about one fault after another in a started run, and yields its description."""
    yield f"process 7 has a clock {injected.AHEAD_SECONDS} s ahead"  # planted before the start
    run.wait_for_checkpoint()
    run.signal(5, signal.SIGKILL)
    run.plant(6, injected.late)
    yield "process 5 killed"
    run.wait_for_restart(1)
    yield f"process 6 is {injected.LATE_SECONDS} s late"
    run.wait_for_checkpoint()
    run.signal(0, signal.SIGKILL)
    run.plant(4, injected.input_output_error)
    yield "process 0 killed, which holds the lock"
    run.wait_for_output(os.strerror(5))
    run.plant(3, injected.full_disk)
    yield "EIO in process 4"
    run.wait_for_output(os.strerror(28))
    run.plant(1, injected.another_code)
    yield "a full disk in process 3"
    run.wait_for_output("this project's source is")
    yield "process 1 has other code"
    run.wait_for_output(AGAIN)
    run.wait_for_checkpoint()
    run.signal(2, signal.SIGSTOP)
    yield f"process 2 stopped for {STOPPED_SECONDS} s"
    time.sleep(STOPPED_SECONDS)
    run.signal(2, signal.SIGCONT)
    run.wait_for_checkpoint()
    run.wait_until(run.is_saving, "a save")
    run.signal(3, signal.SIGKILL)
    yield "process 3 killed during a save"
    run.wait_for_output(AGAIN)
    run.wait_for_checkpoint()
    run.signal(4, signal.SIGTERM)
    yield "process 4 gets SIGTERM"
    run.wait_for_output(AGAIN)
    lock = json.dumps({"holder": "process 1 on a-host-that-is-gone is training there"})
    run.store.objects["bucket", f"{run.name}/lock"] = lock.encode(), 0
    yield "the lock is that of a host that is gone"
    run.wait_for_step()
    counted = itertools.count()
    run.store.refused = lambda method, path: None if next(counted) % 5 else 503
    yield f"the store fails one request in five for {FAILING_SECONDS} s"
    time.sleep(FAILING_SECONDS)
    run.store.refused = lambda method, path: None


@contextlib.contextmanager
def small_disk(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """Mounts a disk that cannot hold a process's part of a checkpoint; yields the variable that
    names it, or nothing if mounting is not permitted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        yield {}
        return
    try:
        yield {injected.SMALL_DISK: str(folder)}
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def other_tree(folder: pathlib.Path) -> dict[str, str]:
    """Writes a copy of this project with three times the learning rate; returns the variable that
    names it."""
    folder.mkdir()
    write_archive(folder / "tree.tar.gz", ROOT)
    with tarfile.open(folder / "tree.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    path = folder / "trainer" / "optimizer.py"
    text, right = path.read_text(encoding="utf-8"), "        config.learning_rate\n"
    assert text.count(right) == 1
    path.write_text(text.replace(right, right.replace("config", "3 * config")), encoding="utf-8")
    return {injected.OTHER_TREE: str(folder)}


def drill(folder: pathlib.Path, processes: int, steps: int) -> dict[str, object]:
    """Trains both runs; returns the faults and the run's outcome.

    Raises:
      Failed: the launcher gave up, or the results differ.
    """
    recipe = small_run.recipe(folder, ROOT, conversations=40)
    fields = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    fields["model"]["overrides"]["num_hidden_layers"] = 1
    fields["mesh"] |= {"fsdp": 4, "tensor": 1}
    del fields["data"]["held_out_path"]
    recipe.write_text(yaml.safe_dump(fields), encoding="utf-8")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(
        "from tests.soak import injected\n\ninjected.begin()\n"
    )
    start = time.monotonic()
    with s3_server.Server() as store, small_disk(folder / "disk") as disk:
        # Bucket and export in this process find the store too.
        os.environ.update(store.environment | {"LONGSTRIPE_CACHE": str(folder / "cache")})
        whole, disturbed = (
            Run(store, recipe, name, processes, steps) for name in ("whole", "disturbed")
        )
        whole.start()
        whole.end()
        print(f"undisturbed: {time.monotonic() - start:.0f} s", flush=True)
        disturbed._environment |= disk | other_tree(folder / "tree")
        disturbed.plant(7, injected.another_clock)
        start, faults = time.monotonic(), []
        disturbed.start()
        try:
            for fault in disturb(disturbed):
                faults.append(fault)
                print(f"{time.monotonic() - start:6.0f} s  {fault}", flush=True)
            disturbed.end()
        finally:
            if disturbed.launcher.poll() is None:
                disturbed.launcher.terminate()
                disturbed.launcher.wait()
        (rows, weights), (expected, whole_weights) = disturbed.result(), whole.result()
    if len(expected) != steps or rows != expected:
        raise Failed(f"other rows: {rows[-1]} for {expected[-1]}, {len(rows)} for {len(expected)}")
    if weights != whole_weights:
        raise Failed("other weights")
    return {
        "faults": faults,
        "starts": disturbed.output().count(AGAIN) + 1,
        "seconds": round(time.monotonic() - start),
        "weights": weights,
    }


def main(argv: list[str] | None = None) -> int:
    """Runs the drill; returns 1 if it failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.faults", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--out", type=pathlib.Path, help="a new folder for the logs, which is kept")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="processes of the run (8)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of the run ({STEPS})")
    args = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        if args.out:
            args.out.mkdir(parents=True)
            folder = args.out.absolute()
        else:
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            result = drill(folder, args.processes, args.steps)
        except Failed as error:
            print(f"failed: {error}")
            return 1
    print(
        f"{len(result['faults'])} faults, {result['starts']} starts, {result['seconds']} s: all "
        f"losses and the weights ({result['weights'][:12]}) are those of the undisturbed run"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
