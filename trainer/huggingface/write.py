"""Writes Hugging Face model folders, holding one tensor at a time on the host."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from data.folders import building, holds_files
from data.outputs import new_folder
from model.adapter import PROJECTIONS
from model.attention import Mask
from model.codecs import Nf4, quantize_nf4
from model.config import TransformerConfig

from . import bitsandbytes
from .assets import copy_files, source_dtype, trained_mask, write_config
from .read import StoredParameter
from .table import DTYPES, ExpertsEntry, HFEntry, check_numbers, check_params, hf_layout


def write_hf(
    params: Mapping[str, Any],
    config: TransformerConfig,
    assets: str | Path,
    out: str | Path,
    *,
    max_shard_bytes: int = 5 * 10**9,
    finish: Callable[[Path], None] | None = None,
    nf4: bool = False,
    stacked: bool = False,
) -> None:
    """Writes a Hugging Face folder for transformers: weights, configs, tokenizer, template.

    Tensors are written without padding, in the source dtype recorded in `assets`. `out` appears
    complete or not at all. A warning names a window and global tokens, which a LLaMA's config
    cannot express.

    Args:
      params: our flat dictionary of jax or numpy arrays, or arrays read from disk when sliced, of
        any float dtype.
      assets: a checkpoint's folder of plain files, from `ModelSource.write_assets` or
        `copy_assets`; its run.yaml, if any, gives the training mask.
      max_shard_bytes: split larger weights into several files with an index.
      finish: called with the folder before it becomes `out`, to add files.
      nf4: write the layers' projections in bitsandbytes' NF4 with double quantization; codes that
        are stored already are kept.
      stacked: write a layer's experts as one tensor, as in `hf_layout`.

    Raises:
      UserError: `out` is not empty, or cannot be written.
      ValueError: `params` are not those of `config`'s model, or hold NaN; names the parameter or
        tensor.
    """
    assets, out = Path(assets), new_folder(out)
    layout = hf_layout(config, stacked)
    check_params({name: tuple(value.shape) for name, value in params.items()}, config)
    common, exceptions = source_dtype(assets)
    warn_of_mask(assets, out)
    with building(out, holds_files) as scratch:
        _write_weights(params, layout, common, exceptions, scratch, max_shard_bytes, nf4)
        copy_files(assets, scratch)
        _write_configs(config, scratch, common, nf4)
        if finish:
            finish(scratch)


def _write_configs(config: TransformerConfig, folder: Path, dtype: str, nf4: bool) -> None:
    """Writes config.json, and generation_config.json unless the source had one."""
    write_config(config, folder)
    path = folder / "config.json"
    # Both spellings: transformers 4 reads torch_dtype, transformers 5 dtype.
    content = json.loads(path.read_text(encoding="utf-8")) | {"torch_dtype": dtype, "dtype": dtype}
    if nf4:
        quantization = {**bitsandbytes.CONFIG, "bnb_4bit_compute_dtype": dtype}
        content["quantization_config"] = quantization
    _write_json(path, content)
    path = folder / "generation_config.json"
    if not path.exists():
        ids = {
            "bos_token_id": config.bos_token_id,
            "pad_token_id": config.pad_token_id,
            "eos_token_id": config.to_hf()["eos_token_id"],
        }
        given = {name: value for name, value in ids.items() if value is not None}
        _write_json(path, {"_from_model_config": True, **given})


def warn_of_mask(assets: Path, out: Path) -> None:
    """Warns if a run's window or global tokens, by its `assets`, are lost in the export `out`."""
    if (mask := trained_mask(assets)) != Mask():
        warnings.warn(
            f"{out}: trained with attention.window = {mask.window} and attention.global_tokens = "
            f"{mask.global_tokens}, which a LLaMA's config.json cannot express: transformers will "
            "attend to all earlier tokens; the checkpoint keeps them",
            stacklevel=3,
        )


