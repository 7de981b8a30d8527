"""Which devices an axis runs along: nearby ones by mesh.order, those of other slices and hosts by
mesh.dcn."""

import dataclasses
import itertools
import re
import types

import jax
import numpy as np
import pytest

from data.errors import UserError
from model.attention.names import MESH_AXES
from model.config import TransformerConfig
from planning.compiled.text import parse
from planning.compiled.transfers import COLLECTIVES, groups
from planning.machines import memory_gib
from planning.topology import topology_devices
from tests.compiled_text import compile_step
from trainer.config.schema import MeshConfig, RunConfig
from trainer.mesh import ORDER, _placed, make_mesh, require_dcn, start_devices


@pytest.fixture(scope="module")
def two_slices():
    """Eight TPUs, four in each slice."""
    return topology_devices("2xv5e:2x2")


def gpus(hosts: int, each: int):
    """The GPUs of several hosts as JAX describes them, one process per host."""
    return [
        types.SimpleNamespace(
            id=host * each + gpu,
            process_index=host,
            slice_index=0,
            platform="gpu",
            device_kind="GPU",
        )
        for host in range(hosts)
        for gpu in range(each)
    ]


def lines(devices: np.ndarray, axes, along: str) -> np.ndarray:
    """[lines, size]: the devices that differ in one axis alone."""
    return np.moveaxis(devices, axes.index(along), -1).reshape(-1, devices.shape[axes.index(along)])


def crossing(mesh, key) -> set[str]:
    """The axes along which `key` changes between devices."""
    return {
        axis
        for axis in MESH_AXES
        for line in lines(mesh.devices, MESH_AXES, axis)
        if len({key(device) for device in line}) > 1
    }


@pytest.mark.parametrize(
    ("sizes", "dcn"),
    [
        ({"data": 2, "fsdp": 2, "sequence": 2}, "data"),
        ({"fsdp": 4, "tensor": 2}, "fsdp"),
        ({"tensor": 2, "sequence": 4}, "sequence"),
    ],
)
def test_only_the_axis_named_by_dcn_crosses_from_slice_to_slice(two_slices, sizes, dcn):
    mesh = make_mesh(MeshConfig(**sizes, dcn={dcn: 2}), two_slices)
    assert crossing(mesh, lambda device: device.slice_index) == {dcn}
    for line in lines(
        mesh.devices, MESH_AXES, dcn
    ):  # the part of the axis within a slice is contiguous
        assert [device.slice_index for device in line] == sorted(
            device.slice_index for device in line
        )
    assert {axis: size for axis, size in mesh.shape.items() if size > 1} == sizes and memory_gib(
        "2xv5e:2x2"
    ) == 15.75


@pytest.mark.parametrize("dcn", [{}, {"data": 1}, {"fsdp": 4}])
def test_dcn_factors_that_do_not_match_the_slices_are_refused(two_slices, dcn):
    with pytest.raises(
        UserError, match=r"mesh\.dcn: found .* for devices of 2 slices; \{data: 2\} would work"
    ):
        make_mesh(MeshConfig(data=2, fsdp=4, dcn=dcn), two_slices)


@pytest.mark.parametrize(
    ("sizes", "slices", "advice"),
    [
        ({"fsdp": 8}, 2, {"fsdp": 2}),
        ({"tensor": 8}, 2, {"tensor": 2}),
        ({"fsdp": 8, "expert": 2, "sequence": 2}, 2, {"fsdp": 2}),
        ({"expert": 2, "sequence": 2}, 2, {"sequence": 2}),
        ({"data": 2, "sequence": 6}, 4, {"data": 2, "sequence": 2}),
        ({"data": 3}, 2, {}),
    ],
)
def test_the_factors_advised_for_dcn_are_accepted(sizes, slices, advice):
    mesh = MeshConfig(**sizes)
    assert mesh.dcn_for(slices) == advice
    if not advice:
        assert mesh.dcn_advice(slices).endswith("whose product is 2; with data 6 they would")
        mesh, advice = MeshConfig(data=6), {"data": 2}
    require_dcn(dataclasses.replace(mesh, dcn=advice), slices, "slice")
    with pytest.raises(UserError, match=r"for devices of 1 slice; leave it out"):
        require_dcn(dataclasses.replace(mesh, dcn=advice), 1, "slice")


