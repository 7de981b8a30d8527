"""Adds up a training step's time, from rounds to layers to the step, and its network waits."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from model.attention.coords import Mask
from model.attention.schedules import Schedule
from model.attention.schedules.plan import GATHER, SCATTER, Block
from model.config import TransformerConfig
from model.memory.policies import POLICIES, RematPolicy
from trainer.flops import (
    all_layers,
    head_weights,
    layer_weights,
    stored_layer_weights,
    training_flops,
    visible_pairs,
)
from trainer.mesh import ORDER

from .hardware import Hardware
from .kernel_rates import FORWARD_PRODUCTS, ONE_BACKWARD_KERNEL, TWO_BACKWARD_KERNELS
from .network import Collective, Lines, Network
from .rounds import Round, rounds

# AdamW in float32 reads the parameter, two moments and the gradient of each weight, and writes
# three of them.
OPTIMIZER_BYTES = 28
# Adding a part's float32 gradient to the sum reads two numbers of each weight, and writes one.
ADDED_GRADIENT_BYTES = 12


def _forwards(policy: RematPolicy) -> tuple[int, int]:
    """A layer's compute in a whole step, in forward passes: (position-wise work, attention).

    One forward pass, one more for each recomputation, and two for the backward pass of
    position-wise work; attention's backward pass is counted separately.
    """
    work = 5 if policy.every_k else 3 if policy.products else 4
    return work, 1 if policy.attention else 3 if policy.every_k else 2


REMAT = {name: _forwards(policy) for name, policy in POLICIES.items()}
# Sums of hidden states over `tensor`: outputs of attention and feed-forward in the forward pass,
# gradients of their inputs in the backward pass. The feed-forward's input is summed once more,
# whatever products are kept; if k layers are recomputed from one input, so are the outputs of k -
# 1.
FORWARD_SUMS, BACKWARD_SUMS, EVERY_K_SUMS = 2, 3, 2
OUTER_SUMS = 2  # the embedding's result and the gradient of the head's input


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a transformer that the cost model needs; set by hand for non-LLaMA models.

    Attributes:
      weights: in the matrices of one layer a token passes through.
      stored: in all matrices of one layer, idle experts included; 0 for as many as `weights`.
      routed: of `weights`, those of a token's experts; experts: of `stored`, those of all experts.
      expert_count, chosen: experts in a layer, and per token.
      expert_share: the share of the layers that have experts, if any have; the weights are averages
        over all layers.
      head_weights: in the matrix that makes logits.
    """

    layers: int
    weights: float
    head_weights: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    stored: float = 0
    routed: float = 0
    experts: float = 0
    expert_count: int = 0
    chosen: int = 1
    expert_share: float = 1.0

    @classmethod
    def of(cls, config: TransformerConfig) -> Sizes:
        """The sizes of a LLaMA."""
        of_expert, chosen = 3 * config.hidden_size * config.expert_width, config.num_experts_per_tok
        layers = config.num_hidden_layers
        share = config.expert_layers / layers or 1.0

        def average(count: Callable[[TransformerConfig], int]) -> float:
            return all_layers(config, count) / layers

        return cls(
            layers=layers,
            weights=average(layer_weights),
            head_weights=head_weights(config),
            query_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            hidden=config.hidden_size,
            stored=average(stored_layer_weights),
            routed=share * (chosen or 0) * of_expert,
            experts=share * config.num_experts * of_expert,
            expert_share=share,
            expert_count=config.num_experts,
            chosen=chosen or 1,
        )

    @property
    def parameters(self) -> float:
        """Weights of all matrices, an untied embedding included; norms are left out."""
        return self.layers * (self.stored or self.weights) + 2 * self.head_weights

    def needed_flops(self, tokens: float, pairs: float, frozen: bool = False) -> float:
        """FLOPs of a training step over these tokens and visible query-key pairs.

        Recomputation and gradients of frozen weights are left out.
        """
        weights = self.layers * self.weights + self.head_weights
        return training_flops(
            weights,
            self.layers * self.query_heads * self.head_dim,
            tokens,
            pairs,
            weights if frozen else 0,
        )


