"""The arrays of a checkpoint item, opened with TensorStore, which Orbax uses to write them.

Orbax supports disks and gs://. For s3://, TensorStore alone reads and joins the same files.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore

from data.untrusted_files import parse_json
from trainer.checkpoint.commit import Files
from trainer.checkpoint.manifest import DamagedError
from trainer.run.bucket import in_bucket, store_spec

_ARRAYS_AT_ONCE = 8  # read concurrently


def open_arrays(folder: Path, item: str) -> dict[str, tensorstore.TensorStore]:
    """Name -> unread array of an item of the checkpoint in `folder`.

    Orbax could give the shapes, but requests each array's JSON, which TensorStore 0.1.86 never
    frees: 3 KiB per array at every save.

    Raises:
      DamagedError: the names or an array cannot be read.
    """
    base = _base(folder / item)
    try:
        index = parse_json(Files(folder).read(f"{item}/_METADATA"))
        entries = index["tree_metadata"].values()
        names = [".".join(part["key"] for part in entry["key_metadata"]) for entry in entries]
        opening = {
            name: tensorstore.open(
                {
                    "driver": "zarr",
                    "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"},
                    # Otherwise a checkpoint removed meanwhile would be read as zeros.
                    "fill_missing_data_reads": False,
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


def _base(folder: Path) -> Any:
    """Returns OCDBT's spec of a folder, local or in a bucket."""
    return store_spec(str(folder)) if in_bucket(folder) else folder.as_uri() + "/"


def join_parts(folder: Path, processes: int) -> None:
    """Joins the processes' folders ocdbt.process_N into one item, as Orbax does in the stores it
    supports."""
    context = tensorstore.Context()  # shared, or the stores count as different ones

    def opened(part: Path) -> tensorstore.KvStore:
        spec = {"driver": "ocdbt", "base": _base(part)}
        return tensorstore.KvStore.open(spec, context=context).result()

    joined = tensorstore.Transaction(atomic=True)
    whole = opened(folder).with_transaction(joined)
    for number in range(processes):
        opened(folder / f"ocdbt.process_{number}").experimental_copy_range_to(whole).result()
    joined.commit_sync()


def read_arrays(folder: Path, item: str, abstract: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an item's arrays on the shardings of `abstract`, as numpy where it has none.

    Padding beyond the stored shape is 0.
    """
    arrays = open_arrays(folder, item)

    def read(name: str) -> Any:
        array, wanted = arrays[name], abstract[name]
        parts: dict[tuple[tuple[int, int], ...], np.ndarray] = {}  # copies are read once

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            ends = tuple(
                (start, stop) for start, stop, _ in map(slice.indices, index, wanted.shape)
            )
            if ends not in parts:
                parts[ends] = _read_part(array, ends)
            return parts[ends]

        if getattr(wanted, "sharding", None) is None:
            return part((slice(None),) * len(wanted.shape))
        return jax.make_array_from_callback(tuple(wanted.shape), wanted.sharding, part)

    with ThreadPoolExecutor(_ARRAYS_AT_ONCE) as pool:
        return dict(zip(abstract, pool.map(read, abstract), strict=True))


def _read_part(array: tensorstore.TensorStore, ends: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Returns a part of a stored array; 0 beyond its shape."""
    part = np.zeros([stop - start for start, stop in ends], array.dtype.numpy_dtype)
    stored = tuple(
        slice(min(start, size), min(stop, size))
        for (start, stop), size in zip(ends, array.shape, strict=True)
    )
    part[tuple(slice(0, each.stop - each.start) for each in stored)] = array[stored].read().result()
    return part


def stored_shapes(folder: Path, item: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Name -> shape and dtype of each array of an item; errors as in `open_arrays`."""
    arrays = open_arrays(folder, item)
    return {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype.numpy_dtype)
        for name, array in arrays.items()
    }
