"""When a checkpoint is due by the clock, alike in all processes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from trainer.run import cluster

# Numbers the clocks, alike in every process: a stage of a curriculum counts its steps anew.
_clocks = itertools.count()


class SaveClock:
    """Says after which steps `checkpoint.minutes` have passed since the last save. Process 0's
    clock counts for all.

    Process 0 announces a step in JAX's key-value store before it begins that step. The loss is a
    sum over all processes, so none can finish a step that process 0 has not begun, and whoever
    finishes the announced one finds it announced. This takes a look into the store after every step
    where minutes are given, and nothing otherwise.
    """

    def __init__(self, minutes: float, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._now = 60 * minutes, now
        self._since = now()
        self._folder = f"longstripe/save/{next(_clocks)}"
        self._announced: int | None = None

    def saved(self) -> None:
        """Counts from now on; to be called whenever a checkpoint begins to be saved, for whatever
        reason."""
        self._since = self._now()

    def due(self, finished: int) -> bool:
        """Returns whether to save now, after `finished` steps. Every process calls this after every
        step."""
        if not self._seconds:
            return False
        is_over = self._now() - self._since >= self._seconds
        if cluster.processes() == 1:
            return is_over
        if cluster.process() != 0:
            return bool(cluster.client().key_value_dir_get(f"{self._folder}/{finished}/"))
        if self._announced == finished:
            return True
        if is_over:
            self._announced = finished + 1
            cluster.client().key_value_set(f"{self._folder}/{finished + 1}/due", "now")
        return False
