"""A process's part of a local checkpoint: one file with the shards of its devices.

    8 bytes     the header's length
    header      JSON: `Header`
    shards      of one array after another, as bytes
    32 bytes    SHA-256 of everything before

Shards held by several devices of the process are written once. Raw bytes instead of Orbax's format,
since only the same processes on the same mesh read them again: nothing is compressed, divided or
joined, and a file is sent to another host unchanged.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from data.untrusted_files import parse_json
from trainer.checkpoint.manifest import DamagedError

_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 32
_LARGEST_HEADER = 1 << 28  # bytes
_CHUNK = 1 << 24  # bytes digested at a time

Layout = dict[str, dict[str, Any]]
"""Array name -> its dtype, its shape, and the [start, stop] per axis of each shard here."""


@dataclass(frozen=True)
class Header:
    """What a part belongs to.

    Attributes:
      run: the run's identifier.
      location: where the run is kept, for messages.
      attempt: of the start that saved it; parts of different starts are never combined.
      step: finished optimizer steps.
      part: the number of the process whose shards these are.
      processes: their number.
      mesh: its axes, and the process of each device along them.
      layout: of the arrays.
      data: JSON, as in the item `data` of a checkpoint.
    """

    run: str
    location: str
    attempt: str
    step: int
    part: int
    processes: int
    mesh: str
    layout: Layout
    data: dict[str, Any]


def layout_of(arrays: Mapping[str, Any]) -> Layout:
    """Returns the layout of arrays, or of abstract ones with shardings, in this process."""
    return {
        name: {
            "dtype": jnp.dtype(x.dtype).name,
            "shape": list(x.shape),
            "shards": _shards(x.sharding.addressable_devices_indices_map(tuple(x.shape)), x.shape),
        }
        for name, x in arrays.items()
    }


def digest_of(layout: Layout) -> str:
    """Returns a short text that differs between layouts."""
    return hashlib.sha256(json.dumps(layout, sort_keys=True).encode()).hexdigest()[:16]


def size_of(layout: Layout) -> int:
    """Returns the bytes of the arrays' shards here."""
    return sum(_bytes_in(entry, ends) for entry in layout.values() for ends in entry["shards"])


def _bytes_in(entry: Mapping[str, Any], ends: Sequence[Sequence[int]]) -> int:
    """Returns the bytes of a shard."""
    return math.prod(stop - start for start, stop in ends) * jnp.dtype(entry["dtype"]).itemsize


def _shards(indices: Mapping[Any, Any], shape: tuple[int, ...]) -> list[list[list[int]]]:
    """Returns the different shards of an array, in an order that depends on nothing else."""
    ends = {_ends(index, shape) for index in indices.values()}
    return [[list(pair) for pair in shard] for shard in sorted(ends)]


def _ends(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Returns (start, stop) per axis."""
    index = index or ()
    whole = (*index, *(slice(None),) * (len(shape) - len(index)))
    return tuple(slice.indices(part, size)[:2] for part, size in zip(whole, shape, strict=True))


def host_copies(arrays: Mapping[str, jax.Array]) -> Iterator[np.ndarray]:
    """Returns copies of this process's shards in the host's memory, in the order of `layout_of`."""
    wanted: list[jax.Array] = []
    for x in arrays.values():
        by_ends = {_ends(shard.index, x.shape): shard.data for shard in x.addressable_shards}
        wanted += [by_ends[ends] for ends in sorted(by_ends)]
    for shard in wanted:
        shard.copy_to_host_async()
    # A list, so that the caller may donate the arrays as soon as it has it.
    return iter([_copied(shard) for shard in wanted])


def _copied(shard: jax.Array) -> np.ndarray:
    # The host's view of an array in host memory may be the array itself.
    in_host_memory = "host" in (shard.sharding.memory_kind or "")
    devices: Any = shard.sharding.device_set
    on_cpu = all(device.platform == "cpu" for device in devices)
    return np.array(shard) if in_host_memory or on_cpu else np.asarray(shard)


def write_part(path: Path, header: Header, shards: Iterator[np.ndarray]) -> None:
    """Writes a part, which appears at `path` only when complete.

    Nothing is synced: a crashed machine counts as lost, and the digest shows whether its part
    survived.
    """
    text = json.dumps(asdict(header), allow_nan=False).encode()
    scratch, digest = scratch_of(path), hashlib.sha256()
    try:
        with scratch.open("wb") as file:
            for piece in itertools.chain((_LENGTH.pack(len(text)), text), map(_bytes_of, shards)):
                digest.update(piece)
                file.write(piece)
            file.write(digest.digest())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def scratch_of(path: Path) -> Path:
    """Returns where a part is written until it is complete."""
    return path.with_name(path.name + ".tmp")


def _bytes_of(shard: np.ndarray) -> Any:
    return np.ascontiguousarray(shard).reshape(-1).view(np.uint8)


def read_header(path: Path) -> Header:
    """Returns a part's header, without comparing the digest.

    Raises:
      DamagedError: the file does not begin like a part.
      OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return _header(file, path)[0]


def verify_part(path: Path) -> Header:
    """Compares a part with its digest; returns its header.

    Raises:
      DamagedError: it has changed since it was written.
      OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - _DIGEST_BYTES
        while left > 0 and (piece := file.read(min(left, _CHUNK))):
            digest.update(piece)
            left -= len(piece)
        if left or file.read() != digest.digest():
            raise DamagedError(f"{path}: is damaged (its checksum differs)")
        file.seek(0)
        return _header(file, path)[0]


def read_part(path: Path, abstract: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns a verified part's arrays on the shardings of `abstract`, which has the part's layout.
    Other processes read the rest of each array."""
    with path.open("rb") as file:
        header, offset = _header(file, path)
    stored = np.memmap(path, np.uint8, mode="r")
    arrays = {}
    for name, entry in header.layout.items():
        shards: dict[tuple[tuple[int, int], ...], np.ndarray] = {}
        for ends in entry["shards"]:
            shape, size = [stop - start for start, stop in ends], _bytes_in(entry, ends)
            # A copy: the device's array may share the memory it is given.
            values = np.array(stored[offset : offset + size]).view(jnp.dtype(entry["dtype"]))
            shards[tuple((start, stop) for start, stop in ends)] = values.reshape(shape)
            offset += size
        arrays[name] = _placed(abstract[name], shards)
    return arrays


def _placed(wanted: Any, shards: Mapping[tuple[tuple[int, int], ...], np.ndarray]) -> jax.Array:
    shape = tuple(wanted.shape)
    return jax.make_array_from_callback(
        shape, wanted.sharding, lambda index: shards[_ends(index, shape)]
    )


def _header(file: BinaryIO, path: Path) -> tuple[Header, int]:
    """Returns a part's header, and where its first shard begins."""
    try:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        if length > _LARGEST_HEADER:
            raise ValueError("its header is too long")
        return Header(**parse_json(file.read(length))), _LENGTH.size + length
    except (ValueError, TypeError, struct.error) as error:
        raise DamagedError(f"{path}: is not a part of a local checkpoint ({error})") from None
