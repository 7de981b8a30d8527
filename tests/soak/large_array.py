"""Prepares one large .npy of tokens in a separate process, and prints its time and memory: python
-m tests.soak.large_array [--tokens 400000000]."""

import argparse
import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
import yaml

from scripts.benchmarks.results import ROOT
from tests import small_run
from tests.soak.hour import sample

TOKENS = 400_000_000  # of int32: 1.6 GB
CONTEXT = 1 << 17  # more than a document
SAMPLE_SECONDS = 0.2


def write(path: pathlib.Path, tokens: int) -> None:
    """Writes documents of 100,000 tokens, one per row, without holding them all."""
    rows, length = max(1, tokens // 100_000), min(tokens, 100_000)
    array = np.lib.format.open_memmap(path, "w+", np.int32, (rows, length))
    for number, row in enumerate(array):
        row[:] = np.arange(number, number + length) % 1000
    array.flush()


def prepare(folder: pathlib.Path, array: pathlib.Path) -> tuple[float, float, float]:
    """Returns the seconds, the CPU seconds and the peak allocated MiB of scripts.prepare."""
    recipe = small_run.recipe(folder, ROOT)
    fields = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    fields["model"]["overrides"]["max_position_embeddings"] = CONTEXT
    fields["data"] |= {
        "sources": [{"path": str(array), "format": "tokens"}],
        "held_out_path": None,
        "held_out_fraction": 0.0,
        "context_length": CONTEXT,
    }
    recipe.write_text(yaml.safe_dump(fields), encoding="utf-8")
    command = [sys.executable, "-m", "scripts.prepare", "--config", str(recipe)]
    start, most = time.monotonic(), 0.0
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        with contextlib.suppress(KeyError):  # it has just ended
            most = max(most, sample(process.pid)["memory_mib"])
        time.sleep(SAMPLE_SECONDS)
    if status:
        raise SystemExit(f"scripts.prepare ended with {os.waitstatus_to_exitcode(status)}")
    return time.monotonic() - start, usage.ru_utime + usage.ru_stime, most


def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.large_array", description=__doc__)
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help="tokens in the array (400 million)"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        write(folder / "tokens.npy", args.tokens)
        size = (folder / "tokens.npy").stat().st_size
        seconds, cpu, most = prepare(folder, folder / "tokens.npy")
    print(
        f"{size / 1e9:.2f} GB: {seconds:.0f} s, {cpu:.0f} s of CPU, {most:,.0f} MiB allocated at peak"
    )


if __name__ == "__main__":
    main()
