"""Runs the stack of layers and keeps for the backward pass what a remat policy names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from model.memory.period import scan_periods, split_by_memory, stacked
from model.memory.policies import POLICIES, RematPolicy


def _keep(device: Sequence[str], host: Sequence[str]) -> Callable[..., Any]:
    """The `jax.checkpoint` policy that keeps only values of these names, on the device and in host
    memory."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(device),
        names_which_can_be_offloaded=list(host),
        offload_src="device",
        offload_dst="pinned_host",
    )


def _layer_policy(policy: RematPolicy) -> Callable[..., Any]:
    """The `jax.checkpoint` policy of one layer. A layer's input on the device is its argument,
    which is always kept."""
    device = [name for name in policy.keeps_on("device") if name != "layer_input"]
    kept = _keep(device, policy.keeps_on("host"))
    if not policy.products:
        return kept
    # Results of matrix products, but not weights: all layers' gathered weights would be the whole
    # model on each device.
    policies = jax.checkpoint_policies
    return policies.save_from_both_policies(
        policies.dots_saveable, policies.save_only_these_names(*device, "expert_product")
    )


def scan_layers(
    bodies: Sequence[Callable], carry: Any, layers: Any, remat: str, every_k: int = 1
) -> tuple[Any, Any]:
    """Returns the last carry of a scan over the layers, and all layers' results, stacked. The scan
    keeps for the backward pass what the remat policy names.

    With `save_attention` the backward pass never reruns attention forward (DistFlashAttn, section
    3.3). With `everything` it repeats only element-wise work, and no layer runs in chunks. With
    `every_k` it reruns k layers to get their inputs, and then each of them once more, so that at
    most L / k + k of L layers' inputs are held (Chen et al., Training Deep Nets with Sublinear
    Memory Cost, section 4).

    Args:
      bodies: one per kind of layer, as in `scan_periods`; each names its hidden states
        `layer_input`, and attention's results `attention_out` and `attention_lse`, by
        `checkpoint_name`.
      layers: a tree of arrays with the layers on the leading axis.
      remat: a name of `POLICIES`; every_k: how many layers form a group, for the policies that
        group them; the last group may be smaller.
    """
    policy = POLICIES[remat]
    remat_layer = functools.partial(jax.checkpoint, policy=_layer_policy(policy), prevent_cse=False)
    if not policy.every_k:
        carry, results = scan_periods(bodies, carry, layers, remat=remat_layer)
        return carry, stacked(results)
    kept = _keep([], ["group_input"] if policy.inputs == "host" else [])
    return _scan_groups(bodies, carry, layers, every_k, remat_layer, kept)


def _scan_groups(
    bodies: Sequence[Callable],
    carry: Any,
    layers: Any,
    every_k: int,
    remat_layer: Callable[[Callable], Callable],
    kept: Callable[..., Any],
) -> tuple[Any, Any]:
    """`scan_layers` in groups of `every_k` layers, and a smaller last one if there are more.

    Args:
      remat_layer: applied to the function that runs one layer.
      kept: the `jax.checkpoint` policy of a group.
    """
    on_device, with_host = split_by_memory(layers)
    total = jax.tree.leaves(layers)[0].shape[0]
    every_k = min(every_k, total)
    count, left = divmod(total, every_k)
    end = count * every_k
    groups = [(x[:end] if left else x).reshape(count, every_k, *x.shape[1:]) for x in on_device]

    def run_group(size, carry, xs):
        number, group = xs
        # Only hidden states: TPU compilers cannot put the carry's integer arrays on the host.
        carry = jax.tree.map(
            lambda x: checkpoint_name(x, "group_input") if x.ndim > 2 else x, carry
        )
        carry, results = scan_periods(
            bodies,
            carry,
            with_host(group),
            remat=remat_layer,
            start=number * every_k,
            count=size,
        )
        return carry, stacked(results)

    def remat_group(size):
        run = functools.partial(run_group, size)
        return jax.checkpoint(run, policy=kept, prevent_cse=False)

    carry, results = lax.scan(remat_group(every_k), carry, (jnp.arange(count), groups))
    results = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)
    if left:
        carry, last = remat_group(left)(carry, (count, [x[end:] for x in on_device]))
        results = jax.tree.map(lambda *parts: jnp.concatenate(parts), results, last)
    return carry, results
