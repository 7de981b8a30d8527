"""The cost model's machines: a device, its kernels' rates, and the network between devices.

Every constant comes from a vendor's sheet, a compiled text or a named measurement. A few were set
after comparing the papers' rows with the model's; a comment says so at each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trainer.devices import DEVICES, Device

from .kernel_rates import MatrixUnits, kernel_rates
from .network import Network

GIGA, MICRO = 1e9, 1e-6


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One device, the rates its kernels reach, and its network.

    Attributes:
      device: peak and memory bandwidth.
      matmul: share of the peak that large matrix products reach.
      attention, attention_backward: share of the peak that an attention kernel reaches on the tiles
        that it computes.
      tile: (queries, keys) of the unit that the kernel either skips or computes whole.
      matrix_units: of a TPU's core; None on GPUs.
      fused_cores: cores of a chip that share the pairs of a batch row and a key head, if one kernel
        computes attention's whole backward pass when they divide evenly; 0 if two kernels do.
      small_heads: (largest size, forward, backward): attention's rates for heads up to that size,
        whose softmax takes as long as their products; None if one rate holds for all.
      between_products: bytes a layer's forward pass moves outside products and attention (norms,
        rotary embedding, activations, casts, copies), per token and hidden element; 0 if not
        measured.
      network: the connections between devices.
      sources: figure -> its source, including the device's.
    """

    device: Device
    matmul: float
    attention: float
    attention_backward: float
    tile: tuple[int, int]
    network: Network
    sources: dict[str, str] = dataclasses.field(compare=False, hash=False)
    matrix_units: MatrixUnits | None = None
    fused_cores: int = 0
    small_heads: tuple[int, float, float] | None = None
    between_products: float = 0.0

    def attention_rates(self, head_dim: int) -> tuple[float, float]:
        """The shares of the peak that attention reaches with such heads, forward and backward."""
        if self.small_heads and head_dim <= self.small_heads[0]:
            return self.small_heads[1:]
        return self.attention, self.attention_backward

    def filled(self, head_dim: int) -> float:
        """The share of a matrix unit that an attention kernel's products use; 1 on GPUs."""
        return self.matrix_units.filled(head_dim) if self.matrix_units else 1.0

    @property
    def peak(self) -> float:
        """Dense bfloat16 FLOP/s of the device."""
        return self.device.peak_flops

    @property
    def memory_bandwidth(self) -> float:
        """Bytes/s between the device and its memory."""
        return self.device.memory_bandwidth


_JAX = (
    "JAX's Pallas guide 'Matrix Multiplication': XLA's bfloat16 product of 8192 x 8192 on a v5e, "
    "92.3% of its peak (docs.jax.dev/en/latest/pallas/tpu/matmul.html); assumed for the other TPUs"
)
_MATMUL = 0.923
_CYCLES = (
    "our kernels' bundles per tile (planning/costs/kernel_cycles.json, docs/notes/kernels.md), at "
    "most the rate of matrix products; an upper bound, without waits for memory and the work "
    "between tiles"
)
_NO_KERNEL = (
    "no kernel's rate at such lengths was found: the rate of matrix products, an upper bound"
)
_HOP = (
    "How To Scale Your Model, chapter on inference: about 1 microsecond a hop "
    "(jax-ml.github.io/scaling-book)"
)
_FA2 = (
    "FlashAttention-2, arXiv 2307.08691, sections 1 and 4.1: up to 73% forward and 63% backward on "
    "an A100, the backward counted as 2.5 forwards"
)
_FA2_H100 = (
    "FlashAttention-3, arXiv 2407.08608, abstract: FlashAttention-2 reaches 35% on an H100 (the "
    "kernel that the papers use); FlashAttention-3 reaches up to 75%"
)
_GEMM = "FlashAttention-2, section 1: optimized GEMM reaches 80-90%; the lower end"
_NCCL = (
    "NCCL's own model of a ring (src/graph/tuning.cc, hwLat, protocol Simple): 3.4 us over "
    "NVLink, 5.7 PCIe, 9.6 network"
)
_TCP = (
    "NVIDIA/nccl issue 464: over TCP on a 100 Gbit/s card ncclSend to one rank reaches 28 Gbit/s, "
    "an all-reduce over 50; more threads did not help. A rank is therefore given 28 Gbit/s, and a "
    "collective all of the card"
)


