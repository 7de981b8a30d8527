"""The table of our parameters and their Hugging Face tensors, for reading and writing."""

from __future__ import annotations

import collections
import dataclasses
import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from model.config import TransformerConfig
from model.families import FAMILIES
from model.padding import fits
from model.parameter_declarations import LAYERS, first_layer, in_order, without_stack
from model.sharding import Parameter

# safetensors' name -> numpy's for readable dtypes. All are exact in float32, so import and export
# change no bit.
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# The bits of infinity in 16-bit dtypes, without the sign; NaN's are larger.
_INFINITY = {"bfloat16": np.uint16(0x7F80), "float16": np.uint16(0x7C00)}


class HoldsNaN(ValueError):
    """A tensor holds NaN. The message names it."""


def check_numbers(name: str, tensor: np.ndarray) -> None:
    """Checks that a tensor holds no NaN; warns if it holds infinity, which may be meant.

    Raises:
      HoldsNaN: `tensor`, called `name`, does.
    """
    infinity = _INFINITY.get(str(tensor.dtype))
    # Comparing integers is several times faster than finding NaN in 16-bit floats with numpy.
    is_finite = (
        np.isfinite(tensor)
        if infinity is None
        else (tensor.view(np.uint16) & np.uint16(0x7FFF)) < infinity
    )
    if is_finite.all():
        return
    found = np.isnan(tensor)
    if found.any():
        raise HoldsNaN(
            f"tensor {name} holds NaN ({np.count_nonzero(found):,} of the {tensor.size:,} numbers "
            "read of it); another copy of the model, without NaN, would work"
        )
    warnings.warn(
        f"tensor {name} holds infinity, which is kept; unless it is meant, another copy of the "
        "model would work",
        RuntimeWarning,  # of several processes, this one alone may have read it
        stacklevel=2,
    )


@dataclass(frozen=True)
class HFEntry:
    """One of our parameters, and its Hugging Face tensors.

    A tensor becomes ours by a transpose, if `transpose`, and a reshape to `layer_shape`; `to_hf`
    inverts both.

    Attributes:
      name: of our parameter.
      hf_name: of the tensor, with `{i}` for the layer if our parameter stacks the layers.
      shape: of our parameter, with the leading layer axis if it has one.
      hf_shape: of one tensor, or of this parameter's rows in it.
      layers: the number of layers; None for a parameter without layer axis.
      first_layer: the number of the first of them.
      transpose: the tensor is stored output-first, ours input-first.
      first_row, file_rows: for a tensor that stacks several parameters' rows: this one's first row,
        and the total; None for a tensor of one parameter.
      first_column, file_columns: the same for a matrix that holds them in diagonal blocks.
      step, first: for a tensor in which several parameters alternate along the last axis: their
        number, and this one's index.
    """

    name: str
    hf_name: str
    shape: tuple[int, ...]
    hf_shape: tuple[int, ...]
    layers: int | None
    transpose: bool
    first_layer: int = 0
    first_row: int = 0
    file_rows: int | None = None
    first_column: int = 0
    file_columns: int | None = None
    step: int = 1
    first: int = 0

    @property
    def rows(self) -> slice:
        """This parameter's rows of the tensor."""
        return slice(self.first_row, self.first_row + self.hf_shape[0])

    @property
    def columns(self) -> tuple[slice, ...]:
        """This parameter's columns of the tensor, if it is a matrix."""
        return tuple(
            slice(self.first_column, self.first_column + size) for size in self.hf_shape[1:]
        )

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of one tensor, including other parameters' rows and columns."""
        columns = (self.file_columns,) if self.file_columns else self.hf_shape[1:]
        *axes, last = self.file_rows or self.hf_shape[0], *columns
        return (*axes, last * self.step)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of one tensor in the files; it may hold a matrix per expert."""
        return self.file_shape

    def hf_names(self) -> list[str]:
        """The names of the Hugging Face tensors, one per layer if layers are stacked."""
        if self.layers is None:
            return [self.hf_name]
        numbers = range(self.first_layer, self.first_layer + self.layers)
        return [self.hf_name.replace("{i}", str(i)) for i in numbers]

    def file_tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor from which the parameter is read."""
        return dict.fromkeys(self.hf_names(), self.tensor_shape)

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Our shape without the layer axis."""
        return self.shape if self.layers is None else self.shape[1:]

    def to_hf(self, value: np.ndarray) -> np.ndarray:
        """One layer of our parameter as a Hugging Face tensor, a view where possible."""
        return (
            value.reshape(self.hf_shape[::-1]).T if self.transpose else value.reshape(self.hf_shape)
        )

    def put(self, tensor: np.ndarray, value: np.ndarray) -> None:
        """Writes one layer of our parameter to its rows and columns of a Hugging Face tensor."""
        tensor[self.rows, *self.columns] = self.to_hf(value)

    def from_hf(self, tensor: np.ndarray) -> np.ndarray:
        """A Hugging Face tensor, or this parameter's rows, as one layer of our parameter."""
        return (tensor.T if self.transpose else tensor).reshape(self.layer_shape)

    def read(
        self,
        files: Mapping[str, Any],
        name: str,
        index: tuple[slice, ...],
        within: tuple[int, ...] = (),
    ) -> np.ndarray:
        """Reads the part `index` of a layer; only its rows and columns of the file.

        Args:
          files: the opened safetensors file of each tensor.
          name: one of `hf_names`.
          index: one slice for each axis of `layer_shape`.
          within: which matrix of the tensor, if it holds several.

        Raises:
          HoldsNaN: as `check_numbers`.
        """
        bounds = [
            axis_slice.indices(size)[:2]
            for axis_slice, size in zip(index, self.layer_shape, strict=True)
        ]
        stored_shape = self.hf_shape[::-1] if self.transpose else self.hf_shape
        # Each axis of the (transposed) tensor merges consecutive axes of ours: [E, (Hq, D)], [(Hq,
        # D), E], ...
        axis = 0
        file_index: list[slice] = []
        shape: list[int] = []
        finer: list[slice] = []
        for size in stored_shape:
            first = axis
            total = 1
            while total < size or (axis == first and axis < len(bounds)):
                total *= self.layer_shape[axis]
                axis += 1
            if first == len(bounds):  # of the row that holds a vector
                file_index.append(slice(0, 1))
                continue
            # The first merged axis is sliced in the file, others (D within a head) after reading.
            (start, stop), inner_sizes = bounds[first], self.layer_shape[first + 1 : axis]
            inner = math.prod(inner_sizes)
            file_index.append(slice(start * inner, stop * inner))
            shape += [stop - start, *inner_sizes]
            finer += [slice(None), *(slice(*bound) for bound in bounds[first + 1 : axis])]
        rows, *columns = reversed(file_index) if self.transpose else file_index
        tensor = files[name].get_slice(name)
        parts = [_shifted(rows, self.first_row)]
        parts += [_shifted(part, self.first_column) for part in columns]
        *axes, last = parts
        value = tensor[*within, *axes, slice(last.start * self.step, last.stop * self.step)]
        value = value[..., self.first :: self.step]
        check_numbers(name, value)
        return (value.T if self.transpose else value).reshape(shape)[tuple(finer)]


