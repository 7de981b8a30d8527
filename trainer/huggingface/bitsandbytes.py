"""Matrices that bitsandbytes has stored in NF4 with double quantization, as Hugging Face folders hold them."""
from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from model.quantization import BLOCK, NESTED_BLOCK, NF4_LEVELS, Nf4, dynamic_levels

STATE = "quant_state.bitsandbytes__nf4"
# What stands beside the tensor of the codes, under its name.
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", STATE)


def is_nf4(files: Mapping[str, Any], name: str) -> bool:
    """Whether the tensor of this name holds codes of NF4.

    Args:
      files: the opened safetensors file of each tensor.
    """
    return f"{name}.{STATE}" in files


def parts(name: str) -> list[str]:
    """Returns the names of the tensors that stand beside the codes."""
    return [f"{name}.{part}" for part in _PARTS]


def read_nf4(files: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Nf4:
    """Returns a matrix's codes and scales as they are stored.

    Raises:
      ValueError: names the tensor that is missing or of another kind than blocks of 64 and 256 with the published levels.
    """
    missing = [part for part in parts(name) if part not in files]
    if missing:
        raise ValueError(f"tensor {missing[0]} is missing beside the codes of {name}; NF4 is read with double quantization")
    arrays = {part: files[f"{name}.{part}"].get_tensor(f"{name}.{part}") for part in _PARTS}
    state = json.loads(arrays[STATE].tobytes().decode())
    needed = {"quant_type": "nf4", "blocksize": BLOCK, "nested_blocksize": NESTED_BLOCK, "shape": list(shape)}
    for field, value in needed.items():
        if state.get(field) != value:
            raise ValueError(f"tensor {name}: {field}: found {state.get(field)!r}, needs {value!r}")
    for field, levels in (("quant_map", NF4_LEVELS), ("nested_quant_map", dynamic_levels())):
        if not np.array_equal(arrays[field], levels):
            raise ValueError(f"tensor {name}: {field}: found other levels than bitsandbytes' own; quantize it again")
    codes = files[name].get_tensor(name)
    return Nf4(codes.reshape(shape[0], -1), arrays["absmax"].reshape(shape[0], -1), arrays["nested_absmax"],
               np.asarray(np.float32(state["nested_offset"])))


def write_nf4(name: str, weight: Nf4, dtype: str) -> dict[str, np.ndarray]:
    """Returns the tensors by name that bitsandbytes loads as this matrix.

    Args:
      dtype: of the numbers that it opens, such as bfloat16.
    """
    shape = (weight.codes.shape[0], 2 * weight.codes.shape[1])
    state = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": dtype, "shape": shape, "nested_blocksize": NESTED_BLOCK,
             "nested_dtype": "float32", "nested_offset": float(weight.offset)}
    return {name: weight.codes.reshape(-1, 1), f"{name}.absmax": weight.absmax.reshape(-1), f"{name}.quant_map": NF4_LEVELS,
            f"{name}.nested_absmax": weight.nested, f"{name}.nested_quant_map": dynamic_levels(),
            f"{name}.{STATE}": np.frombuffer(json.dumps(state).encode(), np.uint8)}
