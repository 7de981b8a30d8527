"""What all schedules are: a frozen dataclass of options that have been checked, and that knows how many ranks it can serve."""
from __future__ import annotations

import dataclasses

# An option's declared type: what it may be, and how a recipe's reader is told. (Of Python's ints the truth values are some.)
KINDS = {
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (lambda value: type(value) is int and value >= 0, "a whole number; 0 leaves it to the schedule"),
    "Schedule": (lambda value: isinstance(value, Schedule), "a schedule"),
}


class Schedule:
    """Base of the schedules, whose contract is told in `__init__.py`.

    Raises:
      ValueError: an option of another type than its own, or a negative number.
    """

    def __post_init__(self):
        for option in dataclasses.fields(self):
            value, (fits, needed) = getattr(self, option.name), KINDS[option.type]
            if not fits(value):
                raise ValueError(f"{self._named(option.name)}: found {value!r}; needs {needed}")

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
