"""Devices that are not there: TPU pods and GPU boxes as their compilers describe them. The one file that knows how to ask.

A step lowered for such devices is compiled by the real compiler: its memory plan, its collectives and their schedule are those
of the machine. TPUs need the `libtpu` wheel, GPUs jax's CUDA plugin and its compiler's wheels; neither needs the device.
"""
from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys


@dataclasses.dataclass(frozen=True)
class GpuChip:
    """Datasheet figures of one GPU, as the CUDA compiler asks for them."""

    name: str
    compute_capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    clock_ghz: float
    memory_bytes: int
    memory_bandwidth: int  # bytes a second
    l2_cache: int
    shared_memory_per_core: int

    def target(self) -> str:
        """The compiler's text form (GpuTargetConfigProto). 1 KiB of a core's shared memory is the system's own."""
        major, minor = self.compute_capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
              shared_memory_per_block: 49152  shared_memory_per_core: {self.shared_memory_per_core}
              shared_memory_per_block_optin: {self.shared_memory_per_core - 1024}
              core_count: {self.cores}  fpus_per_core: {self.fpus_per_core}
              block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
              registers_per_core_limit: 65536  registers_per_block_limit: 65536
              memory_bandwidth: {self.memory_bandwidth}  l2_cache_size: {self.l2_cache}
              clock_rate_ghz: {self.clock_ghz}  device_memory_size: {self.memory_bytes}
              cuda_compute_capability {{ major: {major} minor: {minor} }}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 8 }}
            device_description_str: "{self.name}"
            """


# From NVIDIA's datasheets and architecture papers of A100 (2020), H100 (2022), H200 (2023); memory as the driver reports it.
GPUS = {
    "a100": GpuChip("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 85_024_112_640, 2_039_000_000_000, 40 << 20, 164 << 10),
    "h100": GpuChip("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 84_978_434_048, 3_352_320_000_000, 50 << 20, 228 << 10),
    "h200": GpuChip("NVIDIA H200", (9, 0), 132, 128, 1.98, 150_754_820_096, 4_800_000_000_000, 60 << 20, 228 << 10),
}
# What a program may use of a TPU's memory; v4 as megacore: one device a chip. From the compiler's own refusals.
TPU_MEMORY_GIB = {"v3": 15.48, "v4": 30.75, "v5e": 15.75, "v5p": 95.73, "v6e": 31.24}


# Of the host's memory for each device, by Google's documentation of its TPU hosts; a v3 device is one of a chip's two cores.
TPU_HOST_GIB = {"v3": 42, "v4": 100, "v5e": 48, "v5p": 112, "v6e": 180}
DGX_HOST_GIB = 1920  # of the 2 TB of NVIDIA's DGX, for all of its GPUs that are used


def host_gib(topology: str) -> float | None:
    """Of the host's memory for each device of this topology, in GiB; None where it is not known here."""
    generation, _, shape = topology.partition(":")
    generation = _slices(generation)[1]
    if generation in GPUS:
        return DGX_HOST_GIB / int(shape.rpartition("x")[2])
    return TPU_HOST_GIB.get(generation)


def memory_gib(topology: str) -> float | None:
    """What a device of this topology has, in GiB; None where it is not known here."""
    generation = _slices(topology.split(":")[0])[1]
    if generation in GPUS:
        return GPUS[generation].memory_bytes / 2**30
    return TPU_MEMORY_GIB.get(generation)


def _slices(generation: str) -> tuple[int, str]:
    """2xv5e -> (2, v5e)."""
    found = re.fullmatch(r"(\d+)x(\w+)", generation)
    return (int(found[1]), found[2]) if found else (1, generation)


def topology_devices(name: str):
    """Devices of a topology: TPUs as generation:shape (v4:4x4x4, v5e:16x16) or several slices of it (2xv5e:16x16), GPUs as
    chip:number or chip:hosts x GPUs a host (h100:8, a100:4x8).

    Raises:
      ValueError: one that the compiler does not know, or whose compiler is not installed.
    """
    generation, _, shape = name.partition(":")
    return _gpus(name, generation, shape) if generation in GPUS else _tpus(name, generation, shape)


def _tpus(name: str, generation: str, shape: str):
    from jax.experimental import topologies

    # Several processes may hold the compiler at once, and none of them has a TPU to ask about itself.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    slices, generation = _slices(generation)
    options = {"chip_config_name": "megacore"} if generation == "v4" else {}
    try:
        with _unheard():
            return topologies.get_topology_desc(platform="tpu", topology_name=f"{generation}:{shape}", num_slices=slices,
                                                **options).devices
    except Exception as error:
        raise ValueError(f"topology: {name!r} is not known to the TPU compiler ({str(error).splitlines()[0]}); write "
                         "generation:shape, such as v4:4x4x4 or v5e:16x16 (the compiler comes with `libtpu`), or "
                         f"chip:number for GPUs ({', '.join(GPUS)})") from None


@contextlib.contextmanager
def _unheard():
    """What the TPU compiler writes to stderr of a machine without a TPU looks like a failure, and is none."""
    sys.stderr.flush()
    own, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)
        os.close(nowhere)


def _gpus(name: str, chip: str, shape: str):
    from jax.experimental import topologies

    hosts, _, each = shape.rpartition("x")
    if not (each.isdigit() and (hosts or "1").isdigit()):
        raise ValueError(f"topology: found {name!r}; write {chip}:8 for 8 GPUs of one host, {chip}:4x8 for 4 hosts of 8")
    # Nothing can be tried out on a GPU that is not there; the scheduler that overlaps transfers is what a run would use.
    flags = "--xla_gpu_autotune_level=0 --xla_gpu_enable_latency_hiding_scheduler=true"
    given = os.environ.get("XLA_FLAGS", "")
    if flags not in given:
        os.environ["XLA_FLAGS"] = f"{flags} {given}"  # what the user has set comes last, and so wins
    try:
        return topologies.get_topology_desc(platform="cuda", topology_name=chip, target_config=GPUS[chip].target(),
                                            topology=f"1x{hosts or 1}x{each}").devices
    except Exception as error:
        raise ValueError(f"topology: {name!r} needs the CUDA compiler ({str(error).splitlines()[0]}); "
                         "make install PLATFORM=cuda brings it, and needs no GPU") from None
