"""Host work that overlaps with the device's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def one_behind(results: Iterable[T]) -> Iterator[T]:
    """Yields the same results, each only once the next one has been requested.

    JAX returns arrays before the device has computed them. Whoever reads one waits for it; if each
    is read while the device computes the next one, the device never waits for the host to prepare
    a batch. Two results exist at a time.
    """
    waiting: list[T] = []
    for result in results:
        waiting.append(result)
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting
