"""Reads the arrays of one checkpoint's folder onto shardings, after comparing names, dtypes and
shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

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


class Restored(NamedTuple):
    """A restored state of a training.

    Attributes:
      step: finished optimizer steps.
      model: parameter name -> array.
      optimizer: the optimizer's state.
      data: JSON, as in the item `data` of a checkpoint.
    """

    step: int
    model: dict[str, jax.Array]
    optimizer: Any
    data: dict[str, Any]


def data_of(folder: Path) -> dict[str, Any] | None:
    """The item `data` of the checkpoint in a folder; None if it has none."""
    if "data" not in read_manifest(folder)["items"]:
        return None
    return parse_json(Files(folder).read("data/data.json"))


def restore_item(folder: Path, item: str, abstract: dict[str, Any]) -> dict[str, Any]:
    """The arrays of one item of a verified checkpoint, local or in a bucket.

    Args:
      abstract: name -> array or jax.ShapeDtypeStruct with a sharding; without one it comes back as
        numpy.

    Returns:
      The arrays in the order of `abstract`.

    Raises:
      ValueError: names the array whose name, shape or dtype differs.
    """
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
