"""The reference of preference tuning: log-likelihoods of all completions under the initial model.

They are computed once, before the first step, and process 0 stores them next to the prepared data,
so no step needs a second model. An interrupted start continues where it stopped.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float, Float32

from data.errors import UserError
from data.pairs import PairBatch, PairLoader
from data.progress import ProgressBar
from data.untrusted_files import read_bytes

from .overlap import one_behind
from .run.cluster import first_then_others

SAVE_EVERY = 60.0
"""Seconds between writes of the results so far."""

_DIGEST_BYTES = 32  # a file is a SHA-256 followed by the float32 numbers it covers, two per pair

LogLikelihoods = Callable[[PairBatch], Float[jax.Array, "B D"]]
"""Returns the log-likelihood of each document in a batch, from this process's part; the same array
in all processes."""


def reference_log_likelihoods(
    loader: PairLoader,
    read: Callable[[int], PairBatch],
    compute: Callable[[], LogLikelihoods],
    path: Path,
    progress: bool,
    name: str,
) -> Float32[np.ndarray, "documents 2"]:
    """Returns the log-likelihoods of all pairs of a loader, reusing those in the file `path`.

    All processes call it and get the same. Only the file that process 0 sees counts: with data in a
    bucket, every machine has a folder of its own.

    Args:
      loader: of unweighted documents; its first epoch has each once.
      read: returns this process's part of a step's batch.
      compute: loads the model; not called if nothing is left to compute.
      path: the file; its name changes with the data, the model and the computation.
      progress: shows a progress bar.
      name: the reference's, for messages.

    Raises:
      UserError: a log-likelihood is not finite, so the pair's losses would not be either.
    """
    values = _of_first_process(path, len(loader.documents))
    pairs = _pairs_of_steps(loader)
    missing = [
        step for step, rows in enumerate(pairs) if np.isnan(values[np.concatenate(rows)]).any()
    ]
    if not missing:
        return values
    log_likelihoods, saved = compute(), time.monotonic()
    first = jax.process_index() == 0
    show = first and progress
    with ProgressBar("reference log-likelihoods", len(missing), "steps", show) as bar:
        results = one_behind((step, log_likelihoods(read(step))) for step in missing)
        for step, computed in results:
            _fill(values, pairs[step], np.asarray(computed), name)
            bar.advance()
            if first and time.monotonic() - saved > SAVE_EVERY:
                _write(path, values)
                saved = time.monotonic()
    if first:
        _write(path, values)
    return values


def _pairs_of_steps(loader: PairLoader) -> list[list[np.ndarray]]:
    """Returns the numbers of the pairs in each row of each step of the first epoch."""
    size = loader.batch_size
    return [
        [loader.row_pairs(row) for row in range(start, start + size)]
        for start in range(0, len(loader), size)
    ]


def _fill(values: np.ndarray, pairs: list[np.ndarray], computed: np.ndarray, name: str) -> None:
    """Writes a step's log-likelihoods to their pairs. Raises UserError unless they are finite."""
    for numbers, slots in zip(pairs, computed.reshape(len(pairs), -1, 2), strict=True):
        values[numbers] = slots[: len(numbers)]
        if not np.isfinite(values[numbers]).all():
            raise UserError(
                f"{name}: gives a completion a non-finite log-likelihood, so it cannot be the "
                "reference; another model, or model.compute_dtype float32, would work"
            )


def _of_first_process(path: Path, count: int) -> Float32[np.ndarray, "documents 2"]:
    """Returns the content of process 0's file, in all processes.

    If they began with different contents, some would enter the computation of a batch, a collective
    one, without the others, and wait for ever.
    """
    unknown = np.full((count, 2), np.nan, np.float32)
    values = first_then_others(
        lambda message: _stored(path, count) if message is None else unknown, lambda _: ""
    )
    # A copy: what the devices return cannot be written to.
    return np.array(multihost_utils.broadcast_one_to_all(values))


def _stored(path: Path, count: int) -> Float32[np.ndarray, "documents 2"]:
    """Returns a file's content; unknown numbers are NaN."""
    if path.exists():
        content = read_bytes(path, path.parent)
        digest, array = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if digest == hashlib.sha256(array).digest() and len(array) == 8 * count:
            return np.frombuffer(array, "<f4").reshape(count, 2).copy()
        print(f"warning: {path}: is damaged and recomputed", file=sys.stderr)
    return np.full((count, 2), np.nan, np.float32)


def _write(path: Path, values: np.ndarray) -> None:
    """Replaces the file atomically: a reader finds the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another run with the same data and model may write the same file.
    scratch = path.with_suffix(f".{secrets.token_hex(4)}")
    array = values.astype("<f4").tobytes()
    try:
        scratch.write_bytes(hashlib.sha256(array).digest() + array)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
