"""The device for which a program is traced: GPU kernels choose their tiles by it."""

from __future__ import annotations

import jax


def device_kind() -> str:
    """Returns the device kind the program is traced for: the mesh's, or the first device's."""
    return mesh_device_kind() or jax.devices()[0].device_kind


def mesh_device_kind() -> str | None:
    """Returns the kind of the mesh's devices, or None without a mesh of devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else device.device_kind
