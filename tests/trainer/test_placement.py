"""The ring on a slice of TPUs: a closed walk over neighbours, whose permutes the v5e compiler makes
asynchronous."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from planning.topology import topology_devices
from trainer.config.schema import MeshConfig
from trainer.mesh import make_mesh
from trainer.placement import closed_walk


@pytest.mark.parametrize(
    "cells",
    [
        (1,),
        (2,),
        (1, 2, 1),
        (2, 2),
        (4, 3),
        (3, 4),
        (8, 2),
        (4, 4, 4),
        (3, 3, 2),
        (1, 16, 16),
        (2, 3, 5, 2),
    ],
)
def test_a_closed_walk_visits_every_cell_once_and_steps_to_neighbours(cells):
    walk = closed_walk(cells)
    assert sorted(walk) == list(range(np.prod(cells)))
    coordinates = np.stack(np.unravel_index(walk, cells), 1)
    steps = np.abs(coordinates - np.roll(coordinates, 1, 0)).sum(1)
    assert (steps == (1 if len(walk) > 1 else 0)).all()


@pytest.mark.parametrize("cells", [(3,), (4,), (1, 6), (3, 3), (3, 5, 1)])
def test_shapes_without_a_closed_walk(cells):
    """Lines, and an odd number of cells (the colours of a chessboard cannot alternate around an odd
    ring)."""
    assert closed_walk(cells) is None


@pytest.mark.parametrize(
    ("topology", "axes"),
    [
        ("v5e:8x8", {"sequence": 64}),
        ("v5e:8x8", {"tensor": 4, "sequence": 16}),
        ("v5e:16x16", {"fsdp": 4, "tensor": 2, "sequence": 32}),
        ("v4:4x4x4", {"tensor": 8, "sequence": 8}),
        ("v3:4x4", {"sequence": 32}),
    ],
    ids=str,
)
def test_every_ring_of_a_mesh_is_such_a_walk(topology, axes):
    """Cell by cell: with the devices of a cell along `tensor`, every hop of a ring is one cell long
    and straight."""
    mesh = make_mesh(MeshConfig(**axes), topology_devices(topology))
    assert len({device.id for device in mesh.devices.flat}) == mesh.size
    for ring in mesh.devices.reshape(-1, axes["sequence"]):
        for device, neighbour in itertools.pairwise([*ring, ring[0]]):
            distances = np.abs(
                np.subtract(
                    (*device.coords, device.core_on_chip),
                    (*neighbour.coords, neighbour.core_on_chip),
                )
            )
            assert np.count_nonzero(distances) == 1 and distances.max() <= axes.get("tensor", 1)


@pytest.mark.parametrize("axes", [{"sequence": 64}, {"tensor": 4, "sequence": 16}], ids=str)
def test_permutes_along_the_walk_are_asynchronous(axes):
    """On v5e 8 x 8, where JAX does not place a mesh in the order of a ring."""
    mesh = make_mesh(MeshConfig(**axes), topology_devices("v5e:8x8"))
    text = compiled_ring(mesh)
    assert (text.count(" collective-permute-start("), text.count(" collective-permute(")) == (1, 0)


def compiled_ring(mesh) -> str:
    """A loop that sends one array along the sequence while it multiplies another."""
    size, rows = mesh.shape["sequence"], PartitionSpec(mesh.axis_names)

    def local(x, w):
        def step(carry, _):
            x, y = carry
            return (
                lax.ppermute(x, "sequence", [(i, (i + 1) % size) for i in range(size)]),
                jnp.tanh(y @ w) + x,
            ), None

        return lax.scan(step, (x, x), None, length=3)[0][1]

    ring = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows, check_vma=False
        )
    )
    x = jax.ShapeDtypeStruct(
        (mesh.size * 1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, rows)
    )
    w = jax.ShapeDtypeStruct(
        (1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec())
    )
    return ring.lower(x, w).compile().as_text()
