"""The remat policies by name, as plain data: recipes list the names and planning reads the facts
without importing JAX."""

from __future__ import annotations

import dataclasses
from typing import Literal

Memory = Literal["device", "host"]


@dataclasses.dataclass(frozen=True)
class RematPolicy:
    """What the layers keep between the forward and the backward pass, and in which memory;
    everything else is recomputed.

    Attributes:
      inputs: the memory of layer inputs, which every policy keeps.
      attention: the memory of attention's output and log-sum-exp; None does not keep them. If kept,
        the backward pass never reruns attention forward (DistFlashAttn, section 3.3).
      products: whether the results of all matrix products are kept too, on the device.
      every_k: whether only every k-th layer's input is kept.
    """

    inputs: Memory = "device"
    attention: Memory | None = None
    products: bool = False
    every_k: bool = False

    def keeps_on(self, memory: Memory) -> tuple[str, ...]:
        """The names, as in `checkpoint_name`, of what a layer keeps in this memory."""
        attention = ("attention_out", "attention_lse") if self.attention == memory else ()
        return (("layer_input",) if self.inputs == memory else ()) + attention


POLICIES = {
    "nothing": RematPolicy(),
    "save_attention": RematPolicy(attention="device"),
    "offload": RematPolicy(inputs="host"),
    "offload_save_attention": RematPolicy(inputs="host", attention="device"),
    "offload_attention": RematPolicy(inputs="host", attention="host"),
    "every_k": RematPolicy(every_k=True),
    "offload_every_k": RematPolicy(inputs="host", every_k=True),
    "everything": RematPolicy(attention="device", products=True),
}
# Query chunks compute attention's output a chunk at a time, so that none is there to be kept.
QUERY_CHUNK_POLICIES = tuple(name for name, policy in POLICIES.items() if policy.attention is None)
# The scan that prefetches keeps one input for each layer, and no products.
PREFETCH_POLICIES = tuple(
    name for name, policy in POLICIES.items() if not (policy.every_k or policy.products)
)