def _tpu(
    name: str, units: MatrixUnits, tile: int = 512, *, fused_cores: int, far_exposed: bool = False
) -> Hardware:
    """A TPU, whose network is a torus of its links."""
    device = DEVICES[name]
    rates = kernel_rates(name, units)
    forward, backward = (min(rate, _MATMUL) for rate in rates or (1.0, 1.0))
    return Hardware(
        device,
        _MATMUL,
        forward,
        backward,
        (tile, tile),
        Network(
            device.link,
            1 * MICRO,
            torus=True,
            far_exposed=far_exposed,
            slice_link=device.slice_link or 0.0,
        ),
        {
            **device.sources,
            "matmul": _JAX,
            "attention": _CYCLES if rates else _NO_KERNEL,
            "latency": _HOP,
            "matrix_units": (
                f"cloud.google.com/tpu/docs/{name}: {units.count} of {units.size} x {units.size} "
                "per core; rows per cycle: 16 bundles between two products of 16 rows in the texts "
                "compiled for v5p, 8 for v6e"
            ),
            "far_exposed": (
                "compiled texts of v5e:8x8 (docs/results/placement.json): a kernel hides 12% of "
                "the bytes of `balanced`, none of attention2d's overlap, all of the ring; v6e "
                "routes as v5e does"
            ),
            "tile": (
                "model/attention/kernels/tpu_options.py: the parts in which tiles of 1024 are "
                "masked; on v3 whole tiles"
            ),
        },
        units,
        fused_cores,
    )


def _gpu(
    name: str,
    rates: tuple[float, float],
    latency: float,
    sources: dict[str, str],
    measured: Mapping[str, Any] = MappingProxyType({"matmul": 0.80}),
    **between_nodes,
) -> Hardware:
    """A GPU, in one box or in several.

    Args:
      rates: attention's shares of the peak, forward and backward.
      latency: within a box.
      measured: `matmul`, and further fields of Hardware that a profile of this GPU gave.
      between_nodes: further fields of Network.
    """
    device = DEVICES[name]
    further = dict(measured)
    return Hardware(
        device,
        further.pop("matmul"),
        *rates,
        (128, 128),
        Network(device.link, latency, **between_nodes),
        {
            **device.sources,
            "matmul": _GEMM,
            "attention": _FA2,
            "latency": _NCCL,
            "tile": (
                "FlashAttention-2, section 3.3: blocks of 64 or 128; DistFlashAttn, section 4.1: "
                "128"
            ),
            **sources,
        },
        **further,
    )


_A100_RATES, _FA2_H100_RATES = (0.73, 0.63), (0.35, 0.35)
# From profiles by kernel of two steps on an H200 (docs/notes/h200.md), of 989 TFLOP/s. Eight layers
# of 8B at 32K: attention forward 128.1 ms, backward (seven products) 414.7, products 588, and 128
# between them apart from the optimizer's 16, which over three passes, 8 layers, 32,768 tokens and a
# width of 4,096 are 190 bytes at 4.8 TB/s. Llama 3.2 1B at 32K, heads of 64: 177.6 and 492.3 ms.
_OUR_RATES = (0.556, 0.600)
_OUR_PROFILE = MappingProxyType(
    {"matmul": 0.767, "small_heads": (64, 0.400, 0.506), "between_products": 190.0}
)
_PROFILE = "a profile by kernel of our step on an H200 (docs/notes/h200.md)"
_OURS = {"attention": _PROFILE, "matmul": _PROFILE}
_TAKEN_OVER = "no published figure of such a kernel on this GPU was found; assumed: "
_INFINIBAND: dict[str, Any] = {"node": 8, "far_latency": 9.6 * MICRO}

