"""Checks of numbers in a model's configuration."""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

import numpy as np

LARGEST, SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
MOST = 2**31 - 1  # devices use int32


def is_int(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number; True and False do not count."""
    return isinstance(value, int) and not isinstance(value, bool)


def require_bool(name: str, value: Any) -> None:
    """Raises ValueError, naming the field, unless the value is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: {value!r} is not true or false")


def require_int(name: str, value: Any, at_least: int) -> None:
    """Raises ValueError, naming the field, unless the value is a whole number of at least
    `at_least` within int32."""
    if not is_int(value) or value < at_least:
        raise ValueError(f"{name}: {value!r} is not a whole number of at least {at_least}")
    if value > MOST:
        raise ValueError(f"{name}: {value!r} is not a whole number of at most {MOST:,}")


def require_number(name: str, value: Any, above: float, or_equal: bool = False) -> None:
    """Raises ValueError, naming the field, unless float32 holds the value and it is greater than
    `above`, or, with `or_equal`, at least `above`."""
    good = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )
    if not good or value < above or (value == above and not or_equal):
        raise ValueError(
            f"{name}: {value!r} is not a number {'of at least' if or_equal else 'above'} {above}"
        )
    if abs(value) > LARGEST or 0 < abs(value) < SMALLEST:
        raise ValueError(
            f"{name}: {value!r} is not a number that float32 holds; one from {SMALLEST:.6g} "
            f"to {LARGEST:.6g}, would work"
        )


def as_float(name: str, value: Any, or_equal: bool = False) -> float:
    """Returns a number above 0 as a float; raises ValueError as `require_number` does."""
    require_number(name, value, above=0, or_equal=or_equal)
    return float(value)
