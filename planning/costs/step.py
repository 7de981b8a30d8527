"""Adds up a training step: rounds to layers, layers to a step, and what of it is exposed communication."""
from __future__ import annotations

import dataclasses
import functools
import math

from model.attention.schedules.plan import GATHER, SCATTER, Block, Pairs, Send, everyone
from model.config import LlamaConfig
from trainer.flops import head_weights, layer_weights, training_flops

from .hardware import Hardware
from .rounds import Round, rounds

# A backward kernel makes the scores again: five products where the forward has two. The model itself needs four of them.
BACKWARD = 2.5
OPTIMIZER_BYTES = 28  # AdamW in float32: reads parameter, two moments and gradient, writes three

# What a layer computes, in forwards: (position-wise work, attention forward) of a whole step, recomputation included. A
# backward of position-wise work is two forwards; attention's own backward comes on top.
REMAT = {"everything": (3, 1), "save_attention": (4, 1), "nothing": (4, 2), "offload": (4, 2), "every_k": (5, 3),
         "offload_every_k": (5, 3)}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a transformer that the cost model needs; made by hand for models that are no LLaMA.

    Attributes:
      weights: in the matrices of one layer.
      head_weights: in the matrix that makes logits.
    """

    layers: int
    weights: int
    head_weights: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden: int

    @classmethod
    def of(cls, config: LlamaConfig) -> Sizes:
        """The sizes of a LLaMA."""
        return cls(config.num_hidden_layers, layer_weights(config), head_weights(config), config.num_attention_heads,
                   config.num_key_value_heads, config.head_dim, config.hidden_size)

    @property
    def parameters(self) -> int:
        """Weights of all matrices, an untied embedding included; norms are left out."""
        return self.layers * self.weights + 2 * self.head_weights

    def needed_flops(self, tokens: float, pairs: float) -> float:
        """FLOPs of a training step over these tokens and visible query-key pairs, without what remat computes again."""
        weights = self.layers * self.weights + self.head_weights
        return training_flops(weights, self.layers * self.query_heads * self.head_dim, tokens, pairs)


@dataclasses.dataclass(frozen=True)
class Job:
    """One training step: a model on a mesh.

    Devices stand in the order data, fsdp, tensor, sequence, the last ones neighbours. `length` tokens a row, `batch` rows;
    `schedule` is what `model.attention.attention` takes, a name or a schedule with options; `partial` the bytes of a number of
    a partial result on the wire; `tile` another than the hardware's; `overlap` False sums compute and transfers everywhere;
    `zero` gathers the parameters from their shards.

    Raises:
      ValueError: a mesh or remat policy that does not work, in one line naming the field.
    """

    sizes: Sizes
    hardware: Hardware
    length: int
    batch: int = 1
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1
    schedule: object = "ring"
    layout: str = "striped"
    remat: str = "save_attention"
    causal: bool = True
    overlap: bool = True
    zero: bool = True
    partial: int = 4
    tile: tuple[int, int] | None = None

    def __post_init__(self):
        if self.remat not in REMAT:
            raise ValueError(f"remat: found {self.remat!r}; known: {', '.join(REMAT)}")
        if self.batch % (self.data * self.fsdp):
            raise ValueError(f"batch: {self.batch} rows are not divisible by data x fsdp = {self.data * self.fsdp}")
        if self.length % self.sequence:
            raise ValueError(f"length: {self.length} is not divisible by {self.sequence} sequence shards")

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor * self.sequence

    @property
    def rows(self) -> int:
        """Rows of a device."""
        return self.batch // (self.data * self.fsdp)

    @property
    def tokens(self) -> int:
        """Tokens of a device."""
        return self.rows * self.length // self.sequence

    @property
    def block(self) -> Block:
        sizes = self.sizes
        return Block(self.rows, self.length // self.sequence, math.ceil(sizes.query_heads / self.tensor),
                     math.ceil(sizes.kv_heads / self.tensor), sizes.head_dim, partial=self.partial)

    def tiles(self) -> tuple[tuple[int, int], float]:
        """(query tiles, key tiles) of a row's block, and forward FLOPs of one tile, all rows and heads of the device."""
        block = self.block
        count = tuple(math.ceil(block.tokens / side) for side in self.tile or self.hardware.tile)
        area = (block.tokens / count[0]) * (block.tokens / count[1])
        return count, 4 * area * block.batch * block.query_heads * block.head_dim

    def rounds(self) -> tuple[list[Round], list[Round]]:
        """Forward and backward rounds of one layer's attention."""
        return rounds(self.schedule, self.sequence, self.layout, self.block, self.tiles()[0], self.causal)


