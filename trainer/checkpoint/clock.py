"""When a checkpoint is due by the clock; all processes agree."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from trainer.run import cluster

# Numbers the clocks, equally in every process: each stage of a curriculum counts steps from 0.
_clocks = itertools.count()


class SaveClock:
    """Tells after which steps `checkpoint.minutes` have passed since the last save, by process 0's
    clock.

    Process 0 announces a step in JAX's key-value store before it begins that step. The loss is a
    sum over all processes, so none can finish a step that process 0 has not begun, and all find the
    announcement when they finish the announced step. This costs a look into the store after every
    step if minutes are set, and nothing otherwise.
    """

    def __init__(self, minutes: float, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._now = 60 * minutes, now
        self._since = now()
        self._folder = f"longstripe/save/{next(_clocks)}"
        self._announced: int | None = None

    def saved(self) -> None:
        """Restarts the clock; call it whenever a save begins, for whatever reason."""
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
