"""Reads a compiled step: what memory it takes, which collectives it has, what they move, and what hides them.

`transfers` counts bytes, `overlap` looks for compute between the start and the end of each transfer; both on `text`.
"""
from __future__ import annotations

import collections
import re

from .transfers import COLLECTIVES

GIB = 2**30
_SHAPE = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\]")


def memory(compiled) -> dict[str, float]:
    """GiB a device by the compiler's plan: arguments, temporaries, host memory; the sums count donated buffers once."""
    plan = compiled.memory_analysis()
    parts = {"arguments": plan.argument_size_in_bytes, "outputs": plan.output_size_in_bytes,
             "aliased": plan.alias_size_in_bytes, "temporaries": plan.temp_size_in_bytes,
             "host": plan.host_argument_size_in_bytes + plan.host_temp_size_in_bytes
             + plan.host_output_size_in_bytes - plan.host_alias_size_in_bytes}
    parts["peak"] = parts["arguments"] + parts["temporaries"] + parts["outputs"] - parts["aliased"]
    return {name: size / GIB for name, size in parts.items()}


def collectives(text: str) -> collections.Counter:
    """How often each collective stands in a compiled text; an asynchronous pair counts once."""
    names = "|".join(COLLECTIVES)
    return collections.Counter(re.findall(rf"= [^=\n]*? ({names})(?:-start)?\(", text))


def largest_shape(text: str) -> tuple[int, str]:
    """Number of elements of the largest array in a compiled text, and its type and shape as written."""
    found = {match.group(0): match.group(2) for match in _SHAPE.finditer(text)}
    return max((_elements(dims), name) for name, dims in found.items())


def arrays_with(text: str, size: int) -> set[str]:
    """Arrays in a compiled text with two axes of at least `size`: what attention must not keep between passes."""
    return {match.group(0) for match in _SHAPE.finditer(text)
            if sum(int(d) >= size for d in match.group(2).split(",") if d) >= 2}


def _elements(dims: str) -> int:
    total = 1
    for size in filter(None, dims.split(",")):
        total *= int(size)
    return total