@pytest.mark.parametrize("last", ["tensor", "sequence"])
def test_the_last_axis_of_the_order_runs_along_the_nearest_devices(last):
    order = (*(axis for axis in MESH_AXES if axis != last), last)
    mesh = make_mesh(MeshConfig(tensor=4, sequence=4, order=order), topology_devices("v5e:4x4"))
    assert mesh.axis_names == MESH_AXES and mesh.devices.shape == (1, 1, 1, 4, 4)
    for line in lines(mesh.devices, MESH_AXES, last):
        assert all(
            sum(np.abs(np.subtract(device.coords, neighbour.coords))) == 1
            for device, neighbour in itertools.pairwise(line)
        )


def test_one_simulating_process_has_no_slow_network():
    assert (
        make_mesh(MeshConfig(data=2, dcn={"data": 2}, simulate=2), jax.devices()[:2]).shape["data"]
        == 2
    )


def test_tensor_stays_within_a_gpu_host():
    config = MeshConfig(fsdp=2, tensor=8, sequence=2)
    devices = gpus(4, 8)
    for axes, hosts in ((ORDER, 1), (MESH_AXES, 2)):
        placed = _placed(config, axes, devices)
        assert {
            len({device.process_index for device in line}) for line in lines(placed, axes, "tensor")
        } == {hosts}
    across = _placed(
        MeshConfig(fsdp=8, tensor=2, sequence=2, dcn={"sequence": 2, "fsdp": 2}), ORDER, devices
    )
    for axis, hosts in (("tensor", 1), ("sequence", 2), ("fsdp", 2)):
        assert {
            len({device.process_index for device in line}) for line in lines(across, ORDER, axis)
        } == {hosts}
    with pytest.raises(UserError, match=r"for devices of 4 hosts"):
        _placed(MeshConfig(fsdp=32, dcn={"fsdp": 2}), ORDER, devices)


@pytest.mark.slow
def test_only_gradient_sums_cross_between_slices(two_slices):
    """In the TPU compiler's text of the step, collectives number the devices of one slice;
    transfers between slices are sends to the network's runtime, annotated with their purpose. Each
    gradient crosses once, as the shard that a device holds."""
    config = TransformerConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    mesh = MeshConfig(data=2, fsdp=2, sequence=2, dcn={"data": 2})
    module = parse(compile_step(config, two_slices, 1024, batch=4, mesh=mesh).as_text())
    all_instructions = [
        instruction for instructions in module.computations.values() for instruction in instructions
    ]
    inside = [
        instruction
        for instruction in all_instructions
        if instruction.opcode.removesuffix("-start") in COLLECTIVES
    ]
    assert inside and all(
        max(group) < 4
        for instruction in inside
        if instruction.attribute("replica_groups")
        for group in groups(instruction.attribute("replica_groups"), 4)
    )
    sent = [instruction for instruction in all_instructions if instruction.opcode == "send"]
    assert sent and {
        re.search(r'transfer_type="(\w+)"', instruction.rest)[1] for instruction in sent
    } == {"ALL_REDUCE"}


@pytest.mark.parametrize(
    "run_dir", ["/a mount/mine", "mine/", "./x/mine", "~/mine", ".", "gs://b/x/mine/", "link/mine"]
)
def test_processes_that_reach_a_run_by_different_paths_know_it_by_one_name(
    run_dir, tmp_path, monkeypatch
):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    names = []
    monkeypatch.setattr("trainer.mesh.join", lambda *_, run, **__: names.append(run))
    monkeypatch.setattr("trainer.mesh.fix_random_numbers", lambda: None)
    start_devices(RunConfig(run_dir=run_dir))
    assert names == ["mine"]
