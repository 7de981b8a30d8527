"""A chat template's work and output so far."""

import threading
from typing import Any

from data.templates.errors import TemplateError


class Meter(threading.local):
    """Counts the work and the output of the template that is rendered in this thread."""

    left = limit = 0
    """Steps left, and the initial number."""
    printed = 0
    """Number of characters."""
    generated: list[tuple[int, int]]
    """Ranges of the text in {% generation %} blocks."""

    def spend(self, steps: int) -> None:
        """Counts steps of work; raises TemplateError if none are left."""
        self.left -= steps
        if self.left < 0:
            raise TemplateError(
                "the chat template does not end: too many iterations, or texts too long (more "
                f"than {self.limit:,} steps of work)"
            )


meter = Meter()


def walk(value: Any) -> None:
    """Counts a step for every value in a nested one that Python is about to visit."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            meter.spend(1 + len(value) // 100)
        elif isinstance(value, list | tuple | range):
            meter.spend(1 + len(value))
            if not isinstance(value, range):
                waiting.extend(value)
        elif isinstance(value, dict):
            meter.spend(1 + 2 * len(value))
            waiting.extend(value)
            waiting.extend(value.values())
