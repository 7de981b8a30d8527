"""One attention block for bench_kernels: its size and kind (`Case`), its arrays (`Block`)."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

MEMORY = Path("/proc/meminfo")
BLOCKS = ("diagonal", "strict", "full", "packed", "empty")
DOCUMENTS = 16
# Tokens with random vectors; longer blocks repeat them, since drawing is slower than attention.
DRAWN = 4096


class LeftOut(Exception):
    """A peer cannot be measured; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
      peer: a key of PEERS.
      block: one of BLOCKS, all of them causal. `diagonal`: queries against keys of the same tokens;
        `strict`: against keys one index later each (an upper round of a striped ring); `full`:
        against earlier tokens; `empty`: against later ones; `packed`: as diagonal, with DOCUMENTS
        documents of random lengths.
      length: tokens of the block of queries and of the block of keys.
      backward: whether the gradients are computed as well.
      kernel: our kernel's name.
      tile: tokens on a side of our kernel's tiles; 0 for the kernel's choice.
      order: the order of our backward pass: repeatable, or any_order.
      repeats: number of runs; the fastest counts.
    """

    peer: str
    block: str
    length: int
    backward: bool
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    kernel: str = "auto"
    tile: int = 0
    order: str = "repeatable"
    repeats: int = 3

    def document_lengths(self) -> Int[np.ndarray, " documents"]:
        """Returns the lengths of the block's documents, which add up to `length`."""
        if self.block != "packed":
            return np.array([self.length])
        cuts = np.random.default_rng(0).choice(
            np.arange(1, self.length), DOCUMENTS - 1, replace=False
        )
        return np.diff(np.concatenate([[0], np.sort(cuts), [self.length]]))

    def visible_pairs(self) -> int:
        """Returns the number of visible pairs of query and key."""
        n = self.document_lengths().astype(object)
        pairs = {"strict": n * (n - 1) // 2, "full": n * n, "empty": n * 0}.get(
            self.block, n * (n + 1) // 2
        )
        return int(pairs.sum())

    def flops(self) -> float:
        """Returns the FLOPs of the visible pairs: two products forward, five more backward."""
        return 2.0 * self.head_dim * self.heads * self.visible_pairs() * (7 if self.backward else 2)


class Block(NamedTuple):
    """A case's arrays on the host; queries and keys have the same segment ids."""

    q: Float[np.ndarray, "1 T Hq D"]
    k: Float[np.ndarray, "1 T Hkv D"]
    v: Float[np.ndarray, "1 T Hkv D"]
    dout: Float[np.ndarray, "1 T Hq D"]
    q_index: Int[np.ndarray, "1 T"]
    kv_index: Int[np.ndarray, "1 T"]
    segment_ids: Int[np.ndarray, "1 T"]

    def mask(self) -> Bool[np.ndarray, "T T"]:
        """Returns the block's mask as a dense array, queries by keys."""
        same = self.segment_ids[0][:, None] == self.segment_ids[0][None]
        return same & (self.q_index[0][:, None] >= self.kv_index[0][None])


def make_block(case: Case) -> Block:
    """Returns random vectors and the coordinates of the case's kind of block."""
    length = case.length
    index = np.arange(length, dtype=np.int32)[None]
    q_index, kv_index = {
        "strict": (2 * index, 2 * index + 1),
        "full": (index + length, index),
        "empty": (index, index + length),
    }.get(case.block, (index, index))
    segments = np.repeat(
        np.arange(1, len(case.document_lengths()) + 1, dtype=np.int32), case.document_lengths()
    )[None]
    q, k, v, dout = _vectors(length, case.heads, case.kv_heads, case.head_dim)
    return Block(q, k, v, dout, q_index, kv_index, segments)


@functools.lru_cache(maxsize=1)
def _vectors(
    length: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[Float[np.ndarray, "1 T H D"], ...]:
    """Returns random q, k, v and dout; long blocks repeat the vectors of their first tokens."""
    rng, repeats = np.random.default_rng(0), -(-length // DRAWN)
    drawn = (
        rng.standard_normal((1, min(length, DRAWN), count, head_dim), dtype=np.float32)
        for count in (heads, kv_heads, kv_heads, heads)
    )
    return tuple(np.tile(x, (1, repeats, 1, 1))[:, :length] for x in drawn)


def refuse_dense(case: Case, copies: int) -> None:
    """Raises LeftOut if `copies` of T x T float32 scores would not fit in free host memory."""
    needed = copies * 4 * case.heads * case.length**2
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Linux: memory used by caches is available too.
    if MEMORY.exists() and (
        available := re.search(r"MemAvailable:\s+(\d+) kB", MEMORY.read_text())
    ):
        free = int(available[1]) * 1024
    if needed > 0.7 * free:
        raise LeftOut(
            f"its T x T scores need about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free"
        )
