"""A step's memory without a compiler: the known parts, and an estimate of working memory.

Parameters, moments and what the layers keep are known (`planning.parts`). The rest of the step's
peak (gradients, a layer's gathered weights and activations, logits) is estimated as multiples of
each kind of array. The multiples were fitted by least squares to the compiled plans of text models
in docs/plans, and rounded. The range covers the worst of those plans.
tests/planning/test_memory_estimate.py compares them, and counts the plans of each model family that
a range of the others covers.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from model.config import TransformerConfig
from model.memory.options import MemoryConfig
from trainer.flops import head_weights, stored_layer_weights

from .compiled import GIB
from .machines import host_gib, host_note, is_gpu
from .parts import (
    compute_bytes,
    computed_sizes,
    device_tokens,
    host_parts_gib,
    numbers_per_device,
    parts_gib,
    trained_names,
)
from .plan import Job

# Arrays of [tokens, hidden], [tokens, query heads x head size] and [tokens, key heads x head size]
# and of a layer's and of the head's weights, all in the compute dtype; of the gradients and of a
# loss chunk's logits, both in float32.
HIDDEN, QUERIES, KEYS, LAYER_WEIGHTS, HEAD_WEIGHTS, GRADIENTS, LOGITS = 5, 6, 14, 2, 1, 1, 4
# Arrays of keys if no rank sends its own; arrays of the feed-forward's width, and of logits, for
# tokens beyond the default chunks. From Table 3's other columns, and set after they were seen.
OWN_KEYS, WIDE, LOGITS_OF_MORE = 3, 4, 1
# Arrays of scores in float32, where attention holds them, on GPUs and on TPUs: from Table 3's
# column vanilla, and set after it was seen. One of its plans, Llama 13B on v3, takes only half of
# its estimate.
SCORES_ON_GPU, SCORES_ON_TPU = 4, 2
# Extra arrays of a layer's trained experts, in the compute dtype: loops over blocks of rows hold
# their float32 weights and gradients several times. From one plan, Qwen3-30B-A3B, 128K, 8 x H100,
# and set after it was seen.
EXPERT_WEIGHTS = 12
# Bits per NF4 number while its layer runs, with its scales dequantized.
NF4_BITS = 4.63
# The smallest and the largest ratio of a compiled plan to its estimate; the smallest from one plan,
# Qwen3-30B-A3B, 1M, 8 x H100, set after it was seen.
LOW, HIGH = 0.68, 1.3
# The same on a TPU with layer inputs on the host and attention outputs on the device, from one
# plan: Qwen3-32B, 1M, v5p-64. Its compiler takes 27 GiB on top of 33 of attention outputs, for no
# known reason.
HIGH_KEPT_ON_TPU = 1.5
# The smallest ratio with adapters, from the plans of the recipes in configs/adapters and
# configs/preference: for long rows, less exists at a time than the arrays above suggest. Set after
# these plans were seen.
LOW_OF_ADAPTERS = 0.5


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """A step's estimated memory per device and on its host, in GiB.

    Attributes:
      parts: of the device's memory; the last one, `working memory`, is an estimate.
      host_parts: of the host's memory; these are known.
      device_gib, host_gib: what a program may use; None if unknown.
      high_share, low_share: the largest and the smallest ratio of a compiled plan to such an
        estimate.
      host_note: what is assumed about host memory; "" if nothing is.
    """

    parts: dict[str, float]
    host_parts: dict[str, float]
    device_gib: float | None
    host_gib: float | None
    high_share: float = HIGH
    low_share: float = LOW
    host_note: str = ""

    @property
    def total(self) -> float:
        """The sum of the device's parts."""
        return sum(self.parts.values())

    @property
    def low(self) -> float:
        """The lower end of the estimate's range, but all of parameters and moments."""
        state = sum(self.parts.get(name, 0.0) for name in ("parameters", "moments"))
        return max(self.low_share * self.total, state)

    @property
    def high(self) -> float:
        """The upper end of the estimate's range."""
        return self.high_share * self.total

    @property
    def on_host(self) -> float:
        """The sum of the host's parts."""
        return sum(self.host_parts.values())

    @property
    def fits(self) -> Literal["yes", "perhaps", "no"]:
        """Whether the step fits; `perhaps` if only a compiler can tell."""
        if self.host_gib is not None and self.on_host > self.host_gib:
            return "no"
        if self.device_gib is None:
            return "perhaps"
        return (
            "yes"
            if self.high <= self.device_gib
            else "no"
            if self.low > self.device_gib
            else "perhaps"
        )


def estimate_memory(job: Job) -> MemoryEstimate:
    """Returns the estimate of a job's memory."""
    run = dataclasses.replace(job.run, memory=job.memory)
    parts = {name: size for name, size in parts_gib(run, job.model).items() if size}
    parts["working memory"] = _working_bytes(job) / GIB
    host_parts = {name: size for name, size in host_parts_gib(run, job.model).items() if size}
    kept = not is_gpu(job.topology) and run.memory.remat == "offload_save_attention"
    return MemoryEstimate(
        parts,
        host_parts,
        job.device_gib,
        job.host_gib,
        HIGH_KEPT_ON_TPU if kept else HIGH,
        LOW_OF_ADAPTERS if run.adapter.rank else LOW,
        host_note(job.topology) if job.host_gib == host_gib(job.topology) else "",
    )


