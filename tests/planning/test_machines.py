"""Machine names of users and clouds map to topologies; a typo is answered with the nearest name."""

import pytest

from planning.machines import (
    accelerator_type,
    device_count,
    hosts,
    is_gpu,
    memory_gib,
    several_of,
    topology_of,
)
from planning.topology import topology_devices


@pytest.mark.parametrize(
    ("name", "topology", "devices", "machines"),
    [
        ("8xH100", "h100:8", 8, 1),
        ("2x8xH100", "h100:2x8", 16, 2),
        ("h100", "h100:1", 1, 1),
        ("H100x8", "h100:8", 8, 1),
        ("8 x A100-80GB", "a100:8", 8, 1),
        ("4xA100-40GB", "a100-40gb:4", 4, 1),
        ("RTX4090", "rtx4090:1", 1, 1),
        ("2xRTX4090", "rtx4090:2", 2, 1),
        ("4090", "rtx4090:1", 1, 1),
        ("B200", "b200:1", 1, 1),
        ("gpu", "gpu:1", 1, 1),
        ("v5p-32", "v5p:2x2x4", 16, 4),
        ("v5p-8", "v5p:2x2x1", 4, 1),
        ("v4-128", "v4:4x4x4", 64, 16),
        ("v3-32", "v3:4x4", 32, 4),
        ("v6e-8", "v6e:2x4", 8, 1),
        ("tpu7x-128", "tpu7x:4x4x4", 128, 16),
        ("Ironwood-8", "tpu7x:2x2x1", 8, 1),
        ("2xtpu7x:2x2x2", "2xtpu7x:2x2x2", 32, 4),
        ("v5litepod-256", "v5e:16x16", 256, 64),
        ("2xv5e-16", "2xv5e:4x4", 32, 8),
        ("v4:4x4x4", "v4:4x4x4", 64, 16),
        ("a100:4x8", "a100:4x8", 32, 4),
        ("2xv5e:16x16", "2xv5e:16x16", 512, 128),
        ("v5e-1", "v5e:1x1", 1, 1),
        ("v5p:4x4x1", "v5p:4x4x1", 16, 4),
        ("v5p:2x4x6", "v5p:2x4x6", 48, 12),
    ],
)
def test_a_machine_name_maps_to_its_topology(name, topology, devices, machines):
    assert topology_of(name) == topology
    assert (device_count(topology), hosts(topology)) == (devices, machines)
    assert topology_of(topology) == topology
    assert memory_gib(topology) or name == "gpu"


@pytest.mark.parametrize(
    ("name", "topology", "machines"),
    [
        ("2xh100:8", "h100:2x8", 2),
        ("1xh100:8", "h100:8", 1),
        ("2xRTX4090:1", "rtx4090:2x1", 2),
        ("1xv5e:4x4", "v5e:4x4", 4),
    ],
)
def test_a_number_before_gpus_counts_hosts(name, topology, machines):
    assert topology_of(name) == topology
    assert hosts(topology) == machines and device_count(topology_of(name)) == device_count(topology)


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("8xMI300X", "gpu:8"),
        ("2x8xMI300X", "gpu:2x8"),
        ("v100", "gpu:1"),
        ("mi300x:8", "gpu:8"),
        ("8xH100", "h100:8"),
        ("v5p-32", "v5p:2x2x4"),
    ],
)
def test_an_unlisted_name_is_a_generic_gpu_if_any_gpu_is_allowed(name, topology):
    assert topology_of(name, any_gpu=True) == topology
    for name in ("v8x-8", "tpu8x:2x2x1"):
        with pytest.raises(ValueError, match=r"unknown device (v8x|tpu8x)"):
            topology_of(name, any_gpu=True)


