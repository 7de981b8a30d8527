"""The network model: the time of a round's transfers on a torus of TPUs or on boxes of GPUs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from model.attention.schedules.plan import EXCHANGE, PERMUTE, Pairs, Send, groups, line_size

Lines = tuple[tuple[int, ...], ...]


class Collective(NamedTuple):
    """A gather or scatter within equal lines of ranks: a `Send` without its pairs, which would be
    millions on thousands of devices.

    Attributes:
      kind, nbytes: as in `Send`.
      lines: the ranks of each line.
    """

    kind: str
    nbytes: float
    lines: Lines


@dataclasses.dataclass(frozen=True)
class Network:
    """How the ranks are connected. Bandwidths are bytes/s one way, latencies are seconds.

    A torus: consecutive ranks are neighbours on a ring. A transfer between ranks further apart
    passes through those between them, the shorter way round. A collective has a torus axis to
    itself and uses both directions. (Times are upper bounds: several axes give distant ranks
    shorter ways, and a compiler can spread a collective over the axes.) Several tori (slices): what
    passes between slices also takes time on the data-center network; in a collective, each device
    receives the share of its counterpart in each other slice.

    Nodes (boxes of GPUs): within its node a rank is connected to all others. Between nodes,
    permutes and collectives differ: a pair of ranks uses one network card, a collective spreads
    over all cards of a node.

    Attributes:
      link: bandwidth of a link to a neighbour (torus), or of a rank within its node.
      latency: of a hop on the torus, or of a transfer within a node.
      torus: which of the two networks this is.
      far_exposed: on a torus, whether permutes that pass over a neighbour are not hidden.
      node: ranks in a node; 0 puts all of them in one.
      flow: the most that a rank receives from other nodes by permutes.
      uplink: the most that a node receives from other nodes.
      far_latency: of a transfer between nodes.
      slice: ranks in a slice; 0 puts all of them in one.
      slice_link: bandwidth of a rank between slices; their latency is not known, and left out.
    """

    link: float
    latency: float
    torus: bool = False
    far_exposed: bool = False
    node: int = 0
    flow: float = 0.0
    uplink: float = 0.0
    far_latency: float = 0.0
    slice: int = 0
    slice_link: float = 0.0

    def seconds(
        self,
        sends: Sequence[Send | Collective],
        ranks: int,
        devices: Sequence[int] | None = None,
    ) -> float:
        """The time of simultaneous transfers: that of the busiest link, plus the latencies.

        The latencies of permutes overlap; other collectives follow one another.

        Args:
          sends: the transfers, between ranks numbered from 0.
          ranks: how many ranks share the network.
          devices: the ranks' numbers among all devices, which put them in nodes or slices; None for
            0, 1, ...
        """
        sends = tuple(
            send for send in sends if send.nbytes and (isinstance(send, Collective) or send.pairs)
        )
        if not sends:
            return 0.0
        places = np.arange(ranks) if devices is None else np.array(devices)
        size = self.slice if self.torus else self.node
        parts = places // size if size else np.zeros_like(places)
        if not self.torus:
            return self._node_seconds(sends, parts)
        return self._torus_seconds(sends, ranks) + self._slice_seconds(sends, parts)

    def overlaps(self, send: Send, ranks: int) -> bool:
        """Whether a kernel can hide a transfer: only permutes, except by `far_exposed`."""
        if send.kind != PERMUTE:
            return False
        return not self.far_exposed or all(
            (target - source) % ranks in (1, ranks - 1) for source, target in send.pairs
        )

    def _torus_seconds(self, sends: Sequence[Send | Collective], ranks: int) -> float:
        # load_change[direction, i]: the load of link i less that of link i - 1, on the ring
        # unrolled twice.
        load_change = np.zeros((2, 2 * ranks + 1))
        shared_bytes, hops, farthest = 0.0, 0, 0
        for send in sends:
            if send.kind != PERMUTE:
                size = _line_size(send)
                # Both directions are used: a gather halves its P - 1 blocks; in an exchange a block
                # crosses P / 4 links on average.
                shared_bytes += send.nbytes * (
                    size**2 / 8 if send.kind == EXCHANGE else (size - 1) / 2
                )
                hops += size // 2
                continue
            sources, targets, *_ = _route(send)
            ahead = (targets - sources) % ranks
            backwards = 2 * ahead > ranks
            distance = np.where(backwards, ranks - ahead, ahead)
            first = np.where(backwards, targets, sources)
            np.add.at(load_change, (backwards.astype(int), first), send.nbytes)
            np.add.at(load_change, (backwards.astype(int), first + distance), -send.nbytes)
            farthest = max(farthest, int(distance.max()))
        load = load_change.cumsum(1)
        load = load[:, :ranks] + load[:, ranks:-1]
        return float((load.max() + shared_bytes) / self.link + (hops + farthest) * self.latency)

    def _slice_seconds(self, sends: Sequence[Send | Collective], slices: np.ndarray) -> float:
        """The time between slices, given each rank's."""
        if (slices == slices[0]).all():
            return 0.0
        received = np.zeros(len(slices))
        for send in sends:
            if isinstance(send, Collective) or send.kind not in (PERMUTE, EXCHANGE):
                lines = send.lines if isinstance(send, Collective) else groups(send.pairs)
                others = max(len({slices[rank] for rank in line}) for line in lines) - 1
                received += others * send.nbytes
            else:
                sources, targets = _ends(send.pairs)
                far = slices[sources] != slices[targets]
                np.add.at(received, targets[far], send.nbytes)
        return float(received.max() / self.slice_link)

    def _node_seconds(self, sends: Sequence[Send | Collective], node: np.ndarray) -> float:
        """The time on boxes of GPUs, given each rank's node."""
        ranks = len(node)
        near_bytes = np.zeros(ranks)
        permuted_bytes = np.zeros(ranks)
        node_bytes = np.zeros(node.max() + 1)
        collective_latency, permute_latency = 0.0, 0.0
        for send in sends:
            sources, targets, times, steps = _route(send)
            far = node[sources] != node[targets]
            np.add.at(near_bytes, targets[~far], times * send.nbytes)
            np.add.at(node_bytes, node[targets[far]], times * send.nbytes)
            latency = steps * (self.far_latency if far.any() else self.latency)
            if send.kind == PERMUTE:
                np.add.at(permuted_bytes, targets[far], send.nbytes)
                permute_latency = max(permute_latency, latency)
            else:
                collective_latency += latency
        seconds = near_bytes.max() / self.link
        if node_bytes.any():
            # Ranks that are not listed send as much at the same time.
            uplinks = self.uplink * np.bincount(node, minlength=len(node_bytes)) / self.node
            used = node_bytes > 0
            far_seconds = (node_bytes[used] / uplinks[used]).max()
            seconds = max(seconds, far_seconds, permuted_bytes.max() / self.flow)
        return float(seconds + collective_latency + permute_latency)


def _line_size(send: Send | Collective) -> int:
    return len(send.lines[0]) if isinstance(send, Collective) else line_size(send.pairs)


def _route(send: Send | Collective) -> tuple[np.ndarray, np.ndarray, int, int]:
    """How a transfer moves its bytes between neighbours: (sources, targets, times, steps).

    Each pair (source, target) moves its bytes `times` times; that takes `steps` steps. Permutes and
    all-to-alls go directly; every other collective passes along its line of n ranks, in which each
    sends n - 1 times to the next.
    """
    if isinstance(send, Collective):
        return _along(send.lines)
    if send.kind in (PERMUTE, EXCHANGE):
        return *_ends(send.pairs), 1, 1
    return _along(groups(send.pairs))


@functools.lru_cache(maxsize=256)
def _ends(pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """The pairs' sources and targets."""
    sources, targets = np.array(pairs).T
    return sources, targets


@functools.lru_cache(maxsize=256)
def _along(lines: Lines) -> tuple[np.ndarray, np.ndarray, int, int]:
    """`_route` along lines of ranks."""
    steps = max(map(len, lines)) - 1
    targets = np.concatenate([np.roll(line, -1) for line in lines])
    return np.concatenate(lines), targets, steps, steps
