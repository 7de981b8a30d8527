"""Reads Hugging Face model folders into sharded arrays, without a second copy in memory."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np

from model.adapter import NF4_BLOCK
from model.codecs import Nf4
from model.config import TransformerConfig
from model.quantized_weights import is_quantized

from .bitsandbytes import decoded, is_nf4
from .folder import check_tensors, open_tensors
from .hub_models import hub_name
from .table import ExpertsEntry, HFEntry, hf_layout, layout_of

# Suffix of the names of Unsloth's models with some layers that are not in NF4.
_DYNAMIC = "-unsloth-bnb-4bit"


def read_hf(
    folder: str | Path,
    config: TransformerConfig,
    shardings: Mapping[str, jax.sharding.Sharding] | jax.sharding.Sharding,
    dtype: Any = np.float32,
    in_memory: TransformerConfig | None = None,
) -> dict[str, jax.Array]:
    """Reads the weights in `folder` as our flat dictionary, parameter name -> array.

    Each device's part is read separately from the memory-mapped files, so at most one extra part is
    in memory. Matrices in NF4 are decoded as bitsandbytes does; a warning gives the size.

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
        files = decoded(files, layout)
        params: dict[str, jax.Array] = {}
        is_read = [not isinstance(shardings, Mapping) or x.name in shardings for x in layout]
        _warn_of_decoding(folder, files, itertools.compress(layout, is_read))
        both = zip(layout, hf_layout(in_memory or config), strict=True)
        for entry, padded in itertools.compress(both, is_read):
            sharding = shardings[entry.name] if isinstance(shardings, Mapping) else shardings
            dtype_of_entry = np.dtype(dtype[entry.name] if isinstance(dtype, Mapping) else dtype)
            read = functools.partial(padded_part, files, entry, padded.shape, dtype_of_entry)
            try:
                params[entry.name] = jax.make_array_from_callback(padded.shape, sharding, read)
            except ValueError as error:  # NaN, or a fault in codes
                raise ValueError(f"{folder}: {error}") from None
            # Transfers may lag; waiting keeps only one array's parts on the host.
            params[entry.name].block_until_ready()
        return params


def check_weights(folder: str | Path, config: TransformerConfig) -> None:
    """Raises what `read_hf` would for a folder's names, shapes and dtypes, without the numbers."""
    with ExitStack() as stack:
        files = open_tensors(Path(folder), stack)
        check_tensors(Path(folder), files, layout_of(files, config), config)


def check_codes(folder: Path, config: TransformerConfig, kind: str) -> None:
    """Checks that a folder's matrices in NF4, if there are any, suit `adapter.quantize`.

    With nf4 all of the layers' projections must be in NF4, or none; with int8 none.

    Args:
      kind: `adapter.quantize`.

    Raises:
      ValueError: names a tensor, and what would work.
    """
    if kind == "none":
        return
    coded, plain = projections_in_nf4(folder, config)
    if not coded or (kind == "nf4" and not plain):
        return
    found = f"{coded[0]} is in NF4, and adapter.quantize {kind} would quantize its numbers again"
    works = "adapter.quantize nf4 trains on the codes, and adapter.quantize none on the numbers"
    if plain:
        works = (
            "adapter.quantize none trains on the decoded numbers, in 16 bits, which are those that "
            f"other programs train adapters on; or use {_siblings(folder)}"
        )
    if kind == "nf4":
        found = (
            f"{plain[0]} is not in NF4, unlike others (llm_int8_skip_modules in config.json), and "
            "adapter.quantize nf4 needs the codes of all layers"
        )
        if not config.num_experts:
            works = (
                f"python -m scripts.quantize_hf {folder} NEW_FOLDER keeps the codes and quantizes "
                f"the {len(plain)} others; {works}"
            )
    raise ValueError(f"{folder}: tensor {found}; {works}")


def projections_in_nf4(folder: Path, config: TransformerConfig) -> tuple[list[str], list[str]]:
    """Returns the names of the tensors of the layers' projections: those in NF4, and the others."""
    with ExitStack() as stack:
        files = open_tensors(folder, stack)
        entries = [entry for entry in layout_of(files, config) if is_quantized(entry.name)]
        coded, others = list[str](), list[str]()
        for name in dict.fromkeys(name for entry in entries for name in entry.file_tensors()):
            if name in files:
                (coded if is_nf4(files, name) else others).append(name)
        return coded, others


def _siblings(folder: Path) -> str:
    """The models that can be quantized in place of one that is only partly in NF4."""
    name = (hub_name(str(folder)) or "").partition("@")[0]
    if not name.endswith(_DYNAMIC):
        return "the unquantized model"
    stem = name.removesuffix(_DYNAMIC)
    return f"{stem} (16 bits) or {stem}-bnb-4bit (all in NF4)"


def _warn_of_decoding(
    folder: str | Path, files: Mapping[str, Any], entries: Iterable[HFEntry]
) -> None:
    """Warns if matrices of these entries are in NF4, and so larger in memory than in the files."""
    sizes = {
        name: math.prod(shape)
        for entry in entries
        for name, shape in entry.file_tensors().items()
        if is_nf4(files, name)
    }
    if sizes:
        total = sum(sizes.values()) / 1e9
        warnings.warn(
            f"{folder}: {len(sizes)} matrices in NF4 are decoded, {2 * total:,.2f} GB in 16 bits "
            f"instead of {(1 / 2 + 1 / NF4_BLOCK) * total:,.2f} GB",
            stacklevel=3,
        )


class StoredParameter:
    """A parameter in a Hugging Face folder's files; slicing reads a layer, and decodes NF4."""

    def __init__(self, files: Mapping[str, Any], entry: HFEntry) -> None:
        self.files, self.entry, self.shape = files, entry, entry.shape

    def codes(self, tensor: str) -> Nf4 | None:
        """Returns the codes and scales of one of the files' matrices; None if it has none."""
        return self.files[tensor].codes() if is_nf4(self.files, tensor) else None

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
    """A projection that all layers store as NF4 codes."""

    def quantized(self, layer: int) -> list[Nf4]:
        """Returns a layer's stored codes and scales: of one matrix, or of each expert's."""
        entry, name = self.entry, self.entry.hf_names()[layer]
        names = entry.of_experts(name) if isinstance(entry, ExpertsEntry) else [name]
        return [self.files[part].codes(entry.rows) for part in names]


def stored_hf(
    folder: str | Path, config: TransformerConfig, stack: ExitStack
) -> dict[str, StoredParameter]:
    """Opens the parameters in `folder`; `stack` closes the files. Errors as in `read_hf`."""
    files = open_tensors(Path(folder), stack)
    layout = layout_of(files, config)
    check_tensors(Path(folder), files, layout, config)
    files = decoded(files, layout)
    return {
        entry.name: (
            StoredCodes
            if is_quantized(entry.name) and all(is_nf4(files, x) for x in entry.file_tensors())
            else StoredParameter
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
        # Casts in numpy, which keeps denormal numbers; an XLA cast may flush them.
        result[layer] = part
    return result
