"""Which keys, values and pairs of both belong to evaluation.

Training texts never hold both parts of an evaluation pair together, and no reserved key or value at
all. An evaluation takes evaluation pairs, of any keys and values; or only reserved keys and values,
of which there are fewer.
"""

import functools
import hashlib
import itertools
from collections.abc import Sequence

import numpy as np

from data.synthetic import words

EVALUATION_SHARE = 1 / 8


def is_evaluation(key: str, value: object) -> bool:
    """Returns whether a pair belongs to evaluation rather than training, by a hash of both."""
    return _hash(f"{key}\0{value}") < EVALUATION_SHARE * 2**32


def is_reserved(text: object) -> bool:
    """Returns whether a key or value occurs in no training text, with any partner."""
    return _hash(str(text)) < EVALUATION_SHARE * 2**32


def _hash(text: str) -> int:
    """Returns 32 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def draw_keys(rng: np.random.Generator, kind: str, count: int, reserved: bool) -> list[str]:
    """Returns `count` different word keys, in random order: all reserved, or none.

    Raises:
      ValueError: there are fewer reserved keys of two words.
    """
    keys = _pairs(kind, True) if reserved else _unreserved(kind, count)
    if count > len(keys):
        raise ValueError(
            f"{count} keys that no training text has cannot be drawn; {kind} has {len(keys)}"
        )
    return [keys[i] for i in rng.choice(len(keys), count, replace=False)]


@functools.cache
def _pairs(kind: str, reserved: bool) -> tuple[str, ...]:
    """Returns all keys of two words that are reserved, or that are not."""
    return tuple(key for key in words.keys(kind, 0) if is_reserved(key) == reserved)


@functools.lru_cache(maxsize=4)
def _unreserved(kind: str, count: int) -> Sequence[str]:
    """Returns at least `count` keys allowed in training texts, of two words if these suffice."""
    pairs = _pairs(kind, False)
    if count <= len(pairs):
        return pairs
    longer = words.keys(kind, 2 * count)[len(words.keys(kind, 0)) :]
    return [
        *pairs,
        *itertools.islice(itertools.filterfalse(is_reserved, longer), count - len(pairs)),
    ]


def draw_values(
    rng: np.random.Generator,
    keys: Sequence[str],
    lowest: int,
    highest: int,
    evaluation: bool,
    reserved: bool = False,
) -> list[int]:
    """Returns distinct numbers for keys, lowest .. highest - 1, with all pairs in one split.

    Args:
      evaluation: whether pairs are of evaluation, else of training, which has no reserved number.
      reserved: for evaluation, take only reserved numbers, with any partners.

    Raises:
      ValueError: there are fewer than 10 / 9 numbers for each key, too few to be found by drawing.
    """
    if len(keys) > (most := most_keys(lowest, highest, evaluation, reserved)):
        raise ValueError(
            f"numbers from {lowest} to {highest - 1} are too few for {len(keys)} keys; {most} keys "
            "would work"
        )
    values: list[int] = []
    used: set[int] = set()
    for key in keys:
        while True:
            value = int(rng.integers(lowest, highest))
            if value not in used and _belongs(key, value, evaluation, reserved):
                break
        used.add(value)
        values.append(value)
    return values


def most_keys(lowest: int, highest: int, evaluation: bool, reserved: bool = False) -> int:
    """Returns how many keys `draw_values` can serve: nine per ten numbers of the split."""
    share = EVALUATION_SHARE if reserved else 1 if evaluation else 1 - EVALUATION_SHARE
    return int(0.9 * share * (highest - lowest))


def _belongs(key: str, value: int, evaluation: bool, reserved: bool) -> bool:
    """Returns whether a pair is of the kind requested from `draw_values`."""
    if reserved:
        return is_reserved(value)
    if evaluation:
        return is_evaluation(key, value)
    return not (is_evaluation(key, value) or is_reserved(value))