@dataclass(frozen=True)
class ExpertsEntry(HFEntry):
    """A parameter with a matrix per expert, and its tensors.

    `hf_shape`, `transpose` and the rows describe one expert's matrix. Each expert has separate
    tensors, with `{j}` for the expert in their names; or one tensor [X, ...] has all of a layer.
    """

    @property
    def experts(self) -> int:
        """The number of experts."""
        return self.layer_shape[0]

    @property
    def are_stacked(self) -> bool:
        """Whether a layer's experts are in one tensor."""
        return "{j}" not in self.hf_name

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """See `HFEntry.tensor_shape`."""
        return (self.experts, *self.file_shape) if self.are_stacked else self.file_shape

    @property
    def of_one(self) -> HFEntry:
        """The entry of one expert's matrices."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(HFEntry)}
        return HFEntry(**{**fields, "shape": (self.shape[0], *self.shape[2:])})

    def file_tensors(self) -> dict[str, tuple[int, ...]]:
        """See `HFEntry.file_tensors`."""
        if self.are_stacked:
            return super().file_tensors()
        return {
            of_expert: self.tensor_shape
            for name in self.hf_names()
            for of_expert in self.of_experts(name)
        }

    def of_experts(self, name: str) -> list[str]:
        """Returns the names of the experts' tensors.

        Args:
          name: one of `hf_names`, with {j}.
        """
        return [name.replace("{j}", str(j)) for j in range(self.experts)]

    def read(self, files, name, index, within=()):
        """See `HFEntry.read`; the first slice selects experts, and the name may have `{j}`."""
        parts = [
            self.of_one.read(
                files,
                name.replace("{j}", str(j)),
                index[1:],
                (j,) if self.are_stacked else (),
            )
            for j in range(*index[0].indices(self.experts))
        ]
        return np.stack(parts)

    def to_hf(self, value: np.ndarray) -> np.ndarray:
        """One layer of our parameter as the experts' stacked tensors."""
        return np.stack([self.of_one.to_hf(expert) for expert in value])


def _shifted(part: slice, first: int) -> slice:
    return slice(part.start + first, part.stop + first)


def hf_layout(config: TransformerConfig, stacked: bool = False) -> list[HFEntry]:
    """Every parameter of `config`'s model with its Hugging Face tensors, from the modules'
    declarations.

    Args:
      stacked: a layer's experts are in one tensor, as in transformers 5; otherwise as published.
    """
    family = FAMILIES[config.family]
    names = family.stacked if stacked else family.tensors
    entries = []
    for name, parameter in in_order(dataclasses.replace(config, adapter=None)).items():
        entry = _entry(name, parameter, family.interleaved)
        if name.startswith(LAYERS):
            within = without_stack(name).removeprefix(LAYERS)
            if within in family.rows:
                shape = (1, *entry.hf_shape)
                entry = dataclasses.replace(entry, hf_shape=shape, transpose=True)
            if hf_name := names.get(within):
                entry = dataclasses.replace(entry, hf_name=f"model.layers.{{i}}.{hf_name}")
        entries.append(entry)
    for module, projections in family.fused.items():
        for stack in config.stacks:
            entries = _fused(entries, stack.prefix, module, projections)
    return _shared(entries, family.interleaved) if config.num_experts else entries


