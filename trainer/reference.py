"""The reference of preference tuning: log-likelihoods of all completions under the model that
training begins with.

They are computed once, before the first step, and stored next to the prepared data: no step then
needs a second model. A start that was interrupted goes on where it was.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float, Float32

from data.errors import UserError
from data.pairs import PairBatch, PairLoader
from data.progress import ProgressBar
from data.within import read_bytes

from .run.cluster import first_then_others

SAVE_EVERY = 60.0
"""Seconds between two writes of what was computed so far."""

_DIGEST_BYTES = (
    32  # a file begins with the SHA-256 of the float32 numbers that follow, two for each pair
)

LogLikelihoods = Callable[[PairBatch], Float[np.ndarray, "B D"]]
"""Returns the log-likelihood of each document of a batch of which this process made its part."""


def reference_log_likelihoods(
    loader: PairLoader,
    read: Callable[[int], PairBatch],
    compute: Callable[[], LogLikelihoods],
    path: Path,
    progress: bool,
    name: str,
) -> Float32[np.ndarray, "documents 2"]:
    """Returns the log-likelihoods of all pairs of a loader, from the file `path` as far as it has
    them.

    All processes call it, and all must see the file.

    Args:
      loader: of unweighted documents, whose first epoch has each once.
      read: returns this process's part of a step's batch.
      compute: loads the model; not called where nothing is to be computed.
      path: the file, whose name changes with the data, the model and how it computes.
      progress: shows a progress bar.
      name: the reference's, for messages.

    Raises:
      UserError: a log-likelihood is not finite, of which all losses of the pair would not be.
    """
    count, steps = len(loader.documents), -(-len(loader) // loader.batch_size)
    values = first_then_others(lambda _: _stored(path, count), lambda _: "")
    numbers = [
        [
            loader.row_pairs(row)
            for row in range(step * loader.batch_size, (step + 1) * loader.batch_size)
        ]
        for step in range(steps)
    ]
    missing = [
        step for step in range(steps) if np.isnan(values[np.concatenate(numbers[step])]).any()
    ]
    if not missing:
        return values
    log_likelihoods, saved = compute(), time.monotonic()
    first = jax.process_index() == 0
    show = first and progress
    with ProgressBar("reference log-likelihoods", len(missing), "steps", show) as bar:
        for step in missing:
            computed = log_likelihoods(read(step)).reshape(loader.batch_size, -1, 2)
            for pairs, places in zip(numbers[step], computed, strict=True):
                values[pairs] = places[: len(pairs)]
                if not np.isfinite(values[pairs]).all():
                    raise UserError(
                        f"{name}: gives a completion a log-likelihood that is not finite, so that "
                        "it cannot be the reference; another model, or model.compute_dtype "
                        "float32, would work"
                    )
            bar.advance()
            if first and time.monotonic() - saved > SAVE_EVERY:
                _write(path, values)
                saved = time.monotonic()
    if first:
        _write(path, values)
    return values


def _stored(path: Path, count: int) -> Float32[np.ndarray, "documents 2"]:
    """Returns what a file holds; numbers that are not known yet are not numbers."""
    if path.exists():
        content = read_bytes(path, path.parent)
        digest, array = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if digest == hashlib.sha256(array).digest() and len(array) == 8 * count:
            return np.frombuffer(array, "<f4").reshape(count, 2).copy()
        print(f"warning: {path}: is damaged and is made again", file=sys.stderr)
    return np.full((count, 2), np.nan, np.float32)


def _write(path: Path, values: np.ndarray) -> None:
    """Replaces the file as a whole, so that a reader finds the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    array = values.astype("<f4").tobytes()
    temporary.write_bytes(hashlib.sha256(array).digest() + array)
    temporary.replace(path)
