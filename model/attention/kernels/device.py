"""Which GPU a program is traced for: kernels for GPUs choose their tiles by it."""

from __future__ import annotations

import jax


def device_kind() -> str:
    """The kind of device for which the program is traced: the mesh's, or the first device's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind
