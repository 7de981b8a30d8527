"""Layouts: which tokens of the sequence each shard holds.

A layout only decides the balance of work; every schedule is exact under every layout, because coordinates travel.
"""
from __future__ import annotations

import numpy as np

LAYOUTS = ("contiguous", "striped")


def permutation(length: int, shards: int, layout: str) -> np.ndarray:
    """The order in which a layout stores a sequence: int array [length]; `x[:, order]` is the permuted sequence.

    `contiguous` gives shard r the r-th run of tokens. `striped` deals tokens out one by one, shard r holding the tokens
    r, r + shards, ... (Striped Attention, section 3.1): so all shards have early and late tokens alike.

    Args:
      length: tokens in the sequence.
      shards: devices along the sequence axis.
      layout: a name in LAYOUTS.

    Raises:
      ValueError: an unknown layout, or a length that `shards` does not divide.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: found {layout!r}; known: {', '.join(LAYOUTS)}")
    if shards < 1 or length % shards:
        good = -(-length // max(shards, 1)) * max(shards, 1)
        raise ValueError(f"length: {length} is not divisible by {shards} sequence shards; the next good one is {good}")
    order = np.arange(length)
    if layout == "striped":
        order = order.reshape(length // shards, shards).T.reshape(-1)
    return order


def inverse(order: np.ndarray) -> np.ndarray:
    """The order that undoes `order`: `x[:, order][:, inverse(order)]` is `x`."""
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return back
