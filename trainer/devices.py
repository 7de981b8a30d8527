"""The facts of accelerators, for a run's MFU, for plans and for the cost model.

A "device" is JAX's: a core of a TPU v3 or an Ironwood (whose chips have two), a chip of other TPUs,
or a GPU.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One device, with the source of each figure.

    Attributes:
      kinds: prefixes of the `device_kind`s that JAX reports for it.
      peak_flops: dense bfloat16 FLOP/s.
      memory_gib: memory of the device (on a TPU, what a program may use); None if nothing needs it.
      memory_bandwidth: bytes/s between the device and its memory.
      link: bytes/s one way: of one inter-chip link of a TPU, or of all of a GPU's links in its
        server.
      slice_link: bytes/s one way that each device has between slices of TPUs, over the data-center
        network; None if not published.
      host_gib: each device's share of host memory; None if `box_host_gib` is shared instead.
      box_host_gib: memory of a whole host, shared by its eight GPUs.
      sources: field -> the source of its figure.
    """

    kinds: tuple[str, ...]
    peak_flops: float
    memory_bandwidth: float
    link: float
    memory_gib: float | None = None
    slice_link: float | None = None
    host_gib: float | None = None
    box_host_gib: float | None = None
    sources: dict[str, str] = dataclasses.field(default_factory=dict, compare=False, hash=False)

    @property
    def usable_gib(self) -> float | None:
        """Memory that a program may use."""
        return self.memory_gib


# The share of a GPU's memory that the launchers let JAX take and a plan may fill; JAX's default is
# 0.75. The rest is for CUDA's context, NCCL's buffers and cuBLAS. NVIDIA's tips for JAX use 0.8 or
# 0.9; NCCL's use was not measured.
GPU_MEMORY_SHARE = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu(Device):
    """A GPU, with the figures the CUDA compiler needs to compile without one.

    Attributes:
      product: the name that the driver reports.
      compute_capability: (major, minor).
      cores: streaming multiprocessors; fpus_per_core: float32 units of each.
      l2_cache: bytes; shared_memory_per_core: bytes, of which the system keeps 1 KiB.
      threads_per_core: threads that a core holds at once.
    """

    product: str
    compute_capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    clock_ghz: float
    l2_cache: int
    shared_memory_per_core: int
    threads_per_core: int = 2048

    @property
    def usable_gib(self) -> float | None:
        """Memory that a program may use under the launchers' settings."""
        return None if self.memory_gib is None else GPU_MEMORY_SHARE * self.memory_gib


_TORCH = "the total capacity in out-of-memory messages of PyTorch, public issues"
_LINKS = (
    "How To Scale Your Model, chapter TPUs, table of ICI bandwidth per link, one way "
    "(jax-ml.github.io/scaling-book/tpus)"
)


def _tpu(page: str, network: str = "", **facts) -> Device:
    """A TPU as on one of Google's pages; `network`: its words from which `slice_link` follows."""
    google = f"cloud.google.com/tpu/docs/{page}"
    return Device(
        **facts,
        sources={
            "peak_flops, memory_bandwidth": google,
            "host_gib": f"{google}, memory of a host divided by its devices",
            "memory_gib": "the available memory in the TPU compiler's refusal of a larger program",
            "link": _LINKS,
            **({"slice_link": f"{google}: {network}"} if network else {}),
        },
    )


def _gpu(sheet: str, bandwidth_source: str = "", **facts) -> Gpu:
    return Gpu(
        **facts,
        sources={
            "peak_flops, link": sheet,
            "memory_bandwidth": bandwidth_source or sheet,
            "memory_gib": "the memory that the driver reports",
            "box_host_gib": (
                "NVIDIA DGX user guides: 2 TB; that a program may use 1,920 GiB of them is assumed"
            ),
        },
    )


def _ada(sheet: str, **facts) -> Gpu:
    """A GPU of the Ada generation.

    The figures of its cores are from NVIDIA's Ada architecture whitepaper, and from the CUDA C++
    Programming Guide for compute capability 8.9.
    """
    return Gpu(
        **facts,
        compute_capability=(8, 9),
        fpus_per_core=128,
        clock_ghz=2.52,
        link=32e9,
        shared_memory_per_core=100 << 10,
        threads_per_core=1536,
        sources={
            "peak_flops, memory_bandwidth": sheet,
            "memory_gib": _TORCH,
            "link": "PCIe 4.0 x16: 32 GB/s one way",
        },
    )


