"""MinHash: texts that share most of their shingles get, for some band, the same key.

A shingle is five consecutive words. The similarity of two texts is the Jaccard index of their
shingles: how many both have, divided by how many at least one has.
"""

import math
import re
import unicodedata
import zlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt32, UInt64

from data.splitmix import splitmix64

SHINGLE = 5  # words
MOST_HASHES = 256
FOUND = 0.99  # share of pairs exactly at the threshold
_BLOCK = 1 << 10  # shingles hashed at a time
# Scripts written without spaces, where each character counts as a word: Thai, Lao, Burmese, Khmer,
# Chinese and Japanese.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


class Bands(NamedTuple):
    """The number of keys per text, and of hashes per key."""

    keys: int
    rows: int


def bands_for(threshold: float) -> Bands:
    """Returns the bands that find FOUND of the pairs at the threshold, with few other pairs.

    With more rows, fewer pairs below the threshold share a key. Pairs above it are found more
    often: at 0.8, 26 bands of 8 rows find 99.2 % of pairs at 0.8 and 99.99 % at 0.85.
    """
    best = Bands(1, 1)
    for rows in range(1, MOST_HASHES + 1):
        missed = 1 - threshold**rows
        if missed == 1.0:  # rounded: far too many rows
            break
        count = math.ceil(math.log(1 - FOUND) / math.log(missed)) if missed > 0 else 1
        if count * rows <= MOST_HASHES:
            best = Bands(count, rows)
    return best


def shingles(text: str) -> UInt32[np.ndarray, " n"]:
    """Returns the sorted, distinct hashes of a text's shingles; for a shorter text, the hash of all
    its words; none without a word.

    Upper and lower case, punctuation and white space make no difference.
    """
    words = _WORD.findall(unicodedata.normalize("NFKC", text).lower())
    if not words:
        return np.zeros(0, np.uint32)
    encoded = "\n".join(words).encode("utf-8", "replace").split(b"\n")
    hashes = np.fromiter(map(zlib.crc32, encoded), np.uint64, len(words))
    count = max(1, len(words) - SHINGLE + 1)
    runs = np.zeros(count, np.uint64)
    for offset in range(min(SHINGLE, len(words))):
        runs = splitmix64(runs ^ hashes[offset : offset + count])
    return np.unique((runs >> np.uint64(32)).astype(np.uint32))


def band_keys(
    shingle_hashes: UInt32[np.ndarray, " n"], bands: Bands, kind: int = 0
) -> UInt64[np.ndarray, " bands"]:
    """Returns a text's key for each band; texts of different kinds share none."""
    factors, offsets = _functions(bands.keys * bands.rows)
    least = np.full(len(factors), np.iinfo(np.uint32).max, np.uint32)
    for start in range(0, len(shingle_hashes), _BLOCK):
        # One to one modulo 2^32, so that only equal shingles have equal hashes.
        hashes = factors[:, None] * shingle_hashes[start : start + _BLOCK] + offsets[:, None]
        np.minimum(least, hashes.min(axis=1), out=least)
    rows = least.astype(np.uint64).reshape(bands.keys, bands.rows)
    keys = np.full(bands.keys, kind, np.uint64)
    for number in range(bands.rows):
        keys = splitmix64(keys ^ rows[:, number])
    return keys


def shared_and_all(a: UInt32[np.ndarray, " n"], b: UInt32[np.ndarray, " m"]) -> tuple[int, int]:
    """Returns the number of shingles that both texts have, and that at least one has."""
    shared = len(np.intersect1d(a, b, assume_unique=True))
    return shared, len(a) + len(b) - shared


@lru_cache(maxsize=4)
def _functions(count: int) -> tuple[UInt32[np.ndarray, " h"], UInt32[np.ndarray, " h"]]:
    """Returns the factors and offsets of hash functions, the same in every version of numpy."""
    numbers = splitmix64(np.arange(2 * count, dtype=np.uint64)) >> np.uint64(32)
    return numbers[:count].astype(np.uint32) | np.uint32(1), numbers[count:].astype(np.uint32)
