"""The first batch after a cold start, with prepared data in a store on the loopback and none on
this machine: python -m tests.soak.cold_start.

Once with a store that answers, and once with one that refuses every fifth request.
"""

import argparse
import hashlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

from data import paths
from data.encode import EncodingRules
from data.loader import Loader
from data.prepare import prepare
from data.prepared import Prepared
from data.sources import Source, Sources
from data.tokenizer import Tokenizer
from scripts.benchmarks.results import ROOT, renew, row
from tests import gcs_server

TOKENS = 1_000_000_000
CONTEXT_LENGTH, ROWS, VOCABULARY = 8192, 8, 1000
GOAL = 60.0  # seconds for a billion tokens, set before any was measured
REFUSED_EVERY = 5  # requests
PATIENCE = 1800  # seconds


def write_tokens(path: pathlib.Path, tokens: int) -> None:
    """Writes an array of random ids, part by part."""
    array = np.lib.format.open_memmap(path, "w+", np.uint16, (tokens,))
    rng = np.random.default_rng(0)
    for start in range(0, tokens, 1 << 24):
        part = array[start : start + (1 << 24)]
        part[:] = rng.integers(0, VOCABULARY, len(part))
    array.flush()


def opened(array: pathlib.Path, store: str) -> Prepared:
    """Prepares the array in a store, or opens the prepared one."""
    tokenizer = Tokenizer.load(ROOT / "data/fixtures/tiny_tokenizer")
    source = Source(str(array), "tokens")
    return prepare(
        Sources((source,)), tokenizer, EncodingRules(CONTEXT_LENGTH), store, progress=False
    )


def first_batch(array: pathlib.Path, store: str, started: float) -> dict:
    """Reads the first batch in this process.

    Args:
      array: the source.
      store: the folder of prepared data.
      started: when the process was started, by `time.monotonic`.

    Returns:
      imported, opened, batch: seconds from the start until each was done.
      sha256: a hash of the batch.
      copied: bytes of shards on this machine's disk by then.
    """
    imported = time.monotonic() - started
    prepared = opened(array, store)
    opened_after = time.monotonic() - started
    batch = next(Loader(prepared, CONTEXT_LENGTH, ROWS, seed=0).batches())
    seconds = time.monotonic() - started
    shards = [*paths.cache_folder("shards").glob("*/documents/[!.]*.array_record-*")]
    return {
        "imported": imported,
        "opened": opened_after,
        "batch": seconds,
        "sha256": digest(batch),
        "copied": sum(path.stat().st_size for path in shards),
    }


def digest(batch: dict) -> str:
    """Returns a hash of a batch."""
    return hashlib.sha256(
        b"".join(name.encode() + array.tobytes() for name, array in sorted(batch.items()))
    ).hexdigest()


def measure(folder: pathlib.Path, tokens: int) -> dict:
    """Measures both cold starts.

    Returns:
      whole, refusing: the results of `first_batch` with a store that answers and one that refuses.
      sha256: the hash of the batch where the data were prepared.
      requests, refused: how many requests the refusing store received, and refused.
    """
    array = folder / "tokens.npy"
    write_tokens(array, tokens)
    with gcs_server.Server() as server:
        os.environ.update(server.environment | {"LONGSTRIPE_CACHE": str(folder / "first")})
        store, counted = "gs://bucket/prepared", itertools.count(1)
        prepared = opened(array, store)
        assert prepared.train.cache is None, "the first machine has all of it"
        expected = digest(Loader(prepared, CONTEXT_LENGTH, ROWS, seed=0).batch(0))
        whole = _cold(folder, "whole", array, store)
        server.store.refused = lambda *_: 503 if next(counted) % REFUSED_EVERY == 0 else None
        refusing = _cold(folder, "refusing", array, store)
    requests = next(counted) - 1
    return {
        "whole": whole,
        "refusing": refusing,
        "sha256": expected,
        "requests": requests,
        "refused": requests // REFUSED_EVERY,
    }


def _cold(folder: pathlib.Path, name: str, array: pathlib.Path, store: str) -> dict:
    """Returns the result of `first_batch` in a new process with an empty cache."""
    process = subprocess.run(
        [sys.executable, "-m", __spec__.name, "--open", str(array), store, str(time.monotonic())],
        cwd=ROOT,
        env=os.environ | {"LONGSTRIPE_CACHE": str(folder / name)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    return json.loads(process.stdout.splitlines()[-1])


def result_rows(measured: dict, tokens: int) -> dict[str, dict[str, str]]:
    """Returns the rows of docs/results/cold_start.json."""
    whole, refusing = measured["whole"], measured["refusing"]
    same = refusing["sha256"] == measured["sha256"] == whole["sha256"]
    return {
        "first": row(
            f"{tokens / 1e9:g} billion tokens in a store on the same machine: seconds from the start "
            "of a process to its first batch",
            f"{whole['batch']:.1f} s: imports {whole['imported']:.1f}, opening "
            f"{whole['opened'] - whole['imported']:.1f}, {ROWS} rows of {CONTEXT_LENGTH:,} tokens "
            f"{whole['batch'] - whole['opened']:.1f}, {whole['copied'] / 1e9:.2f} GB copied",
            f"{GOAL:.0f} s",
            whole["batch"] <= GOAL,
        ),
        "refusing": row(
            "the same from a store that refuses one request in five",
            f"{'the same batch' if same else 'ANOTHER BATCH'} after {refusing['batch']:.1f} s; "
            f"{measured['refused']} of {measured['requests']} requests refused",
            "the same batch",
            same,
        ),
    }


def main(argv: list[str] | None = None) -> int:
    """Measures and records docs/results/cold_start.json."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.cold_start",
        description=__doc__.splitlines()[0],
        allow_abbrev=False,
    )
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help=f"tokens in the store ({TOKENS:,})"
    )
    parser.add_argument("--open", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.open:
        array, store, started = args.open
        print(json.dumps(first_batch(pathlib.Path(array), store, float(started))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(pathlib.Path(folder), args.tokens)
    rows = result_rows(measured, args.tokens)
    for made in rows.values():
        print(f"{made['what']}: {made['found']}")
    renew("cold_start", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
