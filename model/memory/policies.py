"""The remat policies by name, as plain data: recipes list the names and planning reads the facts without importing JAX."""
from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RematPolicy:
    """What the layers keep between the forward and the backward pass; everything else is computed again.

    Attributes:
      attention: attention's output and log-sum-exp are kept, so that the backward pass never runs attention forward again
        (DistFlashAttn, section 3.3).
      products: the results of all matrix products are kept as well.
      every_k: only the input of every k-th layer is kept, not that of every layer.
      offload: the layers' inputs that are kept lie in the host's pinned memory.
    """

    attention: bool = False
    products: bool = False
    every_k: bool = False
    offload: bool = False


POLICIES = {
    "nothing": RematPolicy(),
    "save_attention": RematPolicy(attention=True),
    "offload": RematPolicy(offload=True),
    "every_k": RematPolicy(every_k=True),
    "offload_every_k": RematPolicy(every_k=True, offload=True),
    "everything": RematPolicy(attention=True, products=True),
}
# Query chunks compute attention's output a chunk at a time, so that none is there to be kept.
QUERY_CHUNK_POLICIES = tuple(name for name, policy in POLICIES.items() if not policy.attention)
# The scan that prefetches keeps one input for each layer, and no products.
PREFETCH_POLICIES = tuple(name for name, policy in POLICIES.items() if not (policy.every_k or policy.products))
