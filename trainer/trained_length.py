"""The length of the contexts that a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.paths import expanded
from model.lengths import supported_length

from .adapted_source import AdaptedSource, CheckpointAdapter
from .checkpoint.commit import CHECKPOINTS
from .huggingface.assets import read_recipe
from .run.directory import EARLIER_STAGES
from .source_kinds import CheckpointSource, ModelSource


def trained_length(source: ModelSource, context_length: int = 0) -> int:
    """Returns the tokens of a model's longest contexts in training.

    They are what a pretrained model's positions are made for, and the `data.context_length` of the
    longest stage of a model from scratch, whose positions may reach further. If the folder of a
    stage before a checkpoint's is gone, the model counts as pretrained.

    Args:
      context_length: of a run that trains this model.
    """
    longest = _from_scratch(source)
    if longest is not None:
        return max(longest, context_length)
    return supported_length(source.config) or source.config.max_position_embeddings


def _from_scratch(source: ModelSource) -> int | None:
    """Returns the longest context of a model from scratch, 0 if it is not trained yet; None for a
    pretrained one."""
    if isinstance(source, AdaptedSource):
        longest = _from_scratch(source.base)
        if longest is None or not isinstance(source.adapter, CheckpointAdapter):
            return longest
        return max(longest, _context_length(_checkpoint_recipe(source.adapter.folder)))
    if isinstance(source, CheckpointSource):
        return _longest_context(source.folder)
    return None if source.is_pretrained else 0


def _longest_context(checkpoint: Path) -> int | None:
    """Returns the longest context of a checkpoint's run and of those it continues; None if the
    first began with a pretrained model, or is gone."""
    recipe, run = _checkpoint_recipe(checkpoint), _run_of(checkpoint)
    longest, seen = 0, {run}
    while recipe:
        longest = max(longest, _context_length(recipe))
        path = recipe.get("model", {}).get("path")
        if not path:
            return longest
        run = _run_before(path, run)
        if run in seen:
            return None
        seen.add(run)
        recipe = read_recipe(run / "config.yaml", run)
    return None


def _checkpoint_recipe(checkpoint: Path) -> dict[str, Any]:
    return read_recipe(checkpoint / "assets" / "run.yaml", checkpoint / "assets")


def _context_length(recipe: Mapping[str, Any]) -> int:
    return recipe.get("data", {}).get("context_length") or 0


def _run_before(path: str, run: Path) -> Path:
    """Returns the folder of the run whose model another run continues.

    Args:
      path: its recipe's `model.path`; run: its folder, which may have moved with its stages.
    """
    before = _run_of(expanded(path))
    if before.parent.name == EARLIER_STAGES:
        for folder in (run / EARLIER_STAGES, run.parent):
            if (folder / before.name / "config.yaml").is_file():
                return folder / before.name
    return before


def _run_of(path: Path) -> Path:
    """Returns the run's folder of a checkpoint, or of RUN/best; other paths unchanged."""
    if path.parent.name == CHECKPOINTS:
        return path.parent.parent
    return path.parent if path.name == "best" else path
