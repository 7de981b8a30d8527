"""The quickstart's commands with everything in buckets: python -m tests.soak.buckets [gs] [s3].

On disk, in gs:// and in s3:// (stores on the loopback) the same recipe is prepared, trained,
killed, started again twice at once (one start is refused), evaluated, exported and reported; the
results must agree bitwise. The recipe is the quickstart's with fewer steps (--steps). Then a
checkpoint's time and bytes in each store are printed next to the disk's.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

from scripts.benchmarks.checkpoint_stores import measure
from scripts.quickstart import CASES, RECIPE
from tests import gcs_server, s3_server, small_run
from tests.soak.attacks import ROOT, Failed
from trainer.run.bucket import Bucket, in_bucket
from trainer.run.mirror import logs_and_others

STORES = {"gs": gcs_server.Server, "s3": s3_server.Server}
PATIENCE = 1800  # seconds that a command may take
REFUSED = "is training there since"


class Place:
    """Where a run and its data are kept: a folder, or gs://bucket or s3://bucket.

    Attributes:
      url: the folder's or bucket's address.
      folder: on this machine, for logs and results.
    """

    def __init__(self, name: str, folder: pathlib.Path, steps: int) -> None:
        self.folder = folder / name
        self.folder.mkdir()
        self.url = str(self.folder) if name == "disk" else f"{name}://bucket"
        self.run = f"{self.url}/run"
        # Without s3fs, prepared data are read from disk.
        readable = name != "s3" or importlib.util.find_spec("s3fs") is not None
        prepared = self.url if readable else str(self.folder)
        self.recipe = ["--config", RECIPE, "--data.prepared", f"{prepared}/prepared"]
        self.recipe += ["--run_dir", self.run, "--train.steps", str(steps)]
        self.recipe += ["--checkpoint.every", str(steps // 4), "--train.evaluate_every", "0"]
        environment = {"LONGSTRIPE_CACHE": str(self.folder / "cache"), "JAX_PLATFORMS": "cpu"}
        self.environment = {**os.environ, **environment}

    def start(self, log: str, *words: str) -> subprocess.Popen:
        """Starts a Python command with its output in a file."""
        with (self.folder / log).open("wb") as file:
            command = [sys.executable, *words]
            return subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=file, stderr=file
            )

    def output(self, log: str) -> str:
        """Returns a command's output so far."""
        return (self.folder / log).read_text(encoding="utf-8", errors="replace")

    def do(self, log: str, *words: str) -> str:
        """Runs a Python command; returns its output. Raises Failed if it fails."""
        start = time.monotonic()
        if code := self.start(log, *words).wait(PATIENCE):
            raise Failed(f"{self.url}: {words} ended with {code}: {self.output(log)[-1000:]}")
        print(f"  {time.monotonic() - start:6.1f} s  {log}", flush=True)
        return self.output(log)

    def train(self) -> None:
        """Trains; in a bucket with a kill, followed by two starts at once."""
        if not in_bucket(self.url):
            self.do("train", "train.py", *self.recipe)
            return
        self._kill_after_a_checkpoint()
        logs = ("second", "third")
        starts = {log: self.start(log, "train.py", *self.recipe) for log in logs}
        codes = {log: process.wait(PATIENCE) for log, process in starts.items()}
        for log, code in codes.items():
            refused = code == os.EX_TEMPFAIL and REFUSED in self.output(log)
            if code and not refused:
                raise Failed(f"{self.url}: {log} ended with {code}: {self.output(log)[-1000:]}")
        if sorted(codes.values()) != [0, os.EX_TEMPFAIL]:
            raise Failed(f"{self.url}: neither of two simultaneous starts was refused: {codes}")
        winner = next(log for log, code in codes.items() if code == 0)
        resumed = re.search(r"continuing from step \d+", self.output(winner))
        if not resumed:
            raise Failed(f"{self.url}: did not resume: {self.output(winner)[-1000:]}")
        print(
            f"  killed; of two starts at once one was refused, and the other prints: {resumed[0]}"
        )

    def _kill_after_a_checkpoint(self) -> None:
        first = self.start("first", "train.py", *self.recipe)
        bucket, deadline = Bucket(self.run), time.monotonic() + PATIENCE
        while not any(name.endswith("manifest.json") for name in bucket.names("checkpoints/")):
            if first.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"{self.url}: no checkpoint: {self.output('first')[-1000:]}")
            time.sleep(0.1)
        first.send_signal(signal.SIGKILL)
        first.wait()

    def result(self) -> dict[str, object]:
        """Runs all commands; returns what must be the same everywhere."""
        self.do("prepare", "-m", "scripts.prepare", *self.recipe)
        self.train()
        evaluate = ("-m", "eval.line_retrieval", "--checkpoint", self.run, "--cases", CASES)
        answers = self.folder / "answers"
        short = ("--limit", "8", "--max-new-tokens", "4", "--compute-dtype", "float32")
        self.do("evaluate", *evaluate, *short, "--output", str(answers))
        exported = self.folder / "exported"
        self.do("export", "-m", "scripts.export_hf", self.run, str(exported))
        self.do("report", "-m", "eval.report", self.run, "--output", str(self.folder / "r.html"))
        print(self.do("status", "-m", "scripts.run_status", self.run), end="")
        return {
            "losses": self._losses(),
            "weights": hashlib.sha256((exported / "model.safetensors").read_bytes()).hexdigest(),
            "answers": (answers / "cases.jsonl").read_text(encoding="utf-8"),
        }

    def _losses(self) -> list[dict]:
        if in_bucket(self.run):
            logs, _ = logs_and_others(Bucket(self.run).read_all("metrics.jsonl/"))
            content = logs["metrics.jsonl"][1]
        else:
            content = pathlib.Path(self.run, "metrics.jsonl").read_bytes()
        rows = map(json.loads, content.splitlines())
        return list(map(small_run.without_measured, rows))


def main(argv: list[str] | None = None) -> int:
    """Runs the commands in each place; returns 1 if something failed or differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.buckets", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("stores", nargs="*", metavar="STORE", help="gs, s3; by default both")
    parser.add_argument("--steps", type=int, default=24, help="training steps (24)")
    parser.add_argument(
        "--mib", type=int, default=64, help="size of a checkpoint's parameters (64)"
    )
    args = parser.parse_args(argv)
    if wrong := [name for name in args.stores if name not in STORES]:
        parser.error(f"{wrong[0]} is not a store; gs and s3 are")
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = [*(args.stores or STORES)]
        for name in names:
            os.environ.update(stack.enter_context(STORES[name]()).environment)
        results = {}
        try:
            for name in ("disk", *names):
                print(f"{name}: {RECIPE}, {args.steps} steps", flush=True)
                results[name] = Place(name, folder, args.steps).result()
        except Failed as error:
            print(f"failed: {error}")
            return 1
        os.environ["LONGSTRIPE_CACHE"] = str(folder / "cache")
        print(f"\n{'checkpoint':12} {'MiB':>8} {'save s':>8} {'verify s':>8} {'restore s':>9}")
        for place in (str(folder / "stores"), *(f"{name}://bucket" for name in names)):
            figures = measure(place, args.mib)
            print(f"{place[:12]:12} " + " ".join(f"{value:8.2f}" for value in figures.values()))
    different = [
        f"{name}: {key}"
        for name in names
        for key, value in results[name].items()
        if value != results["disk"][key]
    ]
    print(f"weights {results['disk']['weights'][:12]}: " + (", ".join(different) or "all equal"))
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
