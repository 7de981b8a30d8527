"""The device mesh, and the placement of batches on it.

A mesh always has its five axes in the same order. mesh.order (the last axis has the nearest
neighbours) and mesh.dcn (the axes that cross slices or hosts) decide which devices an axis runs
along.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from data.errors import UserError
from model.attention.names import BATCH_AXES, MESH_AXES

from .config.schema import MeshConfig, RunConfig
from .jax_settings import fix_random_numbers
from .placement import ring_placed
from .run.cluster import join

# Nothing hides the sums over tensor, so it gets the nearest devices; kernels hide the ring.
ORDER = ("data", "fsdp", "expert", "sequence", "tensor")
# Schedules that split the sequence axis into lines of ranks.
IN_LINES = ("ulysses", "attention2d")


def start_devices(config: RunConfig) -> None:
    """Joins the other processes and simulates devices; call it before JAX starts its backend.

    Later calls, as by the planner, change nothing.

    Raises:
      UserError: see `join` and `simulate`.
    """
    # Not the whole path: machines may mount the run's folder at different ones.
    run = Path(config.location).absolute().name
    join(config.distributed, simulated=bool(config.mesh.simulate), run=run)
    if config.mesh.simulate:
        simulate(config.mesh.simulate, config.distributed.num_processes or 1)
    fix_random_numbers()


def simulate(devices: int, processes: int = 1) -> None:
    """Makes JAX simulate `devices` CPU devices over all processes, before its backend starts.

    It also turns off the persistent compilation cache: a cached program for several CPU devices
    loses the order of its collectives, and deadlocks if two are independent (jaxlib 0.10.2).

    Raises:
      UserError: JAX has already started with another number of devices, or the processes do not
        divide `devices`.
    """
    if devices % processes:
        raise UserError(
            f"mesh.simulate: found {devices}, which {processes} processes do not divide; "
            f"{-(-devices // processes) * processes} would work"
        )
    try:
        jax.config.update("jax_num_cpu_devices", devices // processes)
        jax.config.update("jax_platforms", "cpu")
        if devices > 1:
            jax.config.update("jax_enable_compilation_cache", False)
    except RuntimeError:
        if len(jax.devices()) != devices:
            raise UserError(
                f"mesh.simulate: found {devices}, but JAX runs on {len(jax.devices())} devices "
                "already"
            ) from None


def require_devices(config: MeshConfig, found: int) -> None:
    """Raises UserError unless the product of the axes is the number of devices found."""
    if config.devices != found:
        raise UserError(
            f"mesh: {config.named} is {config.devices} devices, found {found}; change an axis so "
            f"that the product is {found}, or give --mesh.simulate {config.devices} to try it on a "
            "CPU"
        )


def require_dcn(config: MeshConfig, groups: int, kind: str) -> None:
    """Raises UserError unless the product of dcn's factors is the number of slices or hosts.

    Args:
      kind: "slice" or "host".
    """
    if math.prod(config.dcn.values()) != groups:
        named = f"{groups} {kind}" + ("s" if groups > 1 else "")
        raise UserError(
            f"mesh.dcn: found {config.dcn or 'nothing'} for devices of {named}; "
            f"{config.dcn_advice(groups)}"
        )


def make_mesh(config: MeshConfig, devices=None, schedule="ring") -> Mesh:
    """Returns the mesh (data, fsdp, expert, tensor, sequence), placed by order and dcn.

    Args:
      devices: all of JAX's devices by default.
      schedule: the attention schedule. Most send to neighbours and get a closed walk over the
        slice; those in IN_LINES get JAX's rows and boxes (v5e's compiler aborts if a group of a
        closed walk has no route).

    Raises:
      UserError: the product of the axes is not the number of devices, or dcn's not that of slices
        or hosts.
    """
    devices = jax.devices() if devices is None else devices
    require_devices(config, len(devices))
    order = config.order or ORDER
    if "expert" not in order:  # of size 1
        order = ("expert", *order)
    name = schedule.get("name") if isinstance(schedule, dict) else schedule
    placed = _placed(config, order, devices, walk=name not in IN_LINES)
    return Mesh(
        placed.transpose([order.index(axis) for axis in MESH_AXES]),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
    )


def abstract_mesh(config: MeshConfig) -> Mesh:
    """Returns a mesh without devices, for a dry run.

    Models are made and traced on it; nothing can be placed or compiled.
    """
    sizes = tuple(getattr(config, axis) for axis in MESH_AXES)
    mesh = AbstractMesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
    return cast(Mesh, mesh)


def is_abstract(mesh: Mesh) -> bool:
    """Returns whether a mesh is one of `abstract_mesh`."""
    return isinstance(mesh, AbstractMesh)


def _placed(config: MeshConfig, order: tuple[str, ...], devices, walk: bool = True) -> np.ndarray:
    """Returns the devices as an array with the axes of `order`, nearest along the last axis.

    walk: place the sequence axis as a closed walk, see `placement`.
    """
    tpu = devices[0].platform == "tpu"
    slices = [getattr(device, "slice_index", 0) for device in devices]
    # A slow network connects TPU slices, and the hosts of other devices.
    by_host = len(set(slices)) == 1 and not tpu
    groups: dict[int, list[jax.Device]] = {}
    for device, slice_index in zip(devices, slices, strict=True):
        groups.setdefault(device.process_index if by_host else slice_index, []).append(device)
    factors = [config.dcn.get(axis, 1) for axis in order]
    sizes = [getattr(config, axis) for axis in order]
    no_slow_network = not config.dcn and (len(set(slices)) == 1 or not tpu)
    simulated_in_one_process = config.simulate and len(groups) == 1
    if no_slow_network or simulated_in_one_process:
        return _placed_near(sizes, order, devices, walk)
    require_dcn(config, len(groups), "host" if by_host else "slice")
    sizes_inside = [size // factor for size, factor in zip(sizes, factors, strict=True)]
    placed = np.array(
        [_placed_near(sizes_inside, order, groups[number], walk) for number in sorted(groups)]
    )
    placed = placed.reshape(*factors, *sizes_inside)
    axes = len(order)
    return placed.transpose([i for axis in range(axes) for i in (axis, axes + axis)]).reshape(sizes)


def _placed_near(sizes: list[int], order: tuple[str, ...], devices, walk: bool) -> np.ndarray:
    """Returns the devices of one slice or host as an array of these sizes."""
    if walk and devices[0].platform == "tpu":
        placed = ring_placed(sizes, order.index("sequence"), devices)
        if placed is not None:
            return placed
    # On a 4 x 4 x 4 torus an axis of 2 takes part of a physical axis, where its ring is a line;
    # that only costs speed.
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of [B, L]: rows over data, fsdp and expert, length over sequence."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, "sequence"))


@dataclasses.dataclass(frozen=True)
class LocalPart:
    """A process's part of a global batch [B, L]: its rows and tokens, ascending.

    Attributes:
      shape: B and L.
      rows: int64 indices of the rows.
      tokens: int64 indices into a row, after the permutation into the layout.
    """

    shape: tuple[int, int]
    rows: np.ndarray
    tokens: np.ndarray


def local_part(mesh: Mesh, rows: int, length: int) -> LocalPart:
    """Returns the part of a batch [rows, length] on this process's devices."""
    return part_of_slices(
        batch_sharding(mesh).addressable_devices_indices_map((rows, length)).values(), rows, length
    )


