"""An adapter's opened tensors, as our parameters need them: of a text model, with one rank and one
scale for all modules, and in each layer.

Where a module has a smaller rank, or a layer no adapter, A and B are filled up with zeros. These
change no product; and since the gradient of each is zero where the other is, they stay zero.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model.adapter import AdapterConfig

from .names import Renamed, of_text_model, other_parts
from .peft_experts import FactorEntry, parameter_of
from .peft_modules import PREFIXES, AdaptedModules
from .table import HFEntry

PREFIX = "base_model.model."


class _Filled:
    """Stands in for the opened file of an A or B that has fewer ranks than ours, another scale, or
    is missing: None."""

    def __init__(self, tensor: Any, shape: tuple[int, ...], copies: int, factor: float) -> None:
        """`copies`: how many adapters an A has below each other; `factor`: of the numbers."""
        self._tensor, self._shape, self._copies, self._factor = tensor, shape, copies, factor

    def get_slice(self, name: str) -> _Filled:
        return self

    def get_shape(self) -> list[int]:
        return [*self._shape]

    def get_dtype(self) -> str:
        return "F32" if self._tensor is None else self._tensor.get_dtype()

    def __getitem__(self, index: Any) -> np.ndarray:
        whole = np.zeros(self._shape, np.float32)
        if self._tensor is not None:
            stored = self._tensor[:].astype(np.float32) * np.float32(self._factor)
            stored = stored.reshape(self._copies, -1, stored.shape[1])  # adapter, row, column
            by_adapter = whole.reshape(self._copies, -1, self._shape[1])  # a view
            by_adapter[:, : stored.shape[1], : stored.shape[2]] = stored
        return whole[index]


def text_tensors(files: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    """Returns the opened file of each tensor of the text model's adapter, by its name in a model of
    text alone; and what its modules' names begin with, see `PREFIXES`.

    A warning counts the tensors of a vision-language model's other parts, which are left out.

    Raises:
      ValueError: two tensors have the same name in the text model.
    """
    inner = {name.removeprefix(PREFIX): Renamed(file, name) for name, file in files.items()}
    prefix = next(
        (start for start in PREFIXES[1:] if any(name.startswith(start) for name in inner)), None
    )
    if prefix is None:
        return dict(files), PREFIXES[0]
    if left_out := other_parts(inner):
        warnings.warn(
            f"{folder}: left out {len(left_out)} tensors of adapters of the vision part, such as "
            f"{left_out[0]}: only the text part of the model is read",
            stacklevel=2,
        )
    return {PREFIX + name: file for name, file in of_text_model(inner, True).items()}, prefix


def filled(
    files: Mapping[str, Any],
    layout: list[HFEntry],
    adapter: AdapterConfig,
    modules: AdaptedModules,
    prefix: str,
) -> dict[str, Any]:
    """Returns the opened files, with A and B of the adapter's rank and scale in all layers.

    Args:
      layout: see `adapter_layout`.
      adapter: its `rank` is at least each module's.
      modules: of the adapter's configuration.
      prefix: of its modules' names.

    Raises:
      ValueError: some layers have no adapter, and others DoRA's; or a tensor has another rank than
        the configuration gives its module, or is of another base.
    """
    result = dict(files)
    for entry, name, module in factors(layout, prefix):
        if name not in files:
            if modules.has(module):
                continue  # missing
            if adapter.use_dora:
                raise ValueError(
                    f"{module} has no adapter, but others have; with use_dora only adapters of all "
                    "layers are read; peft's merge_and_unload makes a whole model of it"
                )
            result[name] = _Filled(None, entry.file_shape, 1, 1.0)
            continue
        tensor, copies, factor = files[name].get_slice(name), _experts(entry), 1.0
        if entry.name.endswith("lora_B"):
            copies, factor = 1, modules.scale(module) / adapter.scale
        shape, needed = tuple(tensor.get_shape()), shape_at(entry, modules.rank(module))
        if shape != needed:
            raise ValueError(misshapen(name, shape, needed))
        if shape != entry.file_shape or not math.isclose(factor, 1.0):
            result[name] = _Filled(tensor, entry.file_shape, copies, factor)
    return result


def shape_at(entry: HFEntry, rank: int) -> tuple[int, ...]:
    """The shape of the tensor of an A or B if its module's adapter has this rank."""
    outputs, inputs = entry.file_shape
    ranks = rank * _experts(entry)
    return (ranks, inputs) if entry.name.endswith("lora_A") else (outputs, ranks)


def misshapen(name: str, found: Sequence[int], needed: Sequence[int]) -> str:
    """A message about a tensor's shape."""
    return (
        f"tensor {name} has shape {list(found)} but needs {list(needed)}: the adapter belongs to "
        "another base, or has another rank"
    )


def _experts(entry: HFEntry) -> int:
    """How many adapters are in one tensor."""
    return entry.layer_shape[0] if isinstance(entry, FactorEntry) else 1


def factors(layout: list[HFEntry], prefix: str = PREFIXES[0]) -> Iterator[tuple[HFEntry, str, str]]:
    """Yields each tensor of an A or B: its entry, its name, and that of the module as PEFT's
    configuration matches it."""
    for entry in layout:
        if not entry.name.endswith(("lora_A", "lora_B")):
            continue
        for name in entry.file_tensors():
            module = name.removeprefix(PREFIX).rpartition(".lora_")[0]
            if isinstance(entry, FactorEntry):
                module = f"{module.partition('.experts')[0]}.experts.{parameter_of(entry.name)}"
            yield entry, name, prefix + module.removeprefix(PREFIXES[0])