def _write_weights(
    params: Mapping[str, Any],
    layout: list[HFEntry],
    common: str,
    exceptions: Mapping[str, str],
    folder: Path,
    limit: int,
    nf4: bool,
) -> None:
    """Writes the weights, in several files with an index above `limit` bytes."""
    # Planned first, from shapes, because file names contain the number of files. Layers are in
    # order, as in transformers, so a file holds whole layers.
    plan: list[list[_Planned]] = [[]]
    total = used = 0
    for name, entries, layer, expert in _in_layer_order(layout):
        kind = _PlannedCodes if nf4 and _is_projection(entries[0]) else _Planned
        tensor = kind(name, entries, layer, exceptions.get(name, common), expert)
        if plan[-1] and used + tensor.size > limit:
            plan.append([])
            used = 0
        plan[-1].append(tensor)
        used, total = used + tensor.size, total + tensor.size
    weight_map: dict[str, str] = {}
    for number, part in enumerate(plan, start=1):
        file = (
            "model.safetensors"
            if len(plan) == 1
            else f"model-{number:05d}-of-{len(plan):05d}.safetensors"
        )
        _write_safetensors(folder / file, part, _HostLayers(params))
        weight_map |= {name: file for tensor in part for name in tensor.tensors}
    if len(plan) > 1:
        _write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )


@dataclass(frozen=True)
class _Planned:
    """A tensor to write.

    Attributes:
      name: its Hugging Face name.
      entries, layer: its parameters, and their layer.
      dtype_name: the dtype of the file.
      expert: their expert, if each has separate tensors.
    """

    name: str
    entries: list[HFEntry]
    layer: int
    dtype_name: str
    expert: int | None = None

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype and shape of each tensor of the file, by its name."""
        return {self.name: (self.dtype_name, self.entries[0].tensor_shape)}

    @property
    def size(self) -> int:
        """The bytes of the tensors."""
        return sum(
            math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in self.tensors.values()
        )

    @property
    def alignment(self) -> int:
        """The tensors' offsets and sizes are multiples of this number."""
        return np.dtype(self.dtype_name).itemsize

    def read(self, params: _HostLayers) -> Iterator[np.ndarray]:
        """Yields the tensors' contents in order, each parameter of a tensor separately."""
        for value in self._parts(params):
            with np.errstate(over="ignore"):  # reported below
                written = np.ascontiguousarray(value, np.dtype(self.dtype_name))
            if self.dtype_name == "float16" and np.isinf(written).sum() > np.isinf(value).sum():
                raise ValueError(
                    f"tensor {self.name} has numbers up to {np.abs(value).max():g}, which "
                    f"{self.dtype_name}, the dtype of its source model, cannot hold"
                )
            check_numbers(self.name, written)
            yield written

    def _parts(self, params: _HostLayers) -> Iterator[np.ndarray]:
        """Yields the parts of the tensor in order; for stacked experts, expert by expert."""
        if not isinstance(self.entries[0], ExpertsEntry):
            for entry in self.entries:
                yield entry.to_hf(params.layer(entry, self.layer))
            return
        layers = [
            (entry.of_one, params.layer(entry, self.layer))
            for entry in self.entries
            if isinstance(entry, ExpertsEntry)
        ]
        every = range(self.entries[0].experts) if self.expert is None else [self.expert]
        for expert in every:
            parts = [entry.to_hf(value[expert]) for entry, value in layers]
            if layers[0][0].step == 1:
                yield from parts
            else:  # their numbers alternate
                yield np.stack(parts, -1)


class _PlannedCodes(_Planned):
    """A matrix to write in NF4."""

    alignment = 8

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """See `_Planned.tensors`."""
        return bitsandbytes.nf4_layout(self.name, self.entries[0].file_shape)

    def read(self, params: _HostLayers) -> Iterator[np.ndarray]:
        """See `_Planned.read`."""
        codes = params.codes(self.entries[0], self.name)
        if codes is None:
            codes = quantize_nf4(np.concatenate(list(super().read(params))))
        yield from bitsandbytes.write_nf4(self.name, codes, self.dtype_name).values()


