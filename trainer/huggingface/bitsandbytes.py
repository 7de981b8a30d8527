"""bitsandbytes' NF4 matrices with double quantization, as stored in Hugging Face folders."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from model.adapter import NF4_BLOCK
from model.codecs import NESTED_BLOCK, NF4_LEVELS, Nf4, dynamic_levels, nested_count

from .table import check_numbers

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


def read_nf4(
    files: Mapping[str, Any], name: str, shape: tuple[int, ...], rows: slice = slice(None)
) -> Nf4:
    """Returns the stored codes and scales of a matrix, or of some of its rows.

    Args:
      shape: of the whole matrix.
      rows: one parameter's, if the matrix holds several below each other.

    Raises:
      ValueError: names a tensor that is missing, or not in blocks of 64 and 256 with the published
        levels; or `rows` begin or end within 256 blocks that share a scale.
    """
    missing = [part for part in parts(name) if part not in files]
    if missing:
        raise ValueError(
            f"tensor {missing[0]} of the codes {name} is missing; NF4 is read with double "
            "quantization"
        )
    arrays = {part: files[f"{name}.{part}"].get_tensor(f"{name}.{part}") for part in _PARTS}
    # Only for the scales: every 4-bit code is valid.
    check_numbers(f"{name}.nested_absmax", arrays["nested_absmax"])
    state = json.loads(arrays[STATE].tobytes().decode())
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
    first, end, _ = rows.indices(shape[0])
    blocks = shape[1] // NF4_BLOCK
    if first * blocks % NESTED_BLOCK or (end < shape[0] and end * blocks % NESTED_BLOCK):
        raise ValueError(
            f"tensor {name}: rows {first} to {end} share a scale of the second quantization with "
            "others; use the unquantized model, which adapter.quantize quantizes on reading"
        )
    nested = arrays["nested_absmax"][
        first * blocks // NESTED_BLOCK : math.ceil(end * blocks / NESTED_BLOCK)
    ]
    codes = files[name].get_tensor(name).reshape(shape[0], -1)[rows]
    return Nf4(
        codes,
        arrays["absmax"].reshape(shape[0], -1)[rows],
        nested,
        np.asarray(np.float32(state["nested_offset"])),
    )


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
