"""A run's record of its local checkpoints, RUN/local.json.

    run         the run's identifier: the name of its folder in checkpoint.local
    step        the newest step complete there; null if there is none
    begun       the newest step that may be complete there, written before its parts are
    location    the run's folder, which tells a copied run from its original
    inode       the folder's, which a renamed folder keeps; none in a bucket

Process 0 writes it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from data.untrusted_files import parse_json, read_bytes
from trainer.run.bucket import in_bucket

RECORD = "local.json"
_MAX_BYTES = 1 << 16  # the location may be long
_RUN = re.compile(r"[0-9a-f]{16}")  # also a folder name


def read_record(folder: Path) -> dict[str, Any]:
    """Returns what `local.json` in a run's folder says; empty if it is missing or not ours."""
    try:
        record = parse_json(read_bytes(folder / RECORD, folder, _MAX_BYTES))
    except (OSError, ValueError):
        return {}
    known = isinstance(record, dict) and _RUN.fullmatch(str(record.get("run")))
    return record if known else {}


def own_record(folder: Path, location: str) -> dict[str, Any]:
    """Returns `read_record` unless the folder is a copy of another run's folder.

    A copy has only `copy_of`, the original's location; and if nothing is there any more, so that it
    may be the original itself, moved, also `original_run` and its new `location`.

    A copy must not use the original's local checkpoints: it would later delete them. A folder is
    the original's if its path or its inode is, since a rename changes the path, and some file
    systems number their files anew at each mount. Device numbers would differ between hosts.

    Args:
      folder: of the run; for one in a bucket, of its small files.
      location: of the run.
    """
    record = read_record(folder)
    if "location" not in record:  # none, or an earlier version's
        return record
    place = place_of(folder, location)
    if any(record.get(name) == value for name, value in place.items()):
        return record
    original = str(record["location"])
    if in_bucket(original) or os.path.exists(original):
        return {"copy_of": original}
    return {"copy_of": original, "original_run": record["run"], "location": place["location"]}


def place_of(folder: Path, location: str) -> dict[str, Any]:
    """Returns the record's `location` and `inode` of a run in this folder."""
    if in_bucket(location):
        return {"location": location}
    return {"location": str(folder.resolve()), "inode": folder.stat().st_ino}


def newest_local_step(folder: Path, location: str) -> int:
    """Returns the newest step that the run may have a local checkpoint of; 0 if there is none."""
    record = own_record(folder, location)
    steps = (record.get("step"), record.get("begun"))
    return max((step for step in steps if isinstance(step, int)), default=0)
