"""Devices to mesh: the four axes, what of them lies near and what far apart, and where batches and scalars lie.

The mesh names its axes always in one order; which devices they run along is another question, answered by mesh.order (the last
axis has the nearest neighbours) and mesh.dcn (the axes that cross from slice to slice, or from host to host).
"""
from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from data.errors import UserError
from model.sharding import BATCH_AXES, MESH_AXES

from .config.schema import MeshConfig
from .placement import ring_placed

# What waits for nothing wants the nearest: tensor's sums before the ring along the sequence, which runs under the kernels.
ORDER = ("data", "fsdp", "sequence", "tensor")
# Schedules that split the sequence axis in lines.
IN_LINES = ("ulysses", "attention2d")


def simulate(devices: int, processes: int = 1) -> None:
    """Make the CPU look like `devices` devices, those of all processes. Only works before JAX has started its backend.

    Compiled programs are not kept then: a program of several CPU devices that comes back from the persistent cache has
    lost the order of its collectives, and deadlocks where two of them do not depend on each other (jaxlib 0.10.2).

    Raises:
      UserError: JAX has started already, with another number; the processes do not divide it.
    """
    if devices % processes:
        raise UserError(f"mesh.simulate: found {devices}, which {processes} processes do not divide; "
                        f"{-(-devices // processes) * processes} would work")
    try:
        jax.config.update("jax_num_cpu_devices", devices // processes)
        jax.config.update("jax_platforms", "cpu")
        if devices > 1:
            jax.config.update("jax_enable_compilation_cache", False)
    except RuntimeError:
        if len(jax.devices()) != devices:
            raise UserError(f"mesh.simulate: found {devices}, but JAX runs on {len(jax.devices())} devices already") from None


def make_mesh(config: MeshConfig, devices=None, schedule="ring") -> Mesh:
    """The mesh (data, fsdp, tensor, sequence) over `devices` (all of them unless given), placed by config.order and config.dcn.

    schedule: what runs along the sequence axis (see `model.attention`). Most pass on to neighbours; those of IN_LINES want the
    rows and boxes that JAX makes of a slice (v5e's compiler ends the program where groups of a closed walk have no route).

    Raises:
      UserError: the axes' product is not the number of devices, or that of dcn not the number of slices (of hosts).
    """
    devices = jax.devices() if devices is None else devices
    shape = tuple(getattr(config, axis) for axis in MESH_AXES)
    if config.devices != len(devices):
        named = " x ".join(f"{axis} {size}" for axis, size in zip(MESH_AXES, shape, strict=True))
        raise UserError(f"mesh: {named} is {config.devices} devices, found {len(devices)}; change an axis so that the "
                        f"product is {len(devices)}, or give --mesh.simulate {config.devices} to try it on a CPU")
    order = config.order or ORDER
    name = schedule.get("name") if isinstance(schedule, dict) else schedule
    placed = _placed(config, order, devices, walk=name not in IN_LINES)
    return Mesh(placed.transpose([order.index(axis) for axis in MESH_AXES]), MESH_AXES,
                axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _placed(config: MeshConfig, order: tuple[str, ...], devices, walk: bool = True) -> np.ndarray:
    """The devices as an array whose axes are `order`'s, the last one's neighbours nearest; walk: see `placement`."""
    tpu, slices = devices[0].platform == "tpu", len({getattr(device, "slice_index", 0) for device in devices})
    by_host = slices == 1 and not tpu
    places, what = (len({device.process_index for device in devices}), "hosts") if by_host else (slices, "slices")
    across = [config.dcn.get(axis, 1) for axis in order]
    whole = [getattr(config, axis) for axis in order]
    left_alone = not config.dcn and (slices == 1 or not tpu)
    if left_alone or (config.simulate and places == 1):  # one process that simulates them has no slow network
        return _near(whole, order, devices, walk)
    if math.prod(across) != places:
        raise UserError(f"mesh.dcn: found {config.dcn or 'nothing'} for devices of {places} {what}; factors whose product is "
                        f"{places} would work, such as {{data: {places}}}")
    inside = [size // factor for size, factor in zip(whole, across, strict=True)]
    by_place: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_place.setdefault(device.process_index if by_host else device.slice_index, []).append(device)
    near = np.array([_near(inside, order, by_place[place], walk) for place in sorted(by_place)]).reshape(*across, *inside)
    axes = len(order)
    return near.transpose([i for axis in range(axes) for i in (axis, axes + axis)]).reshape(whole)


def _near(sizes: list[int], order: tuple[str, ...], devices, walk: bool) -> np.ndarray:
    """Devices of one slice, or of one host, as an array of these sizes."""
    if walk and devices[0].platform == "tpu":
        placed = ring_placed(sizes, order.index("sequence"), devices)
        if placed is not None:
            return placed
    # An axis of 2 on a torus of 4 x 4 x 4 takes a part of a physical axis: its ring is a line there, which costs speed only.
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp, length over sequence."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, "sequence"))


@dataclasses.dataclass(frozen=True)
class Part:
    """The rows and places of a global batch [B, L] that are at hand: both ascending, places those after the permutation."""

    shape: tuple[int, int]
    rows: np.ndarray
    places: np.ndarray


def part_here(mesh: Mesh, rows: int, length: int) -> Part:
    """What of a batch [rows, length] lies on this process's devices."""
    return part_of(batch_sharding(mesh).addressable_devices_indices_map((rows, length)).values(), rows, length)


def part_of(held, rows: int, length: int) -> Part:
    """The rows and places of a batch [rows, length] that these pairs of slices reach."""
    here = [sorted({x for part in held for x in range(*part[axis].indices(size))}) for axis, size in enumerate((rows, length))]
    return Part((rows, length), *map(np.array, here))


def wanted(part: Part, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places of a row as read that `order` brings to the part's, ascending, and the order that brings these there."""
    natural = order[part.places]
    places = np.sort(natural)
    return places, np.searchsorted(places, natural)


def place_batch(batch: dict[str, np.ndarray], mesh: Mesh, part: Part | None = None) -> dict[str, jax.Array]:
    """A host batch as global arrays [B, L]; each process places what its devices hold. part: what of it `batch` has (all)."""
    sharding = batch_sharding(mesh)

    def place(x):
        if part is None:
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        def held(index):
            first = [axis.indices(size)[0] for axis, size in zip(index, part.shape, strict=True)]
            row, column = np.searchsorted(part.rows, first[0]), np.searchsorted(part.places, first[1])
            rows, columns = sharding.shard_shape(part.shape)
            return x[row:row + rows, column:column + columns]

        return jax.make_array_from_callback(part.shape, sharding, held)

    return {name: place(x) for name, x in batch.items()}