HARDWARE: dict[str, Hardware] = {
    "v3": _tpu("v3", MatrixUnits(2, 128), 1024, fused_cores=0),
    "v4": _tpu("v4", MatrixUnits(4, 128), fused_cores=2),
    "v5p": _tpu("v5p", MatrixUnits(4, 128), fused_cores=2),
    "v5e": _tpu("v5e", MatrixUnits(4, 128), fused_cores=1, far_exposed=True),
    "v6e": _tpu("v6e", MatrixUnits(2, 256, rows=2), fused_cores=1, far_exposed=True),
    "tpu7x": _tpu("tpu7x", MatrixUnits(2, 256, rows=2), fused_cores=1),
    "a100-nvlink": _gpu("a100", _A100_RATES, 3.4 * MICRO, {}),
    # DGX A100: eight GPUs, each with a network card of 100 Gbit/s, as in DistFlashAttn, section 4,
    # and Ring Attention, Table 2.
    "a100-infiniband": _gpu(
        "a100",
        _A100_RATES,
        3.4 * MICRO,
        {"flow": "HDR100 InfiniBand, 100 Gbit/s; one card per GPU as in a DGX A100 (assumed)"},
        flow=12.5 * GIGA,
        uplink=100 * GIGA,
        **_INFINIBAND,
    ),
    # Attention2D, section 4.1: nodes of four A100 over PCIe, Ethernet of unnamed speed.
    "a100-ethernet": _gpu(
        "a100-pcie",
        _A100_RATES,
        5.7 * MICRO,
        {
            "flow": _TCP,
            "uplink": "Azure NC96ads_A100_v4: four A100, 80 Gbit/s (learn.microsoft.com); assumed",
        },
        # Both were set after the rows of Attention2D's Figure 4 had been seen. uplink: the paper
        # names no speed; this is a cloud node's of the same kind. flow: first the uplink's speed,
        # then the measured speed of one TCP connection.
        node=4,
        flow=3.5 * GIGA,
        uplink=10 * GIGA,
        far_latency=9.6 * MICRO,
    ),
    "h100-infiniband": _gpu(
        "h100",
        _OUR_RATES,
        3.4 * MICRO,
        {
            **dict.fromkeys(_OURS, _PROFILE + "; the H100 has the same cores"),
            "flow": "NVIDIA DGX H100 user guide: NDR 400 Gbit/s, one card per GPU",
        },
        _OUR_PROFILE,
        flow=50 * GIGA,
        uplink=400 * GIGA,
        **_INFINIBAND,
    ),
    "a100-40gb-nvlink": _gpu("a100-40gb", _A100_RATES, 3.4 * MICRO, {}),
    "a100-40gb-infiniband": _gpu(
        "a100-40gb",
        _A100_RATES,
        3.4 * MICRO,
        {"flow": "HDR100 InfiniBand, as for a100-infiniband"},
        flow=12.5 * GIGA,
        uplink=100 * GIGA,
        **_INFINIBAND,
    ),
    "h200-infiniband": _gpu(
        "h200",
        _OUR_RATES,
        3.4 * MICRO,
        {**_OURS, "flow": "NVIDIA DGX H200 user guide: NDR 400 Gbit/s"},
        _OUR_PROFILE,
        flow=50 * GIGA,
        uplink=400 * GIGA,
        **_INFINIBAND,
    ),
    "b200-infiniband": _gpu(
        "b200",
        _FA2_H100_RATES,
        3.4 * MICRO,
        {
            "attention": _TAKEN_OVER + _FA2_H100,
            "flow": "NVIDIA DGX B200 user guide: NDR 400 Gbit/s, one card per GPU",
        },
        flow=50 * GIGA,
        uplink=400 * GIGA,
        **_INFINIBAND,
    ),
    # One box of PCIe cards; several such boxes are not modelled.
    "rtx4090": _gpu("rtx4090", _A100_RATES, 5.7 * MICRO, {"attention": _TAKEN_OVER + _FA2}),
    "l40s": _gpu("l40s", _A100_RATES, 5.7 * MICRO, {"attention": _TAKEN_OVER + _FA2}),
    # Attention2D, section 4.3: nodes of one H100, Ethernet of unnamed speed.
    "h100-ethernet": _gpu(
        "h100",
        _FA2_H100_RATES,
        9.6 * MICRO,
        {
            "attention": _FA2_H100,
            "flow": _TCP,
            "uplink": (
                "Azure NC40ads_H100_v5: one H100, 40 Gbit/s Ethernet (learn.microsoft.com); assumed"
            ),
        },
        # Both were set after the rows of Attention2D's Figure 6 had been seen, as for
        # a100-ethernet.
        node=1,
        flow=3.5 * GIGA,
        uplink=5 * GIGA,
        far_latency=9.6 * MICRO,
    ),
}
