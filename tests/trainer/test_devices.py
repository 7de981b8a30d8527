"""Tests of trainer/devices.py: lookup by the kind that JAX reports, and a source for every
figure."""

import pytest

from trainer.devices import DEVICES, GPUS, peak_flops


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("TPU v3", 61.5),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5p", 459),
        ("TPU v5", 459),
        ("TPU v6 lite", 918),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("cpu", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("TPU v4 lite", None),
    ],
)
def test_peaks(kind, tflops):
    assert peak_flops(kind) == (tflops * 1e12 if tflops else None)


@pytest.mark.parametrize("name", DEVICES)
def test_every_figure_of_a_device_has_a_source(name):
    device = DEVICES[name]
    sourced = ", ".join(device.sources).split(", ")
    figures = ("peak_flops", "memory_gib", "memory_bandwidth", "link", "host_gib", "box_host_gib")
    figures += ("slice_link",)
    assert {figure for figure in figures if getattr(device, figure) is not None} == set(sourced)
    assert all(len(source) > 10 for source in device.sources.values())


def test_a_gpu_is_found_by_the_name_that_its_driver_reports():
    assert {name: peak_flops(gpu.product) for name, gpu in GPUS.items()} == {
        name: gpu.peak_flops for name, gpu in GPUS.items()
    }
    assert all(gpu.memory_gib for gpu in GPUS.values())
