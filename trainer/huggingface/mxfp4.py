"""Reads experts' MXFP4 matrices, as in the published gpt-oss, as bfloat16.

Two tensors hold a matrix [X, K, N], N the outputs: `NAME_blocks` [X, N, K / 32, 16], two codes a
byte, the lower bits first; and `NAME_scales` [X, N, K / 32], the exponents of powers of 2, plus 127
(Open Compute Project, Microscaling Formats, version 1.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .table import HoldsNaN

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK = 32
_BIAS = 127
_NAN = 255  # the code of NaN scales
_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_LEVELS = np.concatenate([_POSITIVE, -_POSITIVE])
_BYTES = np.arange(256)
_PAIRS = np.stack([_LEVELS[_BYTES & 15], _LEVELS[_BYTES >> 4]], -1)  # the two numbers of each byte


def dequantize_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the dequantized numbers, bfloat16 [..., G * 32], as transformers does.

    Args:
      blocks: uint8 [..., G, 16]; scales: uint8 [..., G].
    """
    numbers = _PAIRS[blocks].reshape(*blocks.shape[:-1], _BLOCK)
    with np.errstate(over="ignore"):  # the largest scales make infinities
        numbers = np.ldexp(numbers, scales[..., None].astype(np.int32) - _BIAS)
    return numbers.astype(jnp.bfloat16).reshape(*scales.shape[:-1], -1)


class _Matrices:
    """Stands in for the opened file of the matrices [X, K, N] of two tensors, and for its slice."""

    def __init__(self, name: str, blocks: Any, scales: Any) -> None:
        self.name, self._blocks, self._scales = name, blocks, scales

    def get_slice(self, name: str) -> _Matrices:
        assert name == self.name
        return self

    def get_dtype(self) -> str:
        return "BF16"

    def get_shape(self) -> list[int]:
        experts, outputs, groups, _ = self._blocks.get_shape()
        return [experts, groups * _BLOCK, outputs]

    def __getitem__(self, index: tuple[int | slice, slice, slice]) -> np.ndarray:
        """Returns a part of one or more matrices, reading only its blocks."""
        expert, rows, columns = index
        start, stop, _ = rows.indices(self.get_shape()[1])
        first = start // _BLOCK
        stored = expert, columns, slice(first, -(-stop // _BLOCK))
        scales = self._scales[stored]
        if (scales == _NAN).any():
            raise HoldsNaN(
                f"tensor {self.name}{_SCALES} holds NaN ({np.count_nonzero(scales == _NAN):,} "
                f"scales are {_NAN}); another copy of the model, without NaN, would work"
            )
        numbers = dequantize_mxfp4(self._blocks[stored], scales)
        part = slice(start - first * _BLOCK, stop - first * _BLOCK)
        return numbers[..., part].swapaxes(-1, -2)


def with_matrices(files: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the opened file of each tensor, with matrices instead of codes.

    Raises:
      ValueError: names a tensor that is missing, or has the wrong dtype or shape.
    """
    files = dict(files)
    for blocks_name in [name for name in files if name.endswith(_BLOCKS)]:
        name = blocks_name.removesuffix(_BLOCKS)
        if name + _SCALES not in files:
            raise ValueError(
                f"tensor {name}{_SCALES} is missing, but {blocks_name} is there; MXFP4 needs both"
            )
        blocks, scales = (files.pop(part).get_slice(part) for part in (blocks_name, name + _SCALES))
        *groups, _ = shape = list(blocks.get_shape())
        needed = {
            blocks_name: (blocks, [*groups[:3], _BLOCK // 2]),
            name + _SCALES: (scales, groups),
        }
        for part, (tensor, expected) in needed.items():
            found = tensor.get_dtype(), list(tensor.get_shape())
            if found != ("U8", expected) or len(shape) != 4:
                raise ValueError(
                    f"tensor {part} is {found[0]} {found[1]}; MXFP4 needs U8 {expected}, experts x "
                    "outputs x blocks of 32 inputs in 16 bytes, and a scale for each block"
                )
        files[name] = _Matrices(name, blocks, scales)
    return files
