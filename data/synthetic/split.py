"""Which pairs of key and value belong to evaluation: training data never hold these together."""
import hashlib

import numpy as np

EVALUATION_SHARE = 1 / 8


def is_evaluation(key: str, value: object) -> bool:
    """Returns whether a pair belongs to evaluation, by a hash of both; all others belong to training."""
    digest = hashlib.blake2b(f"{key}\0{value}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") < EVALUATION_SHARE * 2**32


def draw_values(rng: np.random.Generator, keys: list[str], lowest: int, highest: int, evaluation: bool) -> list[int]:
    """Returns a number for each key from lowest .. highest - 1, all different, so that each pair belongs to one split.

    Args:
      evaluation: to that of evaluation, else to that of training.

    Raises:
      ValueError: there are fewer than 10 / 9 numbers for each key, too few to be found by drawing.
    """
    if 10 * len(keys) > 9 * (highest - lowest):
        raise ValueError(f"numbers from {lowest} to {highest - 1} are too few for {len(keys)} keys; "
                         f"{9 * (highest - lowest) // 10} keys would work")
    values: list[int] = []
    used: set[int] = set()
    for key in keys:
        while True:
            value = int(rng.integers(lowest, highest))
            if value not in used and is_evaluation(key, value) == evaluation:
                break
        used.add(value)
        values.append(value)
    return values