def _is_projection(entry: HFEntry) -> bool:
    module, _, part = entry.name.rpartition(".")
    return part == "weight" and module.rpartition(".")[2] in PROJECTIONS


def _write_safetensors(path: Path, part: list[_Planned], params: _HostLayers) -> None:
    """Writes one file tensor by tensor; safetensors' writer needs all of them in memory.

    The format (https://huggingface.co/docs/safetensors): the header's length in 8 bytes, the header
    as JSON, the tensors' bytes without gaps, row-major, little-endian. As in the library, wide
    dtypes come first and the header is padded to a multiple of 8 bytes, so every tensor is aligned;
    codes and their companions take a multiple of 8 bytes.
    """
    # Stable, so otherwise in layer order.
    part = sorted(part, key=lambda tensor: -tensor.alignment)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    codes, end = {dtype: code for code, dtype in DTYPES.items()} | {"uint8": "U8"}, 0
    for tensor in part:
        for name, (dtype, shape) in tensor.tensors.items():
            start, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
            header[name] = {"dtype": codes[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in part:
            for value in tensor.read(params):
                file.write(value.view(np.uint8).data)


def _in_layer_order(
    layout: list[HFEntry],
) -> Iterator[tuple[str, list[HFEntry], int, int | None]]:
    """Name, entries, layer within its stack, and expert of every tensor: embedding, layers, then
    the rest."""
    stacks: dict[tuple[int, int], dict[str, list[HFEntry]]] = {}
    for entry in layout:
        if entry.layers is not None:
            stack = stacks.setdefault((entry.first_layer, entry.layers), {})
            stack.setdefault(entry.hf_name, []).append(entry)
    yield from (
        (entry.hf_name, [entry], 0, None) for entry in layout if entry.name == "embed_tokens.weight"
    )
    for (first_layer, layers), stack in sorted(stacks.items()):
        for layer, (name, entries) in itertools.product(range(layers), stack.items()):
            first, of_layer = entries[0], name.replace("{i}", str(first_layer + layer))
            if isinstance(first, ExpertsEntry) and not first.are_stacked:
                for expert in range(first.experts):
                    yield of_layer.replace("{j}", str(expert)), entries, layer, expert
            else:
                yield of_layer, entries, layer, None
    yield from (
        (entry.hf_name, [entry], 0, None)
        for entry in layout
        if entry.layers is None and entry.name != "embed_tokens.weight"
    )


class _HostLayers:
    """Parameters with one layer at a time on the host; keeps the last one, for experts."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._params = params
        self._last: tuple[str, int] | None = None
        self._value: Any = None

    def layer(self, entry: HFEntry, layer: int) -> np.ndarray:
        """Returns one layer of a parameter: an array of `entry.layer_shape`, without padding."""
        if self._last != (entry.name, layer):
            self._value = _one_layer(self._params[entry.name], entry, layer)
            self._last = entry.name, layer
        return self._value

    def codes(self, entry: HFEntry, tensor: str) -> Nf4 | None:
        """Returns the codes of an entry's tensor if its parameter is stored as such."""
        parameter = self._params[entry.name]
        return parameter.codes(tensor) if isinstance(parameter, StoredParameter) else None


@jax.jit
def _take_layer(value: jax.Array, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(value, layer, keepdims=False)


def _one_layer(value: Any, entry: HFEntry, layer: int) -> np.ndarray:
    """One layer of a parameter on the host, without padding; only it is gathered."""
    if entry.layers is not None:
        value = (
            _take_layer(value, np.int32(layer)) if isinstance(value, jax.Array) else value[layer]
        )
    return np.asarray(value)[tuple(map(slice, entry.layer_shape))]


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
