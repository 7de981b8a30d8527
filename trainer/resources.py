"""What a start of a run holds until it ends: the lock, the checkpoints and the watchdog."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from jax.sharding import Mesh

from .checkpoint.local_tier import LocalTier
from .checkpoint.store import CheckpointStore
from .config.schema import RunConfig
from .run.watchdog import Watchdog


class Resources(NamedTuple):
    """What a start holds until it ends.

    Attributes:
      lock: receives the lock of the run's folder once the start claims it.
      store: the checkpoints in the run's folder.
      watchdog: ends the run if it stalls.
      local: the checkpoints on the hosts; None without `checkpoint.local`.
    """

    lock: contextlib.ExitStack
    store: CheckpointStore
    watchdog: Watchdog
    local: LocalTier | None


@contextlib.contextmanager
def open_resources(config: RunConfig, mesh: Mesh) -> Iterator[Resources]:
    """Opens a start's resources for the context, and releases them in the reverse order.

    The lock is released last: closing the store waits for a save to finish.
    """
    with (
        contextlib.ExitStack() as lock,
        CheckpointStore(config.location, keep=config.checkpoint.keep) as store,
        contextlib.closing(Watchdog(config.distributed)) as watchdog,
        _local_tier(config, mesh) as local,
    ):
        yield Resources(lock, store, watchdog, local)


@contextlib.contextmanager
def _local_tier(config: RunConfig, mesh: Mesh) -> Iterator[LocalTier | None]:
    """Opens the checkpoints on the hosts, if the configuration has any."""
    if not config.checkpoint.local:
        yield None
        return
    tier = LocalTier(config.checkpoint.local, config.folder, config.location, mesh)
    with contextlib.closing(tier):
        yield tier
