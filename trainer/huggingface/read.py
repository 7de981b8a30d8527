"""Reads Hugging Face model folders into sharded arrays, without a second copy in memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np

from model.codecs import Nf4, dequantize_nf4
from model.config import TransformerConfig

from .bitsandbytes import is_nf4, read_nf4
from .folder import check_tensors, open_tensors
from .table import ExpertsEntry, HFEntry, HoldsNaN, hf_layout, layout_of


def read_hf(
    folder: str | Path,
    config: TransformerConfig,
    shardings: Mapping[str, jax.sharding.Sharding] | jax.sharding.Sharding,
    dtype: Any = np.float32,
    in_memory: TransformerConfig | None = None,
) -> dict[str, jax.Array]:
    """Reads the weights in `folder` as our flat dictionary, parameter name -> array.

    Each device's part is read separately from the memory-mapped files, so at most one extra part is
    in memory.

    Args:
      config: the model's sizes.
      shardings: by name, for the parameters to read; or one for all.
      dtype: of the arrays: by name, or one for all.
      in_memory: the sizes of padded arrays (see model.padding); the padding is zero.

    Raises:
      ValueError: names a tensor that is missing, unknown, of another shape, not bfloat16, float16
        or float32, or that holds NaN; or the folder has no safetensors.
    """
    with ExitStack() as stack:
        files = open_tensors(Path(folder), stack)
        layout = layout_of(files, config)
        check_tensors(Path(folder), files, layout, config)
        params: dict[str, jax.Array] = {}
        for entry, padded in zip(layout, hf_layout(in_memory or config), strict=True):
            if isinstance(shardings, Mapping) and entry.name not in shardings:
                continue
            first = next(iter(entry.file_tensors()))
            if is_nf4(files, first):
                raise ValueError(
                    f"{folder}: tensor {first} is stored in NF4, which can only be the base of "
                    "adapters, with adapter.quantize nf4; otherwise use the unquantized model"
                )
            sharding = shardings[entry.name] if isinstance(shardings, Mapping) else shardings
            dtype_of_entry = np.dtype(dtype[entry.name] if isinstance(dtype, Mapping) else dtype)
            read = functools.partial(padded_part, files, entry, padded.shape, dtype_of_entry)
            try:
                params[entry.name] = jax.make_array_from_callback(padded.shape, sharding, read)
            except HoldsNaN as error:
                raise ValueError(f"{folder}: {error}") from None
            # Transfers may lag; waiting keeps only one array's parts on the host.
            params[entry.name].block_until_ready()
        return params


def check_weights(folder: str | Path, config: TransformerConfig) -> None:
    """Raises what `read_hf` would for a folder's names, shapes and dtypes, without the numbers."""
    with ExitStack() as stack:
        files = open_tensors(Path(folder), stack)
        check_tensors(Path(folder), files, layout_of(files, config), config)


class StoredParameter:
    """A parameter in a Hugging Face folder's files; slicing reads a layer."""

    def __init__(self, files: Mapping[str, Any], entry: HFEntry) -> None:
        self.files, self.entry, self.shape = files, entry, entry.shape

    def __getitem__(self, layer: int) -> np.ndarray:
        return self._read(self.entry.hf_names()[layer])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        names = self.entry.hf_names()
        whole = (
            self._read(names[0])
            if self.entry.layers is None
            else np.stack([self._read(name) for name in names])
        )
        return whole if dtype is None else whole.astype(dtype)

    def _read(self, name: str) -> np.ndarray:
        return self.entry.read(self.files, name, tuple(map(slice, self.entry.layer_shape)))


class StoredCodes(StoredParameter):
    """A parameter stored as NF4 codes."""

    def quantized(self, layer: int) -> list[Nf4]:
        """Returns a layer's stored codes and scales: of one matrix, or of each expert's."""
        return self._codes(self.entry.hf_names()[layer])

    def _codes(self, name: str) -> list[Nf4]:
        entry = self.entry
        names = entry.of_experts(name) if isinstance(entry, ExpertsEntry) else [name]
        return [read_nf4(self.files, part, entry.file_shape, entry.rows) for part in names]

    def _read(self, name: str) -> np.ndarray:
        entry = self.entry
        one = entry.of_one if isinstance(entry, ExpertsEntry) else entry
        matrices = [one.from_hf(dequantize_nf4(codes)) for codes in self._codes(name)]
        return np.stack(matrices) if isinstance(entry, ExpertsEntry) else matrices[0]


def stored_hf(
    folder: str | Path, config: TransformerConfig, stack: ExitStack
) -> dict[str, StoredParameter]:
    """Opens the parameters in `folder`; `stack` closes the files. Errors as in `read_hf`."""
    files = open_tensors(Path(folder), stack)
    layout = layout_of(files, config)
    check_tensors(Path(folder), files, layout, config)
    return {
        entry.name: (
            StoredCodes if is_nf4(files, next(iter(entry.file_tensors()))) else StoredParameter
        )(files, entry)
        for entry in layout
    }


def padded_part(
    files: Mapping[str, Any],
    entry: HFEntry,
    shape: tuple[int, ...],
    dtype: Any,
    index: tuple[slice, ...],
) -> np.ndarray:
    """Reads the part `index` of a parameter zero-padded to `shape`."""
    if shape == entry.shape:
        return _read_part(files, entry, index, dtype)
    bounds = [axis_slice.indices(size)[:2] for axis_slice, size in zip(index, shape, strict=True)]
    stored = [
        (start, min(stop, size)) for (start, stop), size in zip(bounds, entry.shape, strict=True)
    ]
    part = np.zeros([stop - start for start, stop in bounds], dtype)
    if all(start < stop for start, stop in stored):
        unpadded = tuple(slice(stop - start) for start, stop in stored)
        part[unpadded] = _read_part(files, entry, tuple(slice(*bound) for bound in stored), dtype)
    return part


def _read_part(
    files: Mapping[str, Any], entry: HFEntry, index: tuple[slice, ...], dtype: Any
) -> np.ndarray:
    """Reads the part `index` of a parameter as `dtype`, layer by layer if stacked."""
    if entry.layers is None:
        return np.ascontiguousarray(entry.read(files, entry.hf_name, index).astype(dtype))
    names = entry.hf_names()[index[0]]
    parts = (entry.read(files, name, index[1:]) for name in names)
    shape = tuple(
        len(range(*axis_slice.indices(size)))
        for axis_slice, size in zip(index, entry.shape, strict=True)
    )
    result = np.empty(shape, dtype)
    for layer, part in enumerate(parts):
        result[layer] = (
            part  # casts in numpy, which keeps denormal numbers; an XLA cast may flush them
        )
    return result