def test_gpus_are_distinguished_from_tpus():
    assert all(map(is_gpu, ("h100:2x8", "gpu:1"))) and not any(
        map(is_gpu, ("v4:4x4x4", "2xv5e:4x4"))
    )


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("8xH10", "unknown device h10 (did you mean H100?)"),
        ("8xH1000", "did you mean H100"),
        ("v5p-33", "slices of v5p are v5p-8, v5p-16, v5p-32"),
        ("v8x-8", "unknown device v8x"),
        ("tpu7x-9", "slices of tpu7x are tpu7x-8, tpu7x-16"),
        ("tpu7x", "written tpu7x-8"),
        ("v5pod-8", "v5p"),
        ("8", "write 8xH100"),
        ("", "write 8xH100"),
        ("v5p", "written v5p-8"),
        ("4xv5e", "written v5e-8"),
        ("h100:", "after the colon write a shape"),
        ("h100:8x", "after the colon"),
        ("h10:8", "did you mean H100"),
        ("0xh100", "at least one device"),
        ("0xv5e-8", "at least one device"),
        ("00xH100", "at least one device"),
        ("0xh100:8", "at least one device"),
        ("v4:4x00x4", "at least one device"),
        ("2xh100:2x8", "h100:8 would work, or hosts x GPUs"),
        ("a100:2x2x8", "hosts x GPUs of a host such as a100:4x8"),
        ("2x2x2xH100", "write 8xH100"),
        ("v5e:2x2x2", "slices of v5e have 2 dimensions, v5e:2x4 would work"),
        ("2xv6e:16", "slices of v6e have 2 dimensions, v6e:4x4 would work"),
        ("v3:4x4x4", "slices of v3 have 2 dimensions, v3:8x8 would work"),
        ("v4:4x4", "slices of v4 have 3 dimensions, v4:2x2x4 would work"),
        ("v5p:8", "slices of v5p have 3 dimensions, v5p:2x2x2 would work"),
        ("v4:3x3x3", "27 chips; a slice of v4 is of whole hosts of 2x2 chips, v4:2x4x4 would work"),
        ("v4:3x3x4", "36 chips; a slice of v4 is of whole hosts of 2x2 chips, v4:2x4x4 would work"),
        ("tpu7x:1x1x2", "2 chips; a slice of tpu7x is of whole hosts of 2x2 chips, tpu7x:2x2x1"),
        ("v5e:1x2", "2 chips; a slice of v5e is of whole hosts of 2x2 chips, v5e:1x1 would work"),
        ("v5e:3x4", "12 chips; a slice of v5e is of whole hosts of 2x2 chips, v5e:2x4 would work"),
    ],
)
def test_an_unknown_name_is_refused_with_a_valid_one(name, answer):
    with pytest.raises(ValueError) as error:
        topology_of(name)
    assert (
        answer in str(error.value)
        and repr(name) in str(error.value)
        and "\n" not in str(error.value)
    )


@pytest.mark.parametrize("name", ["v5p-32", "v4-16", "v6e-8", "v5litepod-16", "v3-32", "tpu7x-16"])
def test_slice_shapes_are_known_to_the_compiler(name):
    """The compiler describes each shape with the number of devices that the name implies."""
    topology = topology_of(name)
    assert len(topology_devices(topology)) == device_count(topology)
    assert accelerator_type(topology) == name


@pytest.mark.parametrize("topology", ["v5p:4x4x1", "h100:8", "v4:1x1x1"])
def test_other_shapes_have_no_accelerator_type(topology):
    assert accelerator_type(topology) is None


@pytest.mark.parametrize(
    ("topology", "larger"),
    [
        ("rtx4090:1", "rtx4090:4"),
        ("h100:8", "h100:4x8"),
        ("h100:3", "h100:4x3"),
        ("a100:2x8", "a100:8x8"),
        ("v5p:2x2x4", "4xv5p:2x2x4"),
        ("2xv5e:2x4", "8xv5e:2x4"),
    ],
)
def test_several_machines_are_hosts_or_slices(topology, larger):
    assert several_of(topology, 4) == larger
    assert device_count(larger) == 4 * device_count(topology)
