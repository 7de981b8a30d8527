"""Machines of the cost model: rates, memory and networks, each figure with where it comes from.

Nothing here is fitted to a paper's row. Where no published figure was found, the source says so.
"""
from __future__ import annotations

import dataclasses
import functools

import numpy as np

from model.attention.schedules.plan import EXCHANGE, PERMUTE, Pairs, Send, groups

GB, TERA, MICRO = 1e9, 1e12, 1e-6


@functools.lru_cache(maxsize=256)
def _route(kind: str, pairs: Pairs) -> tuple[np.ndarray, np.ndarray, int, int]:
    """(sources, targets, times, steps): each of these pairs of ranks moves a send's bytes so many times, in so many steps.

    All but permutes and all-to-alls go round their lines of n ranks, in which everyone sends n - 1 times to the next.
    """
    if kind in (PERMUTE, EXCHANGE):
        return *np.array(pairs).T, 1, 1
    lines = groups(pairs)
    times = max(map(len, lines)) - 1
    return np.concatenate(lines), np.concatenate([np.roll(line, -1) for line in lines]), times, times


@dataclasses.dataclass(frozen=True)
class Network:
    """How ranks are joined. Bandwidths are one way, in bytes/s.

    A torus: ranks in their order are a ring of neighbours; a pair further apart passes through those between, the shorter
    way round. A collective has an axis of the torus to itself and goes both ways round it. (Upper bounds: on more than one
    axis there are shorter ways between distant ranks, and a compiler can spread a collective over the axes.)
    Nodes: inside a node every rank has `link` to the others. From other nodes a node receives at most `uplink`, and by permutes
    each rank at most `flow` (a collective spreads over all of a node's network cards, one pair of ranks uses one).
    """

    link: float
    latency: float
    torus: bool = False
    node: int = 0
    flow: float = 0.0
    uplink: float = 0.0
    far_latency: float = 0.0

    def seconds(self, sends: tuple[Send, ...], ranks: int) -> float:
        """Time of transfers between ranks that share the network, from the busiest link of any kind.

        Latencies of permutes pass at the same time; other collectives follow each other.
        """
        sends = tuple(send for send in sends if send.pairs and send.nbytes)
        return (self._torus if self.torus else self._nodes)(sends, ranks) if sends else 0.0

    def _torus(self, sends, ranks):
        change = np.zeros((2, 2 * ranks + 1))  # of the load from link to link, forwards and backwards, on the ring unrolled
        shared, hops, farthest = 0.0, 0, 0
        for send in sends:
            if send.kind != PERMUTE:
                size = len(groups(send.pairs)[0])
                # Both ways round: a gather halves its P - 1 blocks; in an exchange a block travels P / 4 links on average.
                shared += send.nbytes * (size**2 / 8 if send.kind == EXCHANGE else (size - 1) / 2)
                hops += size // 2
                continue
            source, target, *_ = _route(send.kind, send.pairs)
            ahead = (target - source) % ranks
            back = 2 * ahead > ranks
            distance = np.where(back, ranks - ahead, ahead)
            first = np.where(back, target, source)
            np.add.at(change, (back.astype(int), first), send.nbytes)
            np.add.at(change, (back.astype(int), first + distance), -send.nbytes)
            farthest = max(farthest, int(distance.max()))
        load = change.cumsum(1)
        load = load[:, :ranks] + load[:, ranks:-1]
        return (load.max() + shared) / self.link + (hops + farthest) * self.latency

    def _nodes(self, sends, ranks):
        node = np.arange(ranks) // (self.node or ranks)
        into, flow, uplink = np.zeros(ranks), np.zeros(ranks), np.zeros(node[-1] + 1)
        latency, together = 0.0, 0.0
        for send in sends:
            source, target, times, steps = _route(send.kind, send.pairs)
            far = node[source] != node[target]
            np.add.at(into, target[~far], times * send.nbytes)
            np.add.at(uplink, node[target[far]], times * send.nbytes)
            wait = steps * (self.far_latency if far.any() else self.latency)
            if send.kind == PERMUTE:
                np.add.at(flow, target[far], send.nbytes)
                together = max(together, wait)
            else:
                latency += wait
        seconds = into.max() / self.link
        if uplink.any():
            seconds = max(seconds, uplink.max() / self.uplink, flow.max() / self.flow)
        return seconds + latency + together


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One device and what joins it to the others.

    Attributes:
      peak: dense bfloat16 FLOP/s.
      matmul: share of `peak` that large matrix products reach.
      attention, attention_backward: share of `peak` that an attention kernel reaches on the tiles that it computes.
      memory_bandwidth: bytes/s.
      tile: queries x keys of the tile that the kernel skips or computes whole.
      network: as above.
      sources: where each of these comes from.
    """

    peak: float
    matmul: float
    attention: float
    attention_backward: float
    memory_bandwidth: float
    tile: tuple[int, int]
    network: Network
    sources: dict[str, str] = dataclasses.field(compare=False, hash=False)


_BOOK = "How To Scale Your Model, chapter TPUs, table of ICI bandwidth per link, one way (jax-ml.github.io/scaling-book/tpus)"
_JAX = ("JAX's Pallas guide 'Matrix Multiplication': XLA's bfloat16 product of 8192 x 8192 on a v5e, 92.3% of its peak "
        "(docs.jax.dev/en/latest/pallas/tpu/matmul.html); taken over for the other TPUs")
_NO_KERNEL = "no published figure of a kernel at such lengths was found: the rate of matrix products, an upper bound"
_HOP = "How To Scale Your Model, chapter on inference: about 1 microsecond a hop (jax-ml.github.io/scaling-book)"
_FA2 = ("FlashAttention-2, arXiv 2307.08691, sections 1 and 4.1: up to 73% forward and 63% backward on an A100, "
        "the backward counted as 2.5 forwards")
_GEMM = "FlashAttention-2, section 1: optimised GEMM reaches 80-90%; the lower end"
_TCP = ("NVIDIA/nccl issue 464: over TCP on a 100 Gbit/s card ncclSend to one rank reaches 28 Gbit/s, an all-reduce over 50; "
        "more threads did not help. So a rank has 28 here, and a collective all of the card")
_NCCL = "NCCL's own model of a ring (src/graph/tuning.cc, hwLat, protocol Simple): 3.4 us over NVLink, 5.7 PCIe, 9.6 network"


def _tpu(peak, bandwidth, link, page) -> Hardware:
    return Hardware(
        peak * TERA, 0.923, 0.923, 0.923, bandwidth * GB, (1024, 1024),
        Network(link * GB, 1 * MICRO, torus=True),
        {"peak, memory_bandwidth": f"cloud.google.com/tpu/docs/{page}", "matmul": _JAX, "attention": _NO_KERNEL, "link": _BOOK,
         "latency": _HOP, "tile": "what this project's kernels are compiled with for TPUs (scripts/plan.py)"},
    )  # fmt: skip


def _gpu(tflops, rates, bandwidth, network, **sources) -> Hardware:
    return Hardware(tflops * TERA, 0.80, *rates, bandwidth * GB, (128, 128), network,
                    {"matmul": _GEMM, "attention": _FA2, "latency": _NCCL,
                     "tile": "FlashAttention-2, section 3.3: blocks of 64 or 128; DistFlashAttn, section 4.1: 128", **sources})


_A100 = "NVIDIA A100 datasheet, 80 GB SXM: 312 TFLOP/s bfloat16, 2,039 GB/s, NVLink 600 GB/s both ways"
_H100 = "NVIDIA H100 datasheet, SXM: 989 TFLOP/s bfloat16 dense, 3.35 TB/s, NVLink 900 GB/s both ways"
_FA2_H100 = ("FlashAttention-3, arXiv 2407.08608, abstract: FlashAttention-2 reaches 35% on an H100 (the kernel of the papers "
             "here); FlashAttention-3 up to 75%")

HARDWARE: dict[str, Hardware] = {
    # A v3 device is one of the two cores of a chip: half of the chip's 123 TFLOP/s and 900 GB/s; links are the chip's.
    "v3": _tpu(61.5, 450, 100, "v3"),
    "v4": _tpu(275, 1200, 45, "v4"),
    "v5e": _tpu(197, 819, 45, "v5e"),
    "v5p": _tpu(459, 2765, 90, "v5p"),
    "v6e": _tpu(918, 1640, 90, "v6e"),
    "a100-nvlink": _gpu(312, (0.73, 0.63), 2039, Network(300 * GB, 3.4 * MICRO), peak=_A100),
    # DGX A100: eight GPUs, a network card for each; at 100 Gbit/s as in DistFlashAttn section 4 and Ring Attention Table 2.
    "a100-infiniband": _gpu(312, (0.73, 0.63), 2039,
                            Network(300 * GB, 3.4 * MICRO, node=8, flow=12.5 * GB, uplink=100 * GB, far_latency=9.6 * MICRO),
                            peak=_A100, flow="HDR100 InfiniBand, 100 Gbit/s; one card a GPU as in a DGX A100 (assumed)"),
    # Attention2D section 4.1: nodes of four A100 over PCIe, Ethernet of unnamed speed. Azure sells just such a node.
    "a100-ethernet": _gpu(312, (0.73, 0.63), 1935,
                          Network(32 * GB, 5.7 * MICRO, node=4, flow=3.5 * GB, uplink=10 * GB, far_latency=9.6 * MICRO),
                          peak="NVIDIA A100 datasheet, 80 GB PCIe: 312 TFLOP/s, 1,935 GB/s, PCIe 4.0 x16 (32 GB/s one way)",
                          flow=_TCP, uplink="Azure NC96ads_A100_v4: four A100 PCIe, 80 Gbit/s (learn.microsoft.com); assumed"),
    "h100-infiniband": _gpu(989, (0.35, 0.35), 3350,
                            Network(450 * GB, 3.4 * MICRO, node=8, flow=50 * GB, uplink=400 * GB, far_latency=9.6 * MICRO),
                            peak=_H100, attention=_FA2_H100, flow="NVIDIA DGX H100 user guide: NDR 400 Gbit/s, one card a GPU"),
    # Attention2D section 4.3: nodes of one H100, Ethernet of unnamed speed.
    "h100-ethernet": _gpu(989, (0.35, 0.35), 3350,
                          Network(450 * GB, 9.6 * MICRO, node=1, flow=3.5 * GB, uplink=5 * GB, far_latency=9.6 * MICRO),
                          peak=_H100, attention=_FA2_H100, flow=_TCP,
                          uplink="Azure NC40ads_H100_v5: one H100, 40 Gbit/s Ethernet (learn.microsoft.com); assumed"),
}
