"""Reads the arrays of one checkpoint's folder onto shardings, after comparing names, dtypes and
shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from data.untrusted_files import parse_json
from model.config import TransformerConfig
from model.padding import fits
from model.parameter_declarations import unpadded_shapes
from trainer.checkpoint.arrays import read_arrays, stored_shapes
from trainer.checkpoint.commit import Files, orbax_reaches
from trainer.checkpoint.manifest import ForeignError, read_manifest
from trainer.checkpoint.saving import flatten

_STEP = re.compile(r"\d+")


@dataclass(frozen=True)
class Restored:
    """A restored checkpoint.

    Attributes:
      step: finished optimizer steps; None outside a run's folder.
      model: parameter name -> array.
      optimizer: the optimizer's state; None if not requested.
      data: the item `data`; None if the checkpoint has none.
      assets: a folder inside the checkpoint; copy files that must outlive it.
    """

    step: int | None
    model: dict[str, jax.Array]
    optimizer: Any
    data: dict[str, Any] | None
    assets: Path


def restore_folder(
    folder: Path, abstract_model: Mapping[str, Any], abstract_optimizer: Any = None
) -> Restored:
    """`restore` of the verified checkpoint in a folder, local or in a bucket."""
    model = restore_item(folder, "model", dict(abstract_model))
    optimizer = None
    if abstract_optimizer is not None:
        flat = restore_item(folder, "optimizer", flatten(abstract_optimizer))
        structure = jax.tree_util.tree_structure(abstract_optimizer)
        optimizer = jax.tree_util.tree_unflatten(structure, list(flat.values()))
    step = int(folder.name) if _STEP.fullmatch(folder.name) else None
    return Restored(step, model, optimizer, data_of(folder), folder / "assets")


def data_of(folder: Path) -> dict[str, Any] | None:
    if "data" not in read_manifest(folder)["items"]:
        return None
    return parse_json(Files(folder).read("data/data.json"))


def restore_item(folder: Path, item: str, abstract: dict[str, Any]) -> dict[str, Any]:
    """The arrays of one Orbax item, in the order of `abstract`."""
    _check_arrays(folder, item, abstract)
    if not orbax_reaches(folder):
        return read_arrays(folder, item, abstract)
    arguments = {}
    for name, leaf in abstract.items():
        sharding = getattr(leaf, "sharding", None)
        arguments[name] = (
            ocp.RestoreArgs(restore_type=np.ndarray)
            if sharding is None
            else ocp.ArrayRestoreArgs(
                sharding=sharding, global_shape=tuple(leaf.shape), dtype=leaf.dtype, strict=False
            )
        )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arrays = checkpointer.restore(
            folder / item,
            args=ocp.args.PyTreeRestore(item=dict.fromkeys(abstract, 0), restore_args=arguments),
        )
    return {name: arrays[name] for name in abstract}


def _check_arrays(folder: Path, item: str, abstract: dict[str, Any]) -> None:
    """Raises ValueError for the first array whose name, dtype or shape (except padding) differs in
    the checkpoint.

    Orbax itself would silently cast to another dtype, and might cut or pad another shape.
    """
    stored = stored_item(folder, item)
    kind, advice = "parameter", ""
    if item == "optimizer":
        kind = "optimizer state"
        advice = "; finish the run with the version and settings that began it, or begin a new one"
    for name, leaf in abstract.items():
        if name not in stored:
            raise ValueError(f"{folder}: {kind} {name} is not in the checkpoint{advice}")
        array = stored[name]
        if array.dtype != leaf.dtype or not _fits(
            folder, name, tuple(array.shape), tuple(np.shape(leaf))
        ):
            raise ValueError(
                f"{folder}: {kind} {name} is {array.dtype}{list(array.shape)} in the checkpoint, "
                f"and {np.dtype(leaf.dtype)}{list(np.shape(leaf))} in this run{advice}"
            )
    for name in stored:
        if name not in abstract:
            raise ValueError(
                f"{folder}: {kind} {name} is in the checkpoint, but not in this run{advice}"
            )


def _fits(folder: Path, name: str, stored: tuple[int, ...], requested: tuple[int, ...]) -> bool:
    """Whether the shapes are equal except for padding, which Orbax may add or leave out, without
    cutting the model."""
    if stored == requested:
        return True
    # An optimizer's array is named by its path in the state, which ends with its parameter's name.
    shapes = _recorded_shapes(folder)
    unpadded = next(
        (shape for parameter, shape in shapes.items() if f".{name}".endswith(f".{parameter}")), None
    )
    return unpadded is not None and fits(name, stored, requested, unpadded)


def _recorded_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Parameter name -> shape without padding, as the manifest records it.

    Earlier releases did not record it: then it is that of the model in the checkpoint's
    config.json, if it is a LLaMA.
    """
    recorded = read_manifest(folder).get("shapes")
    if recorded is not None:
        return {name: tuple(shape) for name, shape in recorded.items()}
    try:
        return unpadded_shapes(TransformerConfig.from_hf(folder / "assets"))
    except ValueError:
        return {}


def stored_item(folder: Path, item: str) -> dict[str, jax.ShapeDtypeStruct]:
    """The result of `stored_shapes`; errors as in `require_item`."""
    require_item(folder, item)
    return stored_shapes(folder, item)


def require_item(folder: Path, item: str) -> None:
    """Raises ForeignError if the checkpoint does not have the item."""
    if item not in read_manifest(folder)["items"]:
        raise ForeignError(
            f"{folder}: this checkpoint has no {item}"
            + (
                " (an imported or exported model: start a run from it as model.path)"
                if item == "optimizer"
                else ""
            )
        )
