"""The description of a folder of collected episodes: collected.json next to the buffer."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.folders import replacing
from data.untrusted_files import read_json

from .tasks import Task


def describe(
    task: Task, seed: int, action_repeat: int, packages: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the common description of collected folders, with the versions of the simulator and
    `packages`."""
    names = ("dm_control", "mujoco", "numpy", *packages)
    return {
        "collected with": "dm_control",
        "task": task.name,
        "seed": seed,
        "action_repeat": action_repeat,
        "versions": {name: importlib.metadata.version(name) for name in names},
    }


def claim(path: Path, description: dict[str, Any]) -> None:
    """Writes or checks a folder's description; only the number of episodes may grow.

    Raises:
      UserError: it was begun with other options, or is damaged.
    """
    begun = _begun(path) if os.path.lexists(path) else description
    different = [
        name for name in description if name != "episodes" and begun.get(name) != description[name]
    ]
    if different:
        name = different[0]
        raise UserError(
            f"{path}: was begun with {name} {begun.get(name)}, now {description[name]}; the same "
            "options, or another --output, would work"
        )
    [(policy, count)] = description["episodes"].items()
    if path.exists() and begun["episodes"].get(policy, 0) >= count:
        return
    begun["episodes"] = begun["episodes"] | {policy: count}
    _write(path, begun)


def _begun(path: Path) -> dict[str, Any]:
    try:
        begun = read_json(path, path.parent)
        is_whole = isinstance(begun, dict) and isinstance(begun.get("episodes"), dict)
        problem = None if is_whole else "does not list episodes"
    except ValueError:
        problem = "is not JSON"
    if problem:
        raise UserError(
            f"{path}: {problem}, so the folder's content is unknown; another --output would work"
        )
    return begun


def stored_episodes(folder: Path, count: int, state: Path) -> list[Path]:
    """Returns the files of the first `count` episodes, from which `state` has learned.

    Raises:
      UserError: one is missing.
    """
    files = {int(path.stem.split("_")[1]): path for path in folder.glob("collected_*_*.npz")}
    if missing := sorted(set(range(count)) - set(files)):
        raise UserError(
            f"{folder}: episode {missing[0]} is missing, and {len(missing) - 1} more; remove "
            f"{state}, and the same command plays all of them again"
        )
    return [files[number] for number in range(count)]


def record(path: Path, **fields: Any) -> None:
    """Adds fields to a folder's description."""
    _write(path, read_json(path, path.parent) | fields)


def _write(path: Path, description: dict[str, Any]) -> None:
    with replacing(path) as scratch:
        scratch.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
