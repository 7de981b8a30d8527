"""The masks of `model.dropout` in plain numpy, element by element as its docstring defines them."""

import numpy as np

WEYL, FIRST, SECOND = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35


def mix(key: np.ndarray, number) -> np.ndarray:
    """Returns MurmurHash3's finalizer of key + number * WEYL in 32 bits, computed in 64 bits and
    truncated."""
    x = (np.asarray(key, np.uint64) + np.asarray(number, np.uint64) * np.uint64(WEYL)) & np.uint64(
        0xFFFFFFFF
    )
    for shift, factor in ((16, FIRST), (13, SECOND)):
        x = ((x ^ (x >> np.uint64(shift))) * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return x ^ (x >> np.uint64(16))


def mask(
    rate: float,
    seed: int,
    step: int,
    rows: int,
    length: int,
    layer: int,
    projection: int,
    features: int,
) -> np.ndarray:
    """Returns which elements [rows, length, features] of an adapter's input are kept."""
    row, index, feature = np.ogrid[:rows, :length, :features]
    key = WEYL
    for number in (seed, step, row, index, layer, projection, feature):
        key = mix(key, number)
    return key >= round(rate * 2**32)
