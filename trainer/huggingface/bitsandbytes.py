"""bitsandbytes' NF4 matrices with double quantization, as stored in Hugging Face folders."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from model.adapter import NF4_BLOCK
from model.codecs import (
    NESTED_BLOCK,
    NF4_LEVELS,
    Nf4,
    dequantize_nf4,
    dynamic_levels,
    nested_count,
)

from .table import DTYPES, HFEntry, check_numbers

STATE = "quant_state.bitsandbytes__nf4"
# The tensors that accompany a tensor of codes, under its name.
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", STATE)
# More than the JSON text of STATE ever needs.
_STATE_BYTES = 256
# The entry in such a folder's config.json, as transformers writes it.
CONFIG = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": "uint8",
}


def is_nf4(files: Mapping[str, Any], name: str) -> bool:
    """Whether the tensor of this name holds codes of NF4.

    Args:
      files: the opened safetensors file of each tensor.
    """
    return f"{name}.{STATE}" in files


def parts(name: str) -> list[str]:
    """Returns the names of the tensors that accompany the codes."""
    return [f"{name}.{part}" for part in _PARTS]


def read_nf4(files: Mapping[str, Any], name: str, shape: tuple[int, ...], rows: slice) -> Nf4:
    """Returns the stored codes and scales of a matrix, or of some of its rows.

    Args:
      shape: of the whole matrix.
      rows: one parameter's, if the matrix holds several below each other.

    Raises:
      ValueError: names a tensor that is missing, of another size, or not in blocks of 64 and 256
        with the published levels; or `rows` begin or end within 256 blocks that share a scale.
    """
    arrays, state = _scales(files, name, shape)
    first, end, _ = rows.indices(shape[0])
    blocks = shape[1] // NF4_BLOCK
    if first * blocks % NESTED_BLOCK or (end < shape[0] and end * blocks % NESTED_BLOCK):
        raise ValueError(
            f"tensor {name}: rows {first} to {end} share a scale of the second quantization with "
            "others; adapter.quantize none, which decodes them, or the unquantized model would work"
        )
    nested = arrays["nested_absmax"][
        first * blocks // NESTED_BLOCK : math.ceil(end * blocks / NESTED_BLOCK)
    ]
    # The storage may be a wider dtype (bnb_4bit_quant_storage), whose numbers are several codes.
    codes = files[name].get_tensor(name).reshape(-1).view(np.uint8)
    if codes.size != math.prod(shape) // 2:
        raise ValueError(
            f"tensor {name}: found {codes.size} bytes of codes, needs {math.prod(shape) // 2} for "
            f"shape {list(shape)}; download it again"
        )
    return Nf4(
        codes.reshape(shape[0], -1)[rows],
        arrays["absmax"].reshape(shape[0], -1)[rows],
        nested,
        np.asarray(np.float32(state["nested_offset"])),
    )


def _scales(
    files: Mapping[str, Any], name: str, shape: tuple[int, ...]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns what accompanies the codes of a matrix: its arrays, and what STATE says; arguments
    and errors as in `read_nf4`."""
    missing = [part for part in parts(name) if part not in files]
    if missing:
        raise ValueError(
            f"tensor {missing[0]} of the codes {name} is missing; NF4 is read with double "
            "quantization"
        )
    arrays = {part: files[f"{name}.{part}"].get_tensor(f"{name}.{part}") for part in _PARTS}
    # Only for the scales: every 4-bit code is valid.
    check_numbers(f"{name}.nested_absmax", arrays["nested_absmax"])
    state = _state(files, name)
    needed = {
        "quant_type": "nf4",
        "blocksize": NF4_BLOCK,
        "nested_blocksize": NESTED_BLOCK,
        "shape": list(shape),
    }
    for field, value in needed.items():
        if state.get(field) != value:
            raise ValueError(f"tensor {name}: {field}: found {state.get(field)!r}, needs {value!r}")
    for field, levels in (("quant_map", NF4_LEVELS), ("nested_quant_map", dynamic_levels())):
        if not np.array_equal(arrays[field], levels):
            raise ValueError(
                f"tensor {name}: {field}: the levels are not bitsandbytes'; quantize it again"
            )
    return arrays, state


