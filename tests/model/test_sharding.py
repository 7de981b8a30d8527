"""A parameter's gradient over every device of a mesh: exact, and reduce-scattered rather than
all-reduced by the TPU's compiler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from model import sharding
from model.sharding import gather
from planning.compiled.transfers import transfers
from planning.topology import topology_devices
from trainer.config.schema import MeshConfig
from trainer.mesh import make_mesh

ALL_DEVICES = pytest.mark.parametrize(
    ("axes", "storage"),
    [
        ({"sequence": 8}, "sequence"),
        ({"fsdp": 2, "sequence": 4}, ("fsdp", "sequence")),
        ({"fsdp": 4, "tensor": 2}, "fsdp"),
        ({"data": 2, "sequence": 4}, "sequence"),
    ],
    ids=str,
)


def gradient(mesh, storage):
    """Returns a function of layers w [L, E, F] in shards and x [rows, E], some rows per device,
    that gives the gradient of the layers' sum(x @ w) in shards; and both specs."""
    spec, rows = PartitionSpec(None, storage, None), PartitionSpec(mesh.axis_names)

    def local(w, x):
        def layer(total, w):
            return total + jnp.sum(x @ gather(w, PartitionSpec(*spec[1:]), jnp.float32)), None

        return jax.grad(lambda w: jax.lax.scan(layer, 0.0, w)[0])(w)

    return (
        jax.jit(
            jax.shard_map(local, mesh=mesh, in_specs=(spec, rows), out_specs=spec, check_vma=False)
        ),
        spec,
        rows,
    )


@ALL_DEVICES
@pytest.mark.parametrize("kind", ["cpu", "TPU v4"])
def test_the_gradient_is_the_sum_over_devices(axes, storage, kind, monkeypatch):
    """Integers, so that the sum is exact in any order; axes over which the parameter is not sharded
    are not summed here."""
    monkeypatch.setattr(sharding, "_device_kind", lambda mesh: kind)
    mesh = make_mesh(MeshConfig(**axes), jax.devices())
    fn, spec, _ = gradient(mesh, storage)
    x = np.arange(8 * 16).reshape(8, 16).astype(np.float32)
    summed = fn(jax.device_put(np.zeros((3, 16, 256), np.float32), NamedSharding(mesh, spec)), x)
    unsharded = [i for i, name in enumerate(mesh.axis_names) if name not in np.atleast_1d(storage)]
    rows = x.reshape(*mesh.devices.shape, 16)
    for shard in summed.addressable_shards:
        position = np.argwhere(mesh.devices == shard.device)[0]
        expected = (
            rows[
                tuple(position[i] if i in unsharded else slice(None) for i in range(len(position)))
            ]
            .reshape(-1, 16)
            .sum(0)
        )
        np.testing.assert_array_equal(
            shard.data,
            np.broadcast_to(expected[shard.index[1], None], (3, len(shard.data[0]), 256)),
        )


@ALL_DEVICES
def test_the_gradient_is_reduce_scattered(axes, storage):
    """On 16 chips: for a scatter over 8 the compiler makes none of the all-reduces that the two
    stages of `gather` avoid."""
    mesh = make_mesh(
        MeshConfig(**axes | {"sequence": 2 * axes.get("sequence", 1)}), topology_devices("v4:2x2x4")
    )
    fn, spec, rows = gradient(mesh, storage)
    w = jax.ShapeDtypeStruct((3, 4096, 1024), jnp.float32, sharding=NamedSharding(mesh, spec))
    x = jax.ShapeDtypeStruct((2048, 4096), jnp.float32, sharding=NamedSharding(mesh, rows))
    kinds = {transfer.kind for transfer in transfers(fn.lower(w, x).compile().as_text(), 16)}
    assert kinds - {"all-gather"} == {"reduce-scatter"}
