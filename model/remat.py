"""What a layer keeps between forward and backward."""
from __future__ import annotations

import jax

POLICIES = ("nothing", "save_attention")


def policy(name: str):
    """A `jax.checkpoint` policy, over and above the layer's input, which is always kept.

    `nothing` keeps the layer's input alone. `save_attention` keeps the attention output and its lse too, so that the backward
    never runs attention forward again (DistFlashAttn, section 3.3).

    Raises:
      ValueError: an unknown name.
    """
    if name == "nothing":
        return jax.checkpoint_policies.nothing_saveable
    if name == "save_attention":
        return jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
    raise ValueError(f"memory.remat: found {name!r}; known: {', '.join(POLICIES)}")