def part_of_slices(shards: Iterable[tuple[slice, ...] | None], rows: int, length: int) -> LocalPart:
    """Returns the part of a batch [rows, length] in these shards (slices of rows and tokens)."""
    slices = [shard for shard in shards if shard is not None]
    covered = [
        sorted({number for shard in slices for number in range(*shard[axis].indices(size))})
        for axis, size in enumerate((rows, length))
    ]
    return LocalPart((rows, length), *map(np.array, covered))


def local_order(part: LocalPart, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of a row to read, ascending, and their order in the layout.

    Args:
      order: int [L], the permutation of the whole row: x[:, order] is in the layout.
    """
    natural = order[part.tokens]
    indices = np.sort(natural)
    return indices, np.searchsorted(indices, natural)


def place_batch(
    batch: dict[str, np.ndarray], mesh: Mesh, part: LocalPart | None = None
) -> dict[str, jax.Array]:
    """Returns a host batch as global arrays [B, L, ...]; each process provides its part.

    Args:
      part: the part of the global batch in `batch`; all of it by default.
    """
    sharding = batch_sharding(mesh)

    def shard_of(x: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        if part is None:
            return x[index]
        first_row, first_token = (
            axis.indices(size)[0] for axis, size in zip(index[:2], part.shape, strict=True)
        )
        row = np.searchsorted(part.rows, first_row)
        token = np.searchsorted(part.tokens, first_token)
        rows, tokens = sharding.shard_shape(part.shape)
        return x[row : row + rows, token : token + tokens]

    return {
        name: jax.make_array_from_callback(
            (*(part.shape if part else x.shape[:2]), *x.shape[2:]),
            sharding,
            functools.partial(shard_of, x),
        )
        for name, x in batch.items()
    }
