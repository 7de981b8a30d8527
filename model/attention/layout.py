"""Layouts: which tokens of the sequence each rank holds.

Striped Attention's partitioning is one of them. A layout only decides how balanced the work is:
every schedule is exact in every layout, because coordinates travel with the tokens.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from .names import LAYOUTS


def check_length(length: int, shards: int, layout: str, name: str = "length") -> None:
    """Refuses a length that the shards (for `zigzag`: twice as many) do not divide.

    Args:
      name: the length's name in the message.

    Raises:
      ValueError: an unknown layout; or an indivisible length, with the next good one.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: found {layout!r}; known: {', '.join(LAYOUTS)}")
    parts = shards * 2 if layout == "zigzag" else shards
    if shards < 1 or length % parts:
        divisor = (
            f"2 x {shards} (zigzag) sequence shards"
            if layout == "zigzag"
            else f"{shards} sequence shards"
        )
        longer = -(-length // max(parts, 1)) * max(parts, 1)
        raise ValueError(
            f"{name}: {length} is not divisible by {divisor}; the next good one is {longer}"
        )


def permutation(length: int, shards: int, layout: str) -> Int[np.ndarray, " L"]:
    """The order in which a layout stores a sequence: `x[:, order]` is the permuted sequence, and
    shard r its r-th equal part.

    - `contiguous`: shard r holds the r-th run of tokens (Ring Attention, Algorithm 1).
    - `striped`: shard r holds the tokens whose index is r modulo `shards` (Striped Attention), so
      that every shard has both early and late tokens.
    - `zigzag`: of 2 x shards runs, shard r holds the r-th from the front and the r-th from the back
      (Llama 3, section 3.3.2; Transformer Engine), which is equally balanced over a whole pass, in
      longer runs.

    Args:
      length: tokens in the sequence.
      shards: devices along the sequence axis.
      layout: one of LAYOUTS.

    Raises:
      ValueError: as in `check_length`.
    """
    check_length(length, shards, layout)
    order = np.arange(length)
    if layout == "striped":
        order = order.reshape(length // shards, shards).T.reshape(-1)
    if layout == "zigzag":
        runs = order.reshape(2 * shards, -1)
        order = np.stack([runs[:shards], runs[: shards - 1 : -1]], 1).reshape(-1)
    return order


def inverse(order: Int[np.ndarray, " L"]) -> Int[np.ndarray, " L"]:
    """The order that undoes `order`: `x[:, order][:, inverse(order)]` is `x`."""
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return back
