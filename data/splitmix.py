"""Pseudorandom numbers that are the same in every version of every library."""

import numpy as np
from jaxtyping import UInt64


def splitmix64(value: UInt64[np.ndarray, " N"]) -> UInt64[np.ndarray, " N"]:
    """Returns the output of the generator splitmix64 (Steele et al., 2014) for each state."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