class _Decoded:
    """Stands in for the opened file of a matrix in NF4: slices are as bitsandbytes dequantizes
    them, in the dtype the matrix had before."""

    def __init__(self, files: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> None:
        self._files, self._name, self._shape = files, name, shape

    def get_slice(self, name: str) -> _Decoded:
        assert name == self._name
        return self

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        """Returns a part; errors as in `read_nf4` and `decoded_dtype`."""
        return dequantize_nf4(self.codes(), *index).astype(decoded_dtype(self._files, self._name))

    def codes(self, rows: slice = slice(None)) -> Nf4:
        """See `read_nf4`."""
        return read_nf4(self._files, self._name, self._shape, rows)


def decoded(files: Mapping[str, Any], layout: Iterable[HFEntry]) -> dict[str, Any]:
    """Returns the opened file of each tensor, with matrices instead of codes in NF4."""
    shapes = {name: shape for entry in layout for name, shape in entry.file_tensors().items()}
    coded = {name: shape for name, shape in shapes.items() if is_nf4(files, name)}
    return {**files, **{name: _Decoded(files, name, shape) for name, shape in coded.items()}}


def decoded_dtype(files: Mapping[str, Any], name: str) -> str:
    """Returns the dtype, such as bfloat16, of the matrix that these codes represent.

    Raises:
      ValueError: it is not recorded, or not one that is read.
    """
    dtype = str(_state(files, name).get("dtype"))
    if dtype not in DTYPES.values():
        raise ValueError(
            f"tensor {name}: dtype: found {dtype!r}; supported are {', '.join(DTYPES.values())}"
        )
    return dtype


def _state(files: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns what the tensor STATE says of the codes `name`."""
    try:
        state = json.loads(files[f"{name}.{STATE}"].get_tensor(f"{name}.{STATE}").tobytes())
        return dict(state.items())
    except (ValueError, AttributeError):
        raise ValueError(f"tensor {name}.{STATE}: not a JSON object; download it again") from None


def write_nf4(name: str, weight: Nf4, dtype: str) -> dict[str, np.ndarray]:
    """Returns the tensors, by name, that bitsandbytes loads as this matrix.

    Their order and sizes are those of `nf4_layout`.

    Args:
      dtype: of the dequantized numbers, such as bfloat16.
    """
    shape = (weight.codes.shape[0], 2 * weight.codes.shape[1])
    state = {
        "quant_type": "nf4",
        "blocksize": NF4_BLOCK,
        "dtype": dtype,
        "shape": shape,
        "nested_blocksize": NESTED_BLOCK,
        "nested_dtype": "float32",
        "nested_offset": float(weight.offset),
    }
    # JSON may end in spaces, so padding makes the length independent of a number's digits.
    text = json.dumps(state).encode().ljust(nf4_layout(name, shape)[f"{name}.{STATE}"][1][0])
    return {
        f"{name}.quant_map": NF4_LEVELS,
        f"{name}.nested_absmax": weight.nested,
        f"{name}.nested_quant_map": dynamic_levels(),
        name: weight.codes.reshape(-1, 1),
        f"{name}.absmax": weight.absmax.reshape(-1),
        f"{name}.{STATE}": np.frombuffer(text, np.uint8),
    }


def nf4_layout(name: str, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the dtypes and shapes of `write_nf4`'s tensors before the matrix is known.

    float32 comes first, and the total is a multiple of 8 bytes, so each begins at a multiple of its
    item size.
    """
    blocks = math.prod(shape) // NF4_BLOCK
    nested = nested_count(*shape)
    size = 4 * (len(NF4_LEVELS) + nested + len(dynamic_levels())) + blocks * NF4_BLOCK // 2 + blocks
    return {
        f"{name}.quant_map": ("float32", NF4_LEVELS.shape),
        f"{name}.nested_absmax": ("float32", (nested,)),
        f"{name}.nested_quant_map": ("float32", dynamic_levels().shape),
        name: ("uint8", (blocks * NF4_BLOCK // 2, 1)),
        f"{name}.absmax": ("uint8", (blocks,)),
        f"{name}.{STATE}": ("uint8", (_STATE_BYTES + -size % 8,)),
    }
