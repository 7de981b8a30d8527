"""Layouts: which tokens of the sequence each shard holds.

A layout only decides the balance of work; every schedule is exact under every layout, because coordinates travel.
"""
from __future__ import annotations

import numpy as np

from .names import LAYOUTS


def check_length(length: int, shards: int, layout: str, what: str = "length") -> None:
    """Refuses a length that a layout cannot deal out: a multiple of the shards is needed, of twice as many for `zigzag`.

    Raises:
      ValueError: an unknown layout, or a length that does not divide, with the next that does; `what` names it.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: found {layout!r}; known: {', '.join(LAYOUTS)}")
    parts = shards * 2 if layout == "zigzag" else shards
    if shards < 1 or length % parts:
        why = f"2 x {shards} (zigzag) sequence shards" if layout == "zigzag" else f"{shards} sequence shards"
        good = -(-length // max(parts, 1)) * max(parts, 1)
        raise ValueError(f"{what}: {length} is not divisible by {why}; the next good one is {good}")


def permutation(length: int, shards: int, layout: str) -> np.ndarray:
    """The order in which a layout stores a sequence: int array [length]; `x[:, order]` is the permuted sequence.

    `contiguous` gives shard r the r-th run of tokens. `striped` deals tokens out one by one, shard r holding the tokens
    r, r + shards, ... (Striped Attention, section 3.1): so all shards have early and late tokens alike. `zigzag` cuts the
    sequence into 2 x shards runs and gives shard r the r-th from the front and the r-th from the back (Llama 3, section
    3.3.2; Transformer Engine): as balanced over the whole, in runs that stay long.

    Args:
      length: tokens in the sequence.
      shards: devices along the sequence axis.
      layout: a name in LAYOUTS.

    Raises:
      ValueError: as `check_length`.
    """
    check_length(length, shards, layout)
    order = np.arange(length)
    if layout == "striped":
        order = order.reshape(length // shards, shards).T.reshape(-1)
    if layout == "zigzag":
        runs = order.reshape(2 * shards, -1)
        order = np.stack([runs[:shards], runs[:shards - 1:-1]], 1).reshape(-1)
    return order


def inverse(order: np.ndarray) -> np.ndarray:
    """The order that undoes `order`: `x[:, order][:, inverse(order)]` is `x`."""
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return back
