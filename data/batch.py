"""The one place where a batch's arrays are permuted together, last, for the mesh's layout."""

import numpy as np

ARRAYS = {
    "tokens": np.int32,
    "targets": np.int32,
    "loss_weights": np.float32,
    "positions": np.int32,
    "index": np.int32,
    "segment_ids": np.int32,
}


def permute(batch: dict[str, np.ndarray], order: np.ndarray) -> dict[str, np.ndarray]:
    """A new batch whose arrays [B, L] (or [L]) are all `array[..., order]`; order: int [L], a permutation.

    Targets are already shifted and `index` remembers each token's place, so nothing after this needs to know the order.
    Raises ValueError when the order's length is not the batch's.
    """
    order = np.asarray(order)
    for name, array in batch.items():
        if array.shape[-1:] != order.shape:
            raise ValueError(f"the order has {order.shape} places, {name} has shape {array.shape}")
    return {name: np.ascontiguousarray(array[..., order]) for name, array in batch.items()}
