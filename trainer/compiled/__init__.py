"""Reads a compiled step: what memory it takes, which collectives it has, what they move, and what hides them.

`transfers` counts bytes, `overlap` looks for compute between the start and the end of each transfer; both on `text`.
"""
from __future__ import annotations

import collections
import dataclasses
import math
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
    return math.prod(int(size) for size in dims.split(",") if size)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective in a compiled text.

    Attributes:
      kind: of COLLECTIVES; results: (type, number of elements) of each array that it gives, shapes being the compiler's.
      loops: how many loops stand around it, 1 within the scan over layers; backward: whether it came by differentiation.
    """

    kind: str
    results: tuple[tuple[str, int], ...]
    loops: int
    backward: bool


def listed(text: str) -> list[Collective]:
    """Every collective of a compiled text, once: an asynchronous one where it starts."""
    bodies, kinds, found = _computations(text), {}, []
    pattern = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)})(-start)?\(")
    for name, lines in bodies.items():
        kinds[name] = next((match.group(2) for match in map(pattern.search, lines) if match), None)
    loops = _loops(bodies)
    for name, lines in bodies.items():
        if name.startswith(("fused_computation", "async_collective_fusion")):
            continue  # what the TPU compiler puts into a fusion is counted where the fusion starts
        for line in lines:
            match = pattern.search(line)
            kind, started = (match.group(2), match.group(3)) if match else (None, None)
            fusion = re.match(r"\s*%async-collective-start[.\d]* = (.*?) fusion\(.*calls=%([\w.-]+)", line)
            origin = line
            if fusion:
                kind, started = kinds[fusion.group(2)], True
                origin = "".join(bodies[fusion.group(2)])
            if kind is None:
                continue
            arrays = [(dtype, _elements(dims)) for dtype, dims in _SHAPE.findall((fusion or match).group(1))]
            if started:  # (what goes in, what comes out, flags)
                arrays = arrays[1:2]
            found.append(Collective(kind, tuple(arrays), loops[name], "transpose(jvp(" in origin))
    return found


def _computations(text: str) -> dict[str, list[str]]:
    """Name of each computation of a compiled text -> its lines."""
    bodies, lines = {}, []
    for line in text.splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{\s*$", line)
        if head:
            lines = bodies[head.group(1)] = []
        else:
            lines.append(line)
    return bodies


def _loops(bodies: dict[str, list[str]]) -> dict[str, int]:
    """How many while loops stand around each computation."""
    callers = {}
    for name, lines in bodies.items():
        for line in lines:
            for how, called in re.findall(r"(\w+)=\{?((?:%[\w.-]+(?:, )?)+)\}?", line):
                for callee in re.findall(r"%([\w.-]+)", called):
                    if callee in bodies:
                        callers[callee] = name, how == "body"

    def around(name: str) -> int:
        caller, is_loop = callers.get(name, (None, False))
        return 0 if caller is None else around(caller) + is_loop

    return {name: around(name) for name in bodies}