@dataclasses.dataclass(frozen=True)
class Phase:
    """Seconds of something, of them computing, and of them waiting for the network."""

    seconds: float
    compute: float

    @property
    def exposed(self) -> float:
        return self.seconds - self.compute

    def __add__(self, other: Phase) -> Phase:
        return Phase(self.seconds + other.seconds, self.compute + other.compute)

    def __mul__(self, times: float) -> Phase:
        return Phase(self.seconds * times, self.compute * times)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What `estimate` found. Rounds are those of one layer's attention; a step's exposed seconds are its waiting."""

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
        return self.step.seconds


def estimate(job: Job) -> Estimate:
    """Time of one training step of a job, on the busiest device."""
    hardware, sizes = job.hardware, job.sizes
    _, tile_flops = job.tiles()
    forward_rounds, backward_rounds = (
        tuple(_round(job, r, flops / (hardware.peak * rate)) for r in passes) for passes, flops, rate in zip(
            job.rounds(), (tile_flops, BACKWARD * tile_flops), (hardware.attention, hardware.attention_backward), strict=True))
    forward, backward = _total(forward_rounds), _total(backward_rounds)
    work, attention_forwards = REMAT[job.remat]

    matrices = functools.partial(_matrices, job)
    layer_forward = matrices(sizes.weights, 1, gathers=1) + forward
    layer_backward = matrices(sizes.weights, work - 1, gathers=1, scatters=1) + forward * (attention_forwards - 1) + backward
    head = matrices(sizes.head_weights, 3 if job.remat == "everything" else 4, gathers=2, scatters=1)
    shard = sizes.parameters / (job.tensor * (job.fsdp * job.sequence if job.zero else 1))
    update = OPTIMIZER_BYTES * shard / hardware.memory_bandwidth
    step = (layer_forward + layer_backward) * sizes.layers + head + Phase(update, update)
    tokens = job.batch * job.length
    pairs = tokens * ((job.length + 1) / 2 if job.causal else job.length)
    mfu = sizes.needed_flops(tokens, pairs) / (step.seconds * job.devices * hardware.peak)
    return Estimate(forward_rounds, backward_rounds, forward, backward, layer_forward, layer_backward, step, mfu,
                    tokens / step.seconds)


def _total(phases) -> Phase:
    return functools.reduce(Phase.__add__, phases, Phase(0.0, 0.0))


def _round(job: Job, one: Round, seconds_per_tile: float) -> Phase:
    """A round takes as long as its busiest rank, or as the transfers under it where they take longer, and as the others."""
    compute = float(max(one.tiles)) * seconds_per_tile
    hidden, exposed = (job.hardware.network.seconds(sends, job.sequence) for sends in (one.hidden, one.exposed))
    return Phase((max(compute, hidden) if job.overlap else compute + hidden) + exposed, compute)


def _matrices(job: Job, weights: int, forwards: float, gathers: int = 0, scatters: int = 0) -> Phase:
    """Position-wise work with `weights` parameters: `forwards` times a forward, with the parameters' transfers under it."""
    hardware, network = job.hardware, job.hardware.network
    compute = forwards * 2 * weights / job.tensor * job.tokens / (hardware.peak * hardware.matmul)
    transfer = 0.0
    if job.zero and job.fsdp * job.sequence > 1:
        share = weights / (job.tensor * job.fsdp * job.sequence)
        pairs = _shards(job.data, job.fsdp, job.tensor, job.sequence)
        transfer = (gathers * network.seconds((Send("weights", GATHER, 2 * share, pairs),), job.devices)
                    + scatters * network.seconds((Send("gradients", SCATTER, 4 * share, pairs),), job.devices))
    # Tensor parallelism sums the outputs of attention and feed-forward over the axis, which waits for nothing to hide under.
    summed = 0.0
    if job.tensor > 1:
        part = Send("outputs", GATHER, job.tokens * job.sizes.hidden * 2 / job.tensor, _tensor_pairs(job))
        summed = 2 * forwards * 2 * network.seconds((part,), job.devices)
    return Phase((max(compute, transfer) if job.overlap else compute + transfer) + summed, compute)


@functools.lru_cache(maxsize=32)
def _shards(data: int, fsdp: int, tensor: int, sequence: int) -> Pairs:
    """Devices that share the shards of one set of parameters."""
    return everyone([((d * fsdp + f) * tensor + t) * sequence + s for f in range(fsdp) for s in range(sequence)]
                    for d in range(data) for t in range(tensor))


def _tensor_pairs(job: Job) -> Pairs:
    return everyone([(o * job.tensor + t) * job.sequence + s for t in range(job.tensor)]
                    for o in range(job.data * job.fsdp) for s in range(job.sequence))
