"""Identifies the model of an evaluation's results.json by its `about`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.manifest import MANIFEST, DamagedError, ForeignError, fingerprint


def evaluated(about: Mapping[str, Any]) -> str:
    """Returns the path or name of the evaluated model: the adapter if any, else the checkpoint."""
    return str(about.get("adapter") or about.get("checkpoint") or "a model without a name")


def is_of_checkpoint(about: Mapping[str, Any], checkpoint: Path) -> bool:
    """Returns whether the results are of this checkpoint; also True if they do not say."""
    weights = _weights(about)
    return not weights or weights in _fingerprints([checkpoint])


def is_of_run(about: Mapping[str, Any], run: Path) -> bool:
    """Returns whether the results are of the run's checkpoints or of a model in its folder.

    Deleted checkpoints count. It is also True if the results do not say.

    Args:
      run: the run's folder, which may have moved since.
    """
    weights = _weights(about)
    if not weights or _is_inside(evaluated(about), run):
        return True
    return weights in _fingerprints([path.parent for path in run.rglob(MANIFEST)])


def _is_inside(name: str, run: Path) -> bool:
    try:
        return Path(name).expanduser().resolve().is_relative_to(run.resolve())
    except (OSError, ValueError, RuntimeError):  # not a path, or of a user this machine lacks
        return False


def foreign_run(about: Mapping[str, Any], output: Path) -> Path | None:
    """Returns the run whose folder contains `output`, if the results are not of that run."""
    for folder in (output.absolute(), *output.absolute().parents):
        if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
            return None if is_of_run(about, folder) else folder
    return None


def _weights(about: Mapping[str, Any]) -> str:
    """Returns the fingerprint of the trained part: the adapter's if there is one."""
    model = about.get("model")
    return model.rpartition("+")[2] if isinstance(model, str) else ""


def _fingerprints(checkpoints: list[Path]) -> set[str]:
    """Returns the fingerprints of the checkpoints among the folders."""
    known = set()
    for folder in checkpoints:
        try:
            known.add(fingerprint(folder))
        except (ForeignError, DamagedError):  # another kind of manifest.json, or an unreadable one
            continue
    return known
