"""What the layers keep between forward and backward, from nothing but their inputs to everything."""
from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

POLICIES = ("nothing", "save_attention", "offload", "every_k", "offload_every_k", "everything")


def check_policy(name: str, every_k: int, layers: int) -> None:
    """ValueError, in one line, for an unknown name, or a number of layers that `every_k` is to divide and does not."""
    if name not in POLICIES:
        raise ValueError(f"memory.remat: found {name!r}; known: {', '.join(POLICIES)}")
    if name.endswith("every_k") and layers % every_k:
        good = [k for k in range(1, layers + 1) if layers % k == 0]
        raise ValueError(f"memory.every_k: {every_k} does not divide {layers} layers; {', '.join(map(str, good))} do")


def _to_host(name: str):
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[name], offload_src="device", offload_dst="pinned_host")


def _policy(name: str):
    """A `jax.checkpoint` policy for one layer; the layer's input is kept by all of them, on the device but for `offload`."""
    if name.startswith("offload"):
        return _to_host("layer_input")
    if name in ("nothing", "every_k"):
        return jax.checkpoint_policies.nothing_saveable
    attention = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
    if name == "everything":
        # Results of matrix products, and no weights: gathered, all layers' together would be the whole model on each device.
        return jax.checkpoint_policies.save_from_both_policies(jax.checkpoint_policies.dots_saveable, attention)
    return attention


def scan_layers(body: Callable, carry, layers, name: str, every_k: int = 1):
    """`lax.scan(body, carry, layers)` that keeps for the backward what a policy says.

    `nothing` keeps each layer's input alone, `offload` keeps it in pinned host memory. `save_attention` keeps the attention
    output and its lse too, so that the backward never runs attention forward again (DistFlashAttn, section 3.3); `everything`
    the result of every matrix product as well: only element-wise work is run again, and nothing in chunks. `every_k` keeps the
    input of every k-th layer: the backward runs k layers again to get theirs, and then each of them once more; with L layers
    L / k + k inputs are held at most (Chen et al., Training Deep Nets with Sublinear Memory Cost, section 4). `offload_every_k`
    holds those in pinned host memory.

    Args:
      body: as scan's; names its input `layer_input`, its attention `attention_out` and `attention_lse`.
      layers: a tree of arrays with the layers on the leading axis.
      name, every_k: as `check_policy` lets pass.
    """
    body = jax.checkpoint(body, policy=_policy(name), prevent_cse=False)
    if not name.endswith("every_k"):
        return lax.scan(body, carry, layers)
    groups = jax.tree.map(lambda x: x.reshape(-1, every_k, *x.shape[1:]), layers)

    def group(carry, layers):
        # Hidden states alone: TPU compilers have no way to put labels on the host.
        return lax.scan(body, jax.tree.map(lambda x: checkpoint_name(x, "group_input") if x.ndim > 2 else x, carry), layers)

    kept = _to_host("group_input") if name == "offload_every_k" else jax.checkpoint_policies.nothing_saveable
    group = jax.checkpoint(group, policy=kept, prevent_cse=False)
    carry, out = lax.scan(group, carry, groups)
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)
