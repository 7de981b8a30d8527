"""Checks that a recipe's numbers are valid float32 and int32 on the devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from model.number_checks import LARGEST, MOST, SMALLEST

SEEDS = 2**32 - 1
# A step adds 1 minus a decay, and divides by 1 minus a share: neither may be 0.
BELOW = {
    "optimizer.beta1": 1.0,
    "optimizer.beta2": 1.0,
    "optimizer.average_decay": 1.0,
    "adapter.dropout": 1.0,
    "preference.label_smoothing": 0.5,
}


def refusal(config: Any) -> str | None:
    """Returns an error about the first number the devices cannot represent, with what would work;
    None if all can.
    """
    for field, number in _numbers(config, ""):
        needs = (
            _float_needs(field, number) if isinstance(number, float) else _int_needs(field, number)
        )
        if needs:
            return f"{field}: found {number!r}, needs {needs}"
    return None


def _float_needs(field: str, number: float) -> str | None:
    if not math.isfinite(number) or abs(number) > LARGEST:
        return f"a number of at most {LARGEST:.6g}, which float32 holds"
    if 0 < abs(number) < SMALLEST:
        return (
            f"0, or a number of at least {SMALLEST:.6g}: in float32 this one is 0, or loses its "
            "digits"
        )
    limit = BELOW.get(field)
    if limit is not None and np.float32(number) == limit:
        return f"a number below {limit:g} in float32, such as {limit - 1e-4:g}"
    return None


def _int_needs(field: str, number: int) -> str | None:
    most = SEEDS if field.endswith("seed") else MOST
    return f"a whole number of at most {most:,}" if abs(number) > most else None


def _numbers(value: Any, field: str) -> Iterator[tuple[str, int | float]]:
    """Yields each number in a configuration with its field's name."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield field, value
    elif dataclasses.is_dataclass(value):
        for part in dataclasses.fields(value):
            yield from _numbers(getattr(value, part.name), f"{field}.{part.name}".lstrip("."))
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, f"{field}.{name}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _numbers(inner, f"{field}[{number}]")