# By their names in topologies (v4:4x4x4, a100:8).
TPUS: dict[str, Device] = {
    # A chip has 123 TFLOP/s and 900 GB/s for its two cores, each a device; links are per chip.
    "v3": _tpu(
        "v3",
        kinds=("TPU v3",),
        peak_flops=61.5e12,
        memory_gib=15.48,
        memory_bandwidth=450e9,
        link=100e9,
        host_gib=42,
    ),
    # Memory with one device per chip (megacore).
    "v4": _tpu(
        "v4",
        kinds=("TPU v4",),
        peak_flops=275e12,
        memory_gib=30.75,
        memory_bandwidth=1200e9,
        link=45e9,
        host_gib=100,
    ),
    "v5e": _tpu(
        "v5e",
        "data center network bandwidth per Pod (256 chips) 6.4 Tbps",
        kinds=("TPU v5 lite", "TPU v5e"),
        peak_flops=197e12,
        memory_gib=15.75,
        slice_link=3.125e9,
        memory_bandwidth=819e9,
        link=45e9,
        host_gib=48,
    ),
    # A v5p reports itself as "TPU v5".
    "v5p": _tpu(
        "v5p",
        "DCN bandwidth per chip 50 Gbps",
        kinds=("TPU v5p", "TPU v5"),
        peak_flops=459e12,
        memory_gib=95.73,
        slice_link=6.25e9,
        memory_bandwidth=2765e9,
        link=90e9,
        host_gib=112,
    ),
    "v6e": _tpu(
        "v6e",
        "data center network bandwidth per Pod (256 chips) 25.6 Tbps",
        kinds=("TPU v6 lite", "TPU v6e"),
        peak_flops=918e12,
        memory_gib=31.24,
        slice_link=12.5e9,
        memory_bandwidth=1640e9,
        link=90e9,
        host_gib=180,
    ),
    # Ironwood. A chip has 2,307 TFLOP/s and 7,380 GB/s for its two cores, each of them a device;
    # the links are per chip, as many as a v5p's and with the same total of 1,200 GB/s both ways.
    "tpu7x": _tpu(
        "tpu7x",
        "DCN bandwidth per chip (two devices) 100 Gbps",
        kinds=("TPU7x",),
        peak_flops=1153.5e12,
        memory_gib=94.74,
        slice_link=6.25e9,
        memory_bandwidth=3690e9,
        link=90e9,
        host_gib=120,
    ),
}
# TPUs whose chips are two devices.
TWO_DEVICES_A_CHIP = ("v3", "tpu7x")
_A100 = _gpu(
    "NVIDIA A100 datasheet, 80 GB SXM: 312 TFLOP/s bfloat16, 2,039 GB/s, NVLink 600 GB/s both "
    "ways together",
    kinds=("NVIDIA A100",),
    product="NVIDIA A100-SXM4-80GB",
    compute_capability=(8, 0),
    peak_flops=312e12,
    memory_gib=85_024_112_640 / 2**30,
    memory_bandwidth=2039e9,
    link=300e9,
    box_host_gib=1920,
    cores=108,
    fpus_per_core=64,
    clock_ghz=1.41,
    l2_cache=40 << 20,
    shared_memory_per_core=164 << 10,
)
GPUS: dict[str, Gpu] = {
    "a100": _A100,
    "a100-40gb": dataclasses.replace(
        _A100,
        kinds=("NVIDIA A100-SXM4-40GB",),
        product="NVIDIA A100-SXM4-40GB",
        memory_gib=39.39,
        memory_bandwidth=1555e9,
        box_host_gib=960,
        sources={
            "peak_flops, link, memory_bandwidth": "NVIDIA A100 datasheet, 40 GB SXM: 1,555 GB/s",
            "memory_gib": _TORCH,
            "box_host_gib": (
                "NVIDIA DGX A100 user guide, 320 GB: 1 TB; that a program may use 960 GiB of it "
                "is assumed"
            ),
        },
    ),
    "h100": _gpu(
        "NVIDIA H100 datasheet, SXM: 989 TFLOP/s bfloat16 dense, NVLink 900 GB/s both ways "
        "together",
        bandwidth_source=(
            "memory clock 2,619 MHz x 2 transfers x 5,120 bits; the datasheet rounds to 3.35 TB/s"
        ),
        kinds=("NVIDIA H100 80GB HBM3",),
        product="NVIDIA H100 80GB HBM3",
        compute_capability=(9, 0),
        peak_flops=989e12,
        memory_gib=84_978_434_048 / 2**30,
        memory_bandwidth=3352.32e9,
        link=450e9,
        box_host_gib=1920,
        cores=132,
        fpus_per_core=128,
        clock_ghz=1.98,
        l2_cache=50 << 20,
        shared_memory_per_core=228 << 10,
    ),
    "h200": _gpu(
        "NVIDIA H200 datasheet, SXM: 989 TFLOP/s bfloat16 dense, 4.8 TB/s, NVLink 900 GB/s both "
        "ways together",
        kinds=("NVIDIA H200",),
        product="NVIDIA H200",
        compute_capability=(9, 0),
        peak_flops=989e12,
        memory_gib=150_754_820_096 / 2**30,
        memory_bandwidth=4800e9,
        link=450e9,
        box_host_gib=1920,
        cores=132,
        fpus_per_core=128,
        clock_ghz=1.98,
        l2_cache=60 << 20,
        shared_memory_per_core=228 << 10,
    ),
    "rtx4090": _ada(
        "NVIDIA Ada architecture whitepaper: 165.2 TFLOP/s bfloat16 dense with float32 sums, "
        "1,008 GB/s",
        kinds=("NVIDIA GeForce RTX 4090",),
        product="NVIDIA GeForce RTX 4090",
        peak_flops=165.2e12,
        memory_gib=23.52,
        memory_bandwidth=1008e9,
        cores=128,
        l2_cache=72 << 20,
    ),
    "l40s": _ada(
        "NVIDIA L40S datasheet: 362 TFLOP/s bfloat16 dense, 864 GB/s",
        kinds=("NVIDIA L40S",),
        product="NVIDIA L40S",
        peak_flops=362e12,
        memory_gib=44.40,
        memory_bandwidth=864e9,
        cores=142,
        l2_cache=96 << 20,
    ),
    # The figures of its cores are from XLA's description (b200.txtpb).
    "b200": Gpu(
        kinds=("NVIDIA B200",),
        product="NVIDIA B200",
        compute_capability=(10, 0),
        peak_flops=2.25e15,
        memory_gib=180e9 / 2**30,
        memory_bandwidth=8e12,
        link=900e9,
        box_host_gib=1920,
        cores=148,
        fpus_per_core=128,
        clock_ghz=1.965,
        l2_cache=132_644_864,
        shared_memory_per_core=228 << 10,
        sources={
            "peak_flops, memory_bandwidth, link": (
                "NVIDIA HGX B200: 2.25 PFLOP/s bfloat16 dense and 1,800 GB/s of NVLink both ways "
                "per GPU; 8 TB/s"
            ),
            "memory_gib": "NVIDIA DGX B200 datasheet: 1,440 GB of 8 GPUs",
            "box_host_gib": (
                "NVIDIA DGX user guides: 2 TB or more; that a program may use 1,920 GiB of them "
                "is assumed"
            ),
        },
    ),
}
A100_PCIE = Device(
    kinds=("NVIDIA A100-PCIE", "NVIDIA A100 80GB PCIe"),
    peak_flops=312e12,
    memory_bandwidth=1935e9,
    link=32e9,
    sources={
        "peak_flops, memory_bandwidth, link": (
            "NVIDIA A100 datasheet, 80 GB PCIe: 312 TFLOP/s bfloat16, 1,935 GB/s, PCIe 4.0 x16 "
            "(32 GB/s one way)"
        )
    },
)
DEVICES: dict[str, Device] = {**TPUS, **GPUS, "a100-pcie": A100_PCIE}
# Slower devices whose kinds begin with a listed device's.
UNLISTED_KINDS = (
    "TPU v4 lite",
    "NVIDIA H200 NVL",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop",
)


def peak_flops(device_kind: str) -> float | None:
    """The dense bfloat16 FLOP/s of a device by JAX's `device_kind`; None for unlisted kinds.

    The longest listed prefix of the kind decides; upper and lower case are the same.
    """
    peaks: dict[str, float | None] = {
        kind: device.peak_flops for device in DEVICES.values() for kind in device.kinds
    }
    peaks |= dict.fromkeys(UNLISTED_KINDS)
    matches = [kind for kind in peaks if device_kind.upper().startswith(kind.upper())]
    return peaks[max(matches, key=len)] if matches else None