@dataclasses.dataclass(frozen=True)
class TrainingStep:
    """One training step of a model on a mesh.

    Devices are ordered by `trainer.mesh.ORDER`: ranks of `tensor` are neighbours. Factors of `dcn`
    are outside of all axes.

    Attributes:
      sizes: what the devices compute, with the heads and widths that `tensor` does not divide
        padded or repeated (`planning.parts.computed_sizes`).
      needed: the model's own sizes, by which MFU counts; None: they are `sizes`.
      length: tokens in a row.
      batch: rows.
      data, fsdp, tensor, sequence, expert: sizes of the mesh's axes.
      schedule: a name, a mapping of a name and options, or a schedule.
      remat: a remat policy.
      causal: False computes every query-key pair.
      masks: of the layers, in their repeating order; with `causal` False they are not read.
      overlap: whether transfers run under compute if the schedule allows; False adds them up.
      frozen: whether the matrices have no gradient, as with adapters, whose products and moments
        are left out.
      weight_bytes: per element of a layer's matrices, as stored and gathered.
      dequantizations: how often a pass through a layer dequantizes its matrices, reading them and
        writing bfloat16; 0 if not quantized. An upper bound: a compiler may dequantize once for all
        chunks of tokens.
      imbalance: tokens on the busiest rank of `expert`, over an equal share.
      accumulation: parts of the batch that follow one another; each gathers the weights, and
        scatters and sums its gradients.
      extra_forwards: forward passes through the layers over all parts before the first gradient.
      dcn: axis -> its factor across TPU slices or GPU hosts, as in MeshConfig.

    Raises:
      ValueError: an impossible mesh or remat policy, in one line naming the field.
    """

    sizes: Sizes
    hardware: Hardware
    length: int
    _: dataclasses.KW_ONLY
    batch: int = 1
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1
    expert: int = 1
    schedule: str | Mapping[str, Any] | Schedule = "ring"
    layout: str = "striped"
    remat: str = "save_attention"
    causal: bool = True
    masks: tuple[Mask, ...] = (Mask(),)
    overlap: bool = True
    frozen: bool = False
    weight_bytes: float = 2.0
    dequantizations: int = 0
    imbalance: float = 1.0
    accumulation: int = 1
    extra_forwards: int = 0
    dcn: Mapping[str, int] = dataclasses.field(default_factory=dict)
    needed: Sizes | None = None

    def __post_init__(self):
        if self.remat not in REMAT:
            raise ValueError(f"remat: found {self.remat!r}; known: {', '.join(REMAT)}")
        parts = self.row_groups * self.accumulation
        if self.batch % parts:
            factors = "data x fsdp" + " x expert" * (self.expert > 1)
            factors += " x accumulation" * (self.accumulation > 1)
            raise ValueError(f"batch: {self.batch} rows are not divisible by {factors} = {parts}")
        if self.length % self.sequence:
            raise ValueError(
                f"length: {self.length} is not divisible by {self.sequence} sequence shards"
            )

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return self.row_groups * self.tensor * self.sequence

    @property
    def row_groups(self) -> int:
        """Parts that the rows are divided into."""
        return self.data * self.fsdp * self.expert

    @property
    def largest_imbalance(self) -> float:
        """The load of a rank of `expert` if all tokens choose it, over an equal share."""
        sizes = self.sizes
        if self.expert == 1:
            return 1.0
        return self.expert * min(sizes.chosen, sizes.expert_count // self.expert) / sizes.chosen

    @property
    def rows(self) -> int:
        """Rows that a device computes at a time."""
        return self.batch // self.row_groups // self.accumulation

    @property
    def tokens(self) -> int:
        """Tokens that a device computes at a time."""
        return self.rows * self.length // self.sequence

    @property
    def weight_gradients(self) -> int:
        """How many products give each weight's gradient; each product's is scattered."""
        return 0 if self.frozen else 1

    @property
    def trained_shard(self) -> float:
        """The trained parameters that a device holds."""
        shards = self.tensor * self.fsdp * self.expert * self.sequence
        return 0 if self.frozen else self.sizes.parameters / shards

    @property
    def network(self) -> Network:
        """The hardware's network between this mesh's devices."""
        slices = math.prod(self.dcn.values())
        return dataclasses.replace(self.hardware.network, slice=self.devices // slices)

    def lines(self, *axes: str) -> Lines:
        """The devices along these axes together, the last one's fastest, as one line for each
        place on the other axes."""
        sizes = tuple(getattr(self, axis) for axis in ORDER)
        outer = tuple(self.dcn.get(axis, 1) for axis in ORDER)
        return _lines(sizes, outer, tuple(ORDER.index(axis) for axis in axes))

    @property
    def seconds_at_peak(self) -> float:
        """Seconds of the step's needed work if every chip ran at its peak; divided by the step's
        seconds, its MFU."""
        row = np.array([self.length])
        pairs = float(self.length**2)
        if self.causal:
            pairs = sum((share * visible_pairs(row, mask) for mask, share in self.mask_shares), 0.0)
        sizes = self.needed or self.sizes
        flops = sizes.needed_flops(self.batch * self.length, self.batch * pairs, self.frozen)
        return flops / (self.devices * self.hardware.peak)

    @property
    def mask_shares(self) -> list[tuple[Mask, float]]:
        """The masks of the layers, each with its share of them, the one with most work first."""
        if not self.causal:
            return [(Mask(causal=False), 1.0)]
        layers = self.sizes.layers
        counts = Counter(self.masks[i % len(self.masks)] for i in range(layers))
        widest_first = sorted(counts, key=lambda mask: -(mask.window or self.length))
        return [(mask, counts[mask] / layers) for mask in widest_first]

    @property
    def tile_backward_products(self) -> int:
        """Matrix products of a tile in attention's backward pass, as `kernels.tpu` chooses."""
        pairs, cores = self.block.batch * self.block.kv_heads, self.hardware.fused_cores
        return ONE_BACKWARD_KERNEL if cores and pairs % cores == 0 else TWO_BACKWARD_KERNELS

    @property
    def block(self) -> Block:
        """The shapes of a rank's arrays in attention."""
        sizes = self.sizes
        return Block(
            self.rows,
            self.length // self.sequence,
            math.ceil(sizes.query_heads / self.tensor),
            math.ceil(sizes.kv_heads / self.tensor),
            sizes.head_dim,
            coordinates=3 if any(mask.global_tokens for mask in self.masks) else 2,
        )

    def tiles(self) -> tuple[tuple[int, int], float]:
        """((query, key tiles) of a row's block, a tile's forward FLOPs for all rows and heads)."""
        block = self.block
        query_side, key_side = self.hardware.tile
        count = math.ceil(block.tokens / query_side), math.ceil(block.tokens / key_side)
        area = (block.tokens / count[0]) * (block.tokens / count[1])
        return count, 4 * area * block.batch * block.query_heads * block.head_dim

    def rounds(self, mask: Mask) -> tuple[list[Round], list[Round]]:
        """The forward and the backward rounds of the attention of one layer with this mask."""
        return rounds(self.schedule, self.sequence, self.layout, self.block, self.tiles()[0], mask)


@dataclasses.dataclass(frozen=True)
class Phase:
    """A phase of a step: its seconds, and the busiest device's compute seconds among them."""

    seconds: float
    compute: float

    @property
    def exposed(self) -> float:
        """Seconds of waiting for the network."""
        return self.seconds - self.compute

    def __add__(self, other: Phase) -> Phase:
        return Phase(self.seconds + other.seconds, self.compute + other.compute)

    def __mul__(self, times: float) -> Phase:
        return Phase(self.seconds * times, self.compute * times)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimated times of a training step; rounds are those of one layer's attention, other
    figures of a layer are averages, if the layers' windows differ. Figures of rounds, attention and
    layers are of one part of the batch."""

    forward_rounds: tuple[Phase, ...]
    backward_rounds: tuple[Phase, ...]
    attention_forward: Phase
    attention_backward: Phase
    layer_forward: Phase
    layer_backward: Phase
    step: Phase
    mfu: float
    tokens_per_second: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.step.seconds


def estimate(job: TrainingStep) -> Estimate:
    """The times of one training step of a job, on the busiest device.

    Raises:
      ValueError: the cost model has no rule for the schedule on this mesh.
    """
    attention = _attention(job)
    layer_forward, layer_backward = _layer(job, attention)
    layers = job.sizes.layers
    of_a_part = (
        layer_forward * (layers * (1 + job.extra_forwards))
        + layer_backward * layers
        + _head(job)
        + _gradient_sum(job)
    )
    step = of_a_part * job.accumulation + _update(job)
    return Estimate(
        **attention._asdict(),
        layer_forward=layer_forward,
        layer_backward=layer_backward,
        step=step,
        mfu=job.seconds_at_peak / step.seconds,
        tokens_per_second=job.batch * job.length / step.seconds,
    )


class _Attention(NamedTuple):
    """The attention of one layer; see `Estimate`."""

    forward_rounds: tuple[Phase, ...]
    backward_rounds: tuple[Phase, ...]
    attention_forward: Phase
    attention_backward: Phase


def _attention(job: TrainingStep) -> _Attention:
    """Attention: the rounds of the mask with most work, and the average over all layers."""
    rounds = [(_rounds(job, mask), share) for mask, share in job.mask_shares]
    forward, backward = (
        _total(_total(passes[direction]) * share for passes, share in rounds)
        for direction in range(2)
    )
    (forward_rounds, backward_rounds), _ = rounds[0]
    return _Attention(forward_rounds, backward_rounds, forward, backward)


def _rounds(job: TrainingStep, mask: Mask) -> list[tuple[Phase, ...]]:
    """The forward and the backward rounds of the attention of one layer with this mask."""
    hardware, head_dim = job.hardware, job.sizes.head_dim
    _, tile_flops = job.tiles()
    peak = hardware.peak * hardware.filled(head_dim)
    backward_flops = job.tile_backward_products / FORWARD_PRODUCTS * tile_flops
    return [
        tuple(_round(job, planned, flops / (peak * rate)) for planned in passes)
        for passes, flops, rate in zip(
            job.rounds(mask),
            (tile_flops, backward_flops),
            hardware.attention_rates(head_dim),
            strict=True,
        )
    ]


def _layer(job: TrainingStep, attention: _Attention) -> tuple[Phase, Phase]:
    """A layer's forward and backward pass over a part of the batch."""
    sizes, between = job.sizes, _between_products(job)
    work, attention_forwards = REMAT[job.remat]
    matrices = Matrices(
        weights=sizes.weights,
        stored=sizes.stored or sizes.weights,
        routed=sizes.routed,
        experts=sizes.experts,
        weight_bytes=job.weight_bytes,
    )
    sums = BACKWARD_SUMS + EVERY_K_SUMS * POLICIES[job.remat].every_k
    scatters = job.weight_gradients
    forward = (
        _matrices(job, matrices, 1, FORWARD_SUMS, gathers=1)
        + between
        + _dequantization(job, 1)
        + attention.attention_forward
        + _exchange(job, gathers=1, scatters=1)
    )
    backward = (
        _matrices(job, matrices, work - 2 + scatters, sums, gathers=1, scatters=scatters)
        + between * (work - 1)
        + _dequantization(job, work - 2)
        + attention.attention_forward * (attention_forwards - 1)
        + attention.attention_backward
        # Tokens are gathered again, with their sums' gradients.
        + _exchange(job, gathers=2, scatters=1)
    )
    return forward, backward


def _head(job: TrainingStep) -> Phase:
    """The head of a part of the batch, forward and backward: every policy computes its gradient
    with the loss, so its forward pass runs once."""
    matrices = Matrices(weights=job.sizes.head_weights, stored=job.sizes.head_weights)
    scatters = job.weight_gradients
    return _matrices(job, matrices, 2 + scatters, OUTER_SUMS, gathers=2, scatters=scatters)


def _gradient_sum(job: TrainingStep) -> Phase:
    """The sum of a part's gradients over `data`, after its backward pass."""
    return Phase(_all_reduce(job, 4 * job.trained_shard, "data"), 0.0)


def _update(job: TrainingStep) -> Phase:
    """The optimizer's update and the sums of the parts' gradients, bound by memory."""
    parts = job.accumulation
    moved = OPTIMIZER_BYTES + (ADDED_GRADIENT_BYTES * parts if parts > 1 else 0)
    seconds = moved * job.trained_shard / job.hardware.memory_bandwidth
    return Phase(seconds, seconds)


def _total(phases: Iterable[Phase]) -> Phase:
    return functools.reduce(Phase.__add__, phases, Phase(0.0, 0.0))


def _round(job: TrainingStep, planned: Round, seconds_per_tile: float) -> Phase:
    """A round: the slower of its busiest rank and hidden transfers, then the exposed transfers."""
    compute, network = float(max(planned.tiles)) * seconds_per_tile, job.network
    overlapped = tuple(send for send in planned.hidden if network.overlaps(send, job.sequence))
    waited = (*planned.exposed, *(send for send in planned.hidden if send not in overlapped))
    devices = job.lines("sequence")[0]
    hidden, exposed = (
        network.seconds(sends, job.sequence, devices) for sends in (overlapped, waited)
    )
    return Phase((max(compute, hidden) if job.overlap else compute + hidden) + exposed, compute)


def _between_products(job: TrainingStep) -> Phase:
    """The time of a layer's forward pass outside its products and attention, bound by memory."""
    moved = job.hardware.between_products * job.tokens * job.sizes.hidden
    seconds = moved / job.hardware.memory_bandwidth
    return Phase(seconds, seconds)


def _dequantization(job: TrainingStep, passes: int) -> Phase:
    """The time to dequantize a layer in `passes` passes, bound by memory bandwidth."""
    sizes = job.sizes
    weights = sizes.weights - sizes.routed + sizes.experts / job.expert
    moved = passes * job.dequantizations * weights / job.tensor * (job.weight_bytes + 2)
    seconds = moved / job.hardware.memory_bandwidth
    return Phase(seconds, seconds)


class Matrices(NamedTuple):
    """Matrices that tokens pass through.

    Attributes:
      weights: the parameters that a token passes through.
      stored: all parameters, idle experts included.
      routed: of `weights`, those of a token's experts, whose work `TrainingStep.imbalance` makes
        uneven.
      experts: of `stored`, those of all experts, which are not gathered over `expert`.
      weight_bytes: per parameter, as gathered.
    """

    weights: float
    stored: float
    routed: float = 0
    experts: float = 0
    weight_bytes: float = 2.0


def _matrices(
    job: TrainingStep,
    matrices: Matrices,
    passes: int,
    sums: int,
    *,
    gathers: int,
    scatters: int = 0,
) -> Phase:
    """Position-wise work: passes through matrices, with their transfers under it.

    Args:
      passes: matrix products with each weight; a backward pass has two, one if frozen.
      sums: of hidden states over the tensor axis.
      gathers, scatters: how often the parameters are gathered, and their gradients reduce-scattered
        (float32).
    """
    hardware = job.hardware
    busiest = matrices.weights + (job.imbalance - 1) * matrices.routed
    compute = passes * 2 * busiest / job.tensor * job.tokens / (hardware.peak * hardware.matmul)
    transfer = 0.0
    shards = job.tensor * job.fsdp * job.expert * job.sequence
    for parameters, axes in (
        (matrices.stored - matrices.experts, ("fsdp", "expert", "sequence")),
        (matrices.experts, ("fsdp", "sequence")),
    ):
        share = parameters / shards
        transfer += gathers * _collective(job, GATHER, matrices.weight_bytes * share, *axes)
        transfer += scatters * _collective(job, SCATTER, 4 * share, *axes)
    # Tensor parallelism sums the outputs of attention and feed-forward over its axis; nothing hides
    # these sums.
    states = 2 * job.tokens * job.sizes.hidden
    summed = sums * _all_reduce(job, states, "tensor")
    return Phase((max(compute, transfer) if job.overlap else compute + transfer) + summed, compute)


def _exchange(job: TrainingStep, gathers: int, scatters: int) -> Phase:
    """The time for ranks of `expert` to gather each other's tokens and scatter their sums, in
    bfloat16.

    Nothing hides it.
    """
    nbytes = 2 * job.tokens * job.sizes.hidden * job.sizes.expert_share
    tokens, sums = (_collective(job, kind, nbytes, "expert") for kind in (GATHER, SCATTER))
    return Phase(gathers * tokens + scatters * sums, 0.0)


def _all_reduce(job: TrainingStep, nbytes: float, axis: str) -> float:
    """Seconds to sum arrays of `nbytes` along an axis: a reduce-scatter and an all-gather."""
    part = nbytes / getattr(job, axis)
    return sum(_collective(job, kind, part, axis) for kind in (SCATTER, GATHER))


def _collective(job: TrainingStep, kind: str, nbytes: float, *axes: str) -> float:
    """Seconds of a gather or scatter of parts of `nbytes` along these axes."""
    lines = job.lines(*axes)
    if len(lines[0]) == 1:
        return 0.0
    return job.network.seconds((Collective(kind, nbytes, lines),), job.devices)


@functools.lru_cache(maxsize=64)
def _lines(sizes: tuple[int, ...], outer: tuple[int, ...], axes: tuple[int, ...]) -> Lines:
    """`TrainingStep.lines` for axes of these sizes; the factors `outer` are outside all axes."""
    inner = [size // factor for size, factor in zip(sizes, outer, strict=True)]
    count = len(sizes)
    devices = np.arange(math.prod(sizes)).reshape(*outer, *inner)
    devices = devices.transpose([i for axis in range(count) for i in (axis, count + axis)])
    along = np.moveaxis(devices.reshape(sizes), axes, range(count - len(axes), count))
    length = math.prod(sizes[axis] for axis in axes)
    return tuple(map(tuple, along.reshape(-1, length).tolist()))
