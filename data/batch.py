"""The arrays of a batch, and their permutation into the layout of a mesh."""

from typing import NotRequired, TypedDict, cast

import numpy as np
from jaxtyping import Float32, Int, Int32


class Batch(TypedDict):
    """Packed rows as arrays [B, L]; a single row has arrays [L]."""

    tokens: Int32[np.ndarray, "*B L"]
    """Token ids; 0 in padding."""
    targets: Int32[np.ndarray, "*B L"]
    """The next token of the same document; 0 at its end."""
    loss_weights: Float32[np.ndarray, "*B L"]
    """1 if the target is trained on, otherwise 0."""
    positions: Int32[np.ndarray, "*B L"]
    """Position for RoPE; restarts at 0 in each document."""
    index: Int32[np.ndarray, "*B L"]
    """Index of the token in its row before any permutation, 0..L-1."""
    segment_ids: Int32[np.ndarray, "*B L"]
    """Number of the document within the row, from 1; 0 in padding."""
    source_ids: NotRequired[Int32[np.ndarray, "*B L"]]
    """Number of the token's source in the recipe; 0 in padding. Only for losses by source."""


def dtypes(with_sources: bool) -> dict[str, type[np.generic]]:
    """Returns the dtypes of a batch's arrays by name.

    Args:
      with_sources: whether the batch has `source_ids`.
    """
    return {
        "tokens": np.int32,
        "targets": np.int32,
        "loss_weights": np.float32,
        "positions": np.int32,
        "index": np.int32,
        "segment_ids": np.int32,
        **({"source_ids": np.int32} if with_sources else {}),
    }


def permute(batch: Batch, order: Int[np.ndarray, " L"]) -> Batch:
    """Returns a new batch whose arrays are all `array[..., order]`.

    Since targets are already shifted and `index` records each token's original index, nothing after
    this needs the order.

    Args:
      batch: arrays [B, L] or [L].
      order: a permutation of 0..L-1.

    Raises:
      ValueError: the length of `order` differs from the batch's.
    """
    order = np.asarray(order)
    arrays = cast("dict[str, np.ndarray]", batch)
    for name, array in arrays.items():
        if array.shape[-1:] != order.shape:
            raise ValueError(f"the order has shape {order.shape}, {name} has shape {array.shape}")
    permuted = {name: np.ascontiguousarray(array[..., order]) for name, array in arrays.items()}
    return cast(Batch, permuted)
