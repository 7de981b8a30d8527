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
import math
from typing import Literal

from trainer.flops import head_weights, stored_layer_weights

from .compiled import GIB
from .machines import host_gib, host_note, is_gpu
from .parts import (
    compute_bytes,
    declared_once,
    device_tokens,
    host_parts_gib,
    parts_gib,
    trained_names,
)
from .plan import Job

# Arrays of [tokens, hidden], [tokens, query heads x head size] and [tokens, key heads x head size]
# and of a layer's and of the head's weights, all in the compute dtype; of the gradients and of a
# loss chunk's logits, both in float32.
HIDDEN, QUERIES, KEYS, LAYER_WEIGHTS, HEAD_WEIGHTS, GRADIENTS, LOGITS = 5, 6, 14, 2, 1, 1, 4
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
# The smallest ratio with adapters, from the plans of the recipes in configs/adapters: for long rows
# on one device, less exists at a time than the arrays above suggest. Set after these plans were
# seen.
LOW_OF_ADAPTERS = 0.55


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
        """The lower end of the estimate's range."""
        return self.low_share * self.total

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
    model, memory, mesh = job.model, job.memory, job.run.mesh
    tokens, tensor, number = device_tokens(job.run), mesh.tensor, compute_bytes(job.run)
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
    activations = routed + number * tokens * (
        HIDDEN * model.hidden_size + QUERIES * queries + KEYS * keys
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
    gradients = 4 * GRADIENTS * _trained_numbers(job) * mesh.data / mesh.devices
    chunk = min(tokens, memory.loss_chunk or tokens)
    return activations + weights + gradients + 4 * LOGITS * chunk * model.vocab_size / tensor


def _trained_numbers(job: Job) -> int:
    """The number of trained parameters."""
    declared = declared_once(job.model.with_adapter(job.run.adapter))
    return sum(math.prod(declared[name].shape) for name in trained_names(job.run, job.model))
