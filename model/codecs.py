"""Weights in fewer bits, as bitsandbytes stores them: NF4 with double quantization, and int8 with
one scale per row. In numpy.

A matrix is [outputs, inputs], as Hugging Face stores it. NF4 (Dettmers et al., QLoRA, arXiv
2305.14314, section 3) divides blocks of 64 numbers of a row by their largest absolute value, and
stores each as the nearest of 16 levels. Double quantization stores these largest values as 8-bit
codes too, relative to their mean, in blocks of 256 with a float32 scale each: 4.127 bits per
weight. The levels, the order of operations and the rounding match bitsandbytes 0.50.2 on a CPU bit
for bit. Its CUDA kernels take the exact nearest of the 256 levels while the CPU's use a table of
65,536 entries, so its codes may differ by one between machines; the meaning of a code does not.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import os
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int8, Shaped, UInt8

from .adapter import NF4_BLOCK

# Blocks of NF4 that share a scale of the second quantization.
NESTED_BLOCK = 256
# The 16 levels of NF4 (QLoRA, appendix E).
NF4_LEVELS = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
# Two NF4 codes of level 0 in one byte.
NF4_ZEROS = 0x77
# The factor of int8 codes besides their row's scale: 1 / 127 as bitsandbytes rounds it.
INT8_UNIT = np.float32(7.874015718698502e-3)
# Rows are quantized in pieces of about this many numbers, to stay in the processor's cache.
_PIECE = 1 << 16


class Nf4(NamedTuple):
    """A matrix [O, I] in NF4 with double quantization."""

    codes: UInt8[np.ndarray, "O I/2"]
    """Two weights per byte, the first in the upper four bits."""
    absmax: UInt8[np.ndarray, "O I/64"]
    """Codes of each block's largest absolute value, minus `offset`."""
    nested: Float[np.ndarray, " S"]
    """The scales of these codes, one for 256 of them in the order of the rows, float32."""
    offset: Float[np.ndarray, ""]
    """The mean of the blocks' largest absolute values, float32."""


class Int8Rows(NamedTuple):
    """A matrix [O, I] in int8 with a scale for each row."""

    codes: Int8[np.ndarray, "O I"]
    absmax: Float[np.ndarray, " O"]
    """The rows' largest absolute values, float32."""


@functools.cache
def dynamic_levels() -> Float[np.ndarray, " 256"]:
    """Returns the 256 levels of the second quantization, ascending (Dettmers, 8-Bit Approximations,
    arXiv 1511.04561).

    Of the seven decades below 1, the i-th from below has 2^i evenly spaced levels of each sign; 0
    and 1 are levels too.
    """
    levels = [0.0, 1.0]
    for i in range(7):
        # torch.linspace: from both ends to the middle, with fused multiply-adds.
        counts = np.arange(2**i + 1)
        start, end = np.float32(0.1), np.float32(1)
        step = np.float64((end - start) / np.float32(2**i))
        bounds = np.where(
            counts < len(counts) // 2, start + step * counts, end - step * counts[::-1]
        ).astype(np.float32)
        middles = (bounds[:-1] + bounds[1:]) / np.float32(2) * np.float32(10.0 ** (i - 6))
        levels += [*middles.tolist(), *(-middles).tolist()]
    return np.array(sorted(levels), np.float32)


@functools.cache
def _nearest_dynamic() -> UInt8[np.ndarray, " 65536"]:
    """The code of the level next to each of 65,536 evenly spaced numbers from -1 to 1."""
    levels = dynamic_levels()
    numbers = np.float32(-1) + np.float32(2) * np.arange(65536, dtype=np.float32) / np.float32(
        65535
    )
    return np.searchsorted(np.float32(0.5) * (levels[:-1] + levels[1:]), numbers).astype(np.uint8)


