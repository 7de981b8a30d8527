"""Reads the logs of runs and evaluations."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, TypeGuard

from data.untrusted_files import parse_json
from trainer.run.logs import read_log


def read_rows(path: Path, folder: Path) -> list[dict[str, Any]]:
    """Returns the objects in a JSONL file, skipping invalid lines, as after a crash.

    Args:
      path: the file, or of a run copied from a bucket the folder of its parts.
      folder: that must contain it, as in `data.untrusted_files.check_within`.
    """
    rows = []
    for line in read_log(path, folder).decode("utf-8", "replace").splitlines():
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def read_steps(path: Path, folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of `read_rows` that have a step's number."""
    return [
        row
        for row in read_rows(path, folder)
        if is_number(row.get("step")) and math.isfinite(row["step"])
    ]


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a JSON value is a number, in float range if whole."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, float)
