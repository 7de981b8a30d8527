"""The arrays of a checkpoint's item on disk, opened with TensorStore, which Orbax writes them
with."""

from __future__ import annotations

from pathlib import Path

import jax
import tensorstore

from data.within import parse_json
from trainer.checkpoint.commit import Files
from trainer.checkpoint.manifest import DamagedError


def open_arrays(folder: Path, item: str) -> dict[str, tensorstore.TensorStore]:
    """Name -> array of an item of the checkpoint in `folder`; nothing of it is read.

    Orbax could say the shapes, but asks TensorStore for each array's JSON, of which TensorStore
    0.1.86 frees nothing: 3 KiB an array at every save.

    Raises:
      DamagedError: the names or one of the arrays cannot be read.
    """
    base = (folder / item).as_uri() + "/"
    try:
        index = parse_json(Files(folder).read(f"{item}/_METADATA"))
        entries = index["tree_metadata"].values()
        names = [".".join(part["key"] for part in entry["key_metadata"]) for entry in entries]
        opening = {
            name: tensorstore.open(
                {
                    "driver": "zarr",
                    "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"},
                },
                open=True,
                read=True,
            )
            for name in names
        }
        return {name: array.result() for name, array in opening.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(
            f"{folder}: finds no index of the arrays of {item} ({str(error).splitlines()[0]}); an "
            "older checkpoint would work, or a path without *, ?, [ and backslash"
        ) from error


def stored_shapes(folder: Path, item: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Name -> shape and dtype of each array of an item; errors as in `open_arrays`."""
    arrays = open_arrays(folder, item)
    return {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype.numpy_dtype)
        for name, array in arrays.items()
    }