def quantize_nf4(weight: Shaped[np.ndarray, "O I"], offset: float | None = None) -> Nf4:
    """Returns the matrix in NF4.

    Args:
      weight: any float dtype; I is a multiple of 64.
      offset: the mean of the blocks' largest absolute values, if another program computed it. Ours
        is rounded once, from float64; the last bit of torch's depends on the order in which its
        threads add.
    """
    outputs, inputs = weight.shape
    assert inputs % NF4_BLOCK == 0, weight.shape
    codes = np.empty((outputs, inputs // 2), np.uint8)
    absmax = np.empty((outputs, inputs // NF4_BLOCK), np.float32)
    middles = (NF4_LEVELS[:-1] + NF4_LEVELS[1:]) / np.float32(2)

    def quantize(rows):
        blocks = weight[rows].astype(np.float32).reshape(-1, NF4_BLOCK)
        largest = np.abs(blocks).max(1)
        blocks *= (np.float32(1) / np.maximum(largest, np.float32(1e-38)))[:, None]
        piece = np.zeros(blocks.shape, np.uint8)
        for middle in middles:
            piece += blocks > middle
        codes[rows] = (piece[:, ::2] << 4 | piece[:, 1::2]).reshape(-1, inputs // 2)
        absmax[rows] = largest.reshape(-1, inputs // NF4_BLOCK)

    _in_pieces(quantize, outputs, inputs)
    mean = np.float32(absmax.mean(dtype=np.float64) if offset is None else offset)
    absmax_codes, nested = _quantize_dynamic(absmax.ravel() - mean)
    return Nf4(codes, absmax_codes.reshape(absmax.shape), nested, np.asarray(mean))


def _quantize_dynamic(
    x: Float[np.ndarray, " n"],
) -> tuple[UInt8[np.ndarray, " n"], Float[np.ndarray, " S"]]:
    """8-bit codes in blocks of 256, and the blocks' scales."""
    blocks = np.pad(x, (0, -len(x) % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    scales = np.abs(blocks).max(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.clip(blocks * (np.float32(1) / scales)[:, None], -1, 1)
        index = (shares + np.float32(1)) * np.float32(0.5) * np.float32(65535) + np.float32(0.5)
        codes = np.where(
            scales[:, None] > 0,
            _nearest_dynamic()[np.nan_to_num(index).astype(np.uint16)],
            np.uint8(0),
        )
    return codes.reshape(-1)[: len(x)], scales


def dequantize_absmax(weight: Nf4) -> Float[np.ndarray, "O I/64"]:
    """Returns the blocks' largest absolute values, undoing the second quantization."""
    scales = np.repeat(weight.nested, NESTED_BLOCK)[: weight.absmax.size].reshape(
        weight.absmax.shape
    )
    return dynamic_levels()[weight.absmax] * scales + np.float32(weight.offset)


def dequantize_nf4(
    weight: Nf4, rows: slice = slice(None), columns: slice = slice(None)
) -> Float[np.ndarray, "o i"]:
    """Returns the matrix that the codes represent, or a part of it without steps, float32."""
    # The two levels of each byte, as one 8-byte number that is looked up at once.
    pairs = np.stack([NF4_LEVELS.repeat(16), np.tile(NF4_LEVELS, 16)], -1).view(np.uint64)[:, 0]
    start, stop, _ = columns.indices(2 * weight.codes.shape[1])
    first, end = start // NF4_BLOCK, math.ceil(stop / NF4_BLOCK)
    codes = weight.codes[rows, first * NF4_BLOCK // 2 : end * NF4_BLOCK // 2]
    absmax = dequantize_absmax(weight)[rows, first:end]
    matrix = np.empty((len(codes), stop - start), np.float32)

    def dequantize(piece):
        levels = np.take(pairs, codes[piece]).view(np.float32)
        blocks = levels.reshape(*absmax[piece].shape, NF4_BLOCK) * absmax[piece][..., None]
        within = slice(start - first * NF4_BLOCK, stop - first * NF4_BLOCK)
        matrix[piece] = blocks.reshape(len(blocks), -1)[:, within]

    _in_pieces(dequantize, *matrix.shape)
    return matrix


def quantize_int8(weight: Shaped[np.ndarray, "O I"]) -> Int8Rows:
    """Returns the matrix in int8, each row divided by its largest absolute value; of any float
    dtype."""
    codes = np.empty(weight.shape, np.int8)
    absmax = np.empty(weight.shape[0], np.float32)

    def quantize(rows):
        piece = weight[rows].astype(np.float32)
        absmax[rows] = np.abs(piece).max(1)
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = piece * (np.float32(1) / absmax[rows] * np.float32(127))[:, None]
        codes[rows] = np.rint(np.where(absmax[rows][:, None] > 0, scaled, 0))

    _in_pieces(quantize, *weight.shape)
    return Int8Rows(codes, absmax)


def dequantize_int8(weight: Int8Rows) -> Float[np.ndarray, "O I"]:
    """Returns the matrix that the codes represent, float32."""
    return weight.codes * weight.absmax[:, None] * INT8_UNIT


def _in_pieces(fn, rows: int, columns: int) -> None:
    """Calls fn with slices of the rows, in threads: numpy's loops run without Python's lock."""
    size = max(1, _PIECE // max(1, columns))
    slices = [slice(start, start + size) for start in range(0, rows, size)]
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for _ in pool.map(fn, slices):
            pass


def nested_count(outputs: int, inputs: int) -> int:
    """Returns the number of scales in a matrix's second quantization."""
    return math.ceil(outputs * inputs / NF4_BLOCK / NESTED_BLOCK)