def _working_bytes(job: Job) -> float:
    """Bytes on a device at the step's peak, without the known parts."""
    memory, mesh = job.memory, job.run.mesh
    tokens, tensor, number = device_tokens(job.run), mesh.tensor, compute_bytes(job.run)
    model = computed_sizes(job.model, job.run.adapter, tensor)
    queries = (
        model.num_attention_heads
        * model.head_dim
        / tensor
        / memory.attention_groups
        / memory.query_chunks
    )
    keys = model.num_key_value_heads * model.head_dim / tensor / memory.attention_groups
    # Per chunk of tokens: rows of all experts' inputs, hidden layers and outputs, with gradients.
    # Ranks of `expert` gather each other's.
    rows = min(tokens, memory.feed_forward_chunk or tokens) * (model.num_experts_per_tok or 0)
    rows *= mesh.expert
    routed = number * rows * (HIDDEN * model.hidden_size + 3 * model.expert_width / tensor)
    arrays_of_keys = KEYS if mesh.sequence > 1 else OWN_KEYS
    activations = routed + number * tokens * (
        HIDDEN * model.hidden_size + QUERIES * queries + arrays_of_keys * keys
    )
    experts = model.num_experts / mesh.expert
    of_experts = 3 * model.hidden_size * model.expert_width * experts / tensor
    elsewhere = 3 * model.hidden_size * model.expert_width * (model.num_experts - experts)
    layer = (stored_layer_weights(model) - elsewhere) / tensor
    head = head_weights(model) / tensor
    # A quantized layer gathers codes, and dequantizes one projection at a time.
    quantize = job.run.adapter.quantize
    bits = {"none": 8 * number, "nf4": NF4_BITS, "int8": 8}[quantize]
    dequantized = (
        0
        if quantize == "none"
        else number
        * LAYER_WEIGHTS
        * model.hidden_size
        * model.expert_width
        * (experts or 1)
        / tensor
    )
    weights = (
        bits / 8 * LAYER_WEIGHTS * layer * (2 if memory.prefetch else 1)
        + dequantized
        + (0 if job.run.adapter.rank else number * EXPERT_WEIGHTS * of_experts)
        + number * HEAD_WEIGHTS * head
    )
    of_chunks = _score_bytes(job, model) + _chunk_bytes(job, model)
    return activations + weights + _gradient_bytes(job) + of_chunks


def _score_bytes(job: Job, model: TransformerConfig) -> float:
    """Bytes of the scores that attention holds: all of them by the schedule ring_self_attention, a
    call's by the reference kernel, and none otherwise.

    Args:
      model: with the sizes that a device computes with.
    """
    attention, memory, mesh = job.run.attention, job.memory, job.run.mesh
    schedule = attention.schedule_name
    whole_rows = schedule == "ring_self_attention" and mesh.sequence > 1
    if not whole_rows and attention.kernel != "reference":
        return 0.0
    # A ring's call has one rank's keys. With ulysses and attention2d it has other queries and heads
    # too, as many in all as here.
    keys = job.context // (mesh.sequence if schedule in ("ring", "balanced") else 1)
    queries = device_tokens(job.run) / memory.query_chunks
    heads = model.num_attention_heads / mesh.tensor / memory.attention_groups
    arrays = SCORES_ON_GPU if is_gpu(job.topology) else SCORES_ON_TPU
    return 4 * arrays * heads * queries * keys


def _gradient_bytes(job: Job) -> float:
    """Bytes of a device's gradients: those of a part of the batch, and the parts' sum."""
    numbers = numbers_per_device(job.run, job.model)
    trained = sum(numbers[name] for name in trained_names(job.run, job.model))
    return 4 * GRADIENTS * trained * (2 if job.run.train.accumulation > 1 else 1)


def _chunk_bytes(job: Job, model: TransformerConfig) -> float:
    """Bytes for the logits of a chunk of tokens, and for what chunks larger than the default ones
    add: the estimate's other parts were fitted to plans with those.

    Args:
      model: with the sizes that a device computes with.
    """
    memory, mesh, tokens = job.memory, job.run.mesh, device_tokens(job.run)
    logits = 4 * model.vocab_size / mesh.tensor
    chunk = min(tokens, memory.loss_chunk or tokens)
    usual = min(chunk, MemoryConfig.loss_chunk)
    more_logits = LOGITS_OF_MORE * logits * (chunk - usual)
    at_once = 0 if mesh.sequence_parallel else memory.feed_forward_chunk
    more = min(tokens, at_once or tokens) - min(tokens, MemoryConfig.feed_forward_chunk)
    if model.num_experts or memory.policy.products:  # counted by the chunk, or as products
        more = 0
    width = compute_bytes(job.run) * model.expert_width / mesh.tensor
    # The head and a layer's feed-forward never run at once.
    return LOGITS * logits * usual + max(more_logits, WIDE * width * max(0, more))
