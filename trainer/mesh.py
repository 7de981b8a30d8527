"""Devices to mesh: the four axes, outermost first, and where batches and scalars lie."""
from __future__ import annotations

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from data.errors import UserError
from model.sharding import BATCH_AXES, MESH_AXES

from .config import MeshConfig


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


def make_mesh(config: MeshConfig, devices=None) -> Mesh:
    """The mesh (data, fsdp, tensor, sequence) over `devices` (all of them unless given).

    Raises:
      UserError: the axes' product is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = tuple(getattr(config, axis) for axis in MESH_AXES)
    if config.devices != len(devices):
        named = " x ".join(f"{axis} {size}" for axis, size in zip(MESH_AXES, shape, strict=True))
        raise UserError(f"mesh: {named} is {config.devices} devices, found {len(devices)}; change an axis so that the "
                        f"product is {len(devices)}, or give --mesh.simulate {config.devices} to try it on a CPU")
    # An axis of 2 on a torus of 4 x 4 x 4 takes a part of a physical axis: its ring is a line there, which costs speed only.
    placed = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(placed, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp, length over sequence."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, "sequence"))


def rows_here(mesh: Mesh, rows: int) -> frozenset[int] | None:
    """Which of a batch's `rows` lie on this process's devices; None for all of them."""
    parts = batch_sharding(mesh).addressable_devices_indices_map((rows, mesh.shape["sequence"])).values()
    here = frozenset(row for part in parts for row in range(*part[0].indices(rows)))
    return None if len(here) == rows else here


def place_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """A host batch [B, L] as global arrays; each process places what its devices hold, and reads no other part of it."""
    sharding = batch_sharding(mesh)
    return {name: jax.make_array_from_callback(x.shape, sharding, lambda index, x=x: x[index]) for name, x in batch.items()}
