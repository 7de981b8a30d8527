"""What all schedules are: a frozen dataclass of options, which knows how many ranks it can serve."""
from __future__ import annotations


class Schedule:
    """Base of the schedules, whose contract is told in `__init__.py`."""

    def check(self, size: int) -> None:
        """ValueError, in one line, where it cannot serve `size` ranks; most serve any."""

    def _divides(self, option: str, size: int) -> None:
        """ValueError where this option, if it is not 0, does not divide `size`."""
        found = getattr(self, option)
        if found and size % found:
            good = [n for n in range(1, size + 1) if size % n == 0]
            raise ValueError(f"{self._named(option)}: {found} does not divide {size} sequence shards; those do: {good}")

    def _named(self, option: str) -> str:
        """As in a recipe: a schedule is called like its file."""
        return f"{type(self).__module__.rpartition('.')[2]}.{option}"
