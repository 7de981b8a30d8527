"""Which model the results.json of an evaluation is of, by what its `about` says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.manifest import MANIFEST, DamagedError, ForeignError, fingerprint


def evaluated(about: Mapping[str, Any]) -> str:
    """Returns the path or name of what was evaluated: the adapter where there is one, else the checkpoint."""
    return str(about.get("adapter") or about.get("checkpoint") or "a model without a name")


def is_of_checkpoint(about: Mapping[str, Any], checkpoint: Path) -> bool:
    """Returns whether the results are of this checkpoint; True too where they do not say of which."""
    weights = _weights(about)
    return not weights or weights in _fingerprints([checkpoint])


def is_of_run(about: Mapping[str, Any], run: Path) -> bool:
    """Returns whether the results are of a checkpoint of the run, also one that it no longer keeps, or of a model in its
    folder; True too where they do not say of which.

    Args:
      run: the run's folder, which may have moved since.
    """
    weights = _weights(about)
    if not weights or Path(evaluated(about)).expanduser().resolve().is_relative_to(run.resolve()):
        return True
    return weights in _fingerprints([path.parent for path in run.rglob(MANIFEST)])


def foreign_run(about: Mapping[str, Any], output: Path) -> Path | None:
    """Returns the run in whose folder `output` lies, if the results are not of it; None too where it lies in no run's."""
    for folder in (output.absolute(), *output.absolute().parents):
        if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
            return None if is_of_run(about, folder) else folder
    return None


def _weights(about: Mapping[str, Any]) -> str:
    """Returns the fingerprint of what was trained: of an adapter beside a base its own."""
    model = about.get("model")
    return model.rpartition("+")[2] if isinstance(model, str) else ""


def _fingerprints(checkpoints: list[Path]) -> set[str]:
    """Returns the fingerprints of those of the folders that are checkpoints."""
    known = set()
    for folder in checkpoints:
        try:
            known.add(fingerprint(folder))
        except (
            ForeignError,
            DamagedError,
        ):  # another kind of manifest.json, or one that nothing can be made from
            continue
    return known