def layout_of(files: Collection[str], config: TransformerConfig) -> list[HFEntry]:
    """Returns what each tensor of a Hugging Face folder is: `hf_layout`, stacked as the folder is.

    The embedding of a tied model may be there as the head only, as transformers reads it too.

    Args:
      files: names of the folder's tensors, such as `model.layers.0.mlp.experts.gate_up_proj`.
    """
    layout = hf_layout(config, stacked=_are_stacked(files, config))
    if not config.tie_word_embeddings or EMBEDDING in files or HEAD not in files:
        return layout
    return [
        dataclasses.replace(entry, hf_name=HEAD) if entry.hf_name == EMBEDDING else entry
        for entry in layout
    ]


def _are_stacked(files: Collection[str], config: TransformerConfig) -> bool:
    """Whether each layer's experts are in one tensor, as transformers 5 has them in memory."""
    if not config.num_experts:
        return False
    family = FAMILIES[config.family]
    known = {name for name in family.stacked.values() if name not in family.tensors.values()}
    only_stacked = tuple(
        known - {entry.hf_name.removeprefix("model.layers.{i}.") for entry in hf_layout(config)}
    )
    return any(name.endswith(only_stacked) for name in files)


def _shared(entries: list[HFEntry], interleaved: bool) -> list[HFEntry]:
    """The table with experts' parameters of one file name as parts of one tensor."""
    seen: dict[tuple[int, str], int] = {}
    counts = collections.Counter((entry.first_layer, entry.hf_name) for entry in entries)
    result = []
    for entry in entries:
        tensor = entry.first_layer, entry.hf_name
        count, number = counts[tensor], seen.get(tensor, 0)
        seen[tensor] = number + 1
        if not isinstance(entry, ExpertsEntry) or count == 1:
            result.append(entry)
        elif interleaved:
            result.append(dataclasses.replace(entry, step=count, first=number))
        else:
            rows = entry.hf_shape[0]
            result.append(
                dataclasses.replace(entry, first_row=number * rows, file_rows=count * rows)
            )
    return result


def _entry(name: str, parameter: Parameter, interleaved: bool) -> HFEntry:
    """A parameter's entry; Hugging Face merges a product's input axes into one, and its output
    axes."""
    layers = parameter.shape[0] if name.startswith(LAYERS) else None
    shape = parameter.shape if layers is None else parameter.shape[1:]
    if "experts" in parameter.axes:
        transpose = len(shape) > 2 and not interleaved
        of_one = shape[:0:-1] if transpose else shape[1:]
        return ExpertsEntry(
            name, parameter.hf_name, parameter.shape, of_one, layers, transpose, first_layer(name)
        )
    inputs = parameter.inputs
    hf_shape = shape if inputs == 0 else (math.prod(shape),)
    if inputs:
        hf_shape = (math.prod(shape[inputs:]), math.prod(shape[:inputs]))
    return HFEntry(
        name, parameter.hf_name, parameter.shape, hf_shape, layers, bool(inputs), first_layer(name)
    )


def _fused(
    entries: list[HFEntry], prefix: str, module: str, projections: tuple[str, ...]
) -> list[HFEntry]:
    """The table with these projections' weights, in a stack of layers, as rows of one tensor, in
    its order."""
    names = [f"{prefix}{projection}.weight" for projection in projections]
    file_rows = sum(entry.hf_shape[0] for entry in entries if entry.name in names)
    fused, first_row = [], 0
    for entry in entries:
        if entry.name in names:
            part = dataclasses.replace(
                entry,
                hf_name=f"model.layers.{{i}}.{module}.weight",
                first_row=first_row,
                file_rows=file_rows,
            )
            fused.append(part)
            first_row = part.rows.stop
        else:
            fused.append(entry)
    return fused


def check_params(shapes: Mapping[str, tuple[int, ...]], config: TransformerConfig) -> None:
    """Raises ValueError unless `shapes` (by name) are those of the model, padded or not."""
    layout = {entry.name: entry.shape for entry in hf_layout(config)}
    for name, shape in layout.items():
        if name not in shapes:
            raise ValueError(f"parameter {name} is missing; the config makes it {list(shape)}")
        if not fits(name, tuple(shapes[name]), shape, shape):
            raise ValueError(
                f"parameter {name} has shape {list(shapes[name])}; the config makes it "
                f"{list(shape)}"
            )
    for name in shapes:
        if name not in layout:
            raise ValueError(f"parameter {name} does not belong to the config's model")
