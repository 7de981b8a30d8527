"""Which collectives of a compiled, scheduled text run beside compute: what stands between their start and their end.

A transfer is hidden by an attention kernel if one stands between the two: a Pallas kernel (a custom call), or the loop that
is the blockwise kernel in plain XLA (it multiplies matrices and moves nothing). Start and end must be in one computation, so
in one round of a loop. A collective that is not split in two hides behind nothing.
"""
from __future__ import annotations

import dataclasses
import functools
import re

from .text import ArrayType, Instruction, Module, arrays, parse
from .transfers import COLLECTIVES, results

PRODUCTS = ("dot", "convolution")
# What a collective may stand in: the TPU's async-collective fusions, reduce-scatter as one, and what a SparseCore runs.
WRAPPERS = ("fusion", "async-start", "custom-call-start")
KERNEL_TARGETS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu", "mosaic_gpu_v2")


@dataclasses.dataclass(frozen=True)
class Crossing:
    """One collective and what runs while it is under way.

    Attributes:
      kind, name, computation: which it is, and where; loops: how many stand around it, 1 within the scan over layers.
      origin: the operation's name as JAX wrote it; in a backward pass it contains `transpose(`.
      results: what arrives, shapes being the compiler's; times: how often it runs.
      kernels: attention kernels between start and end; products: other instructions there that multiply matrices, or the
        collective itself where it is fused with a product.
    """

    kind: str
    name: str
    computation: str
    origin: str
    loops: int
    results: tuple[ArrayType, ...]
    times: float
    kernels: tuple[str, ...]
    products: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the results."""
        return sum(array.nbytes for array in self.results)

    @property
    def backward(self) -> bool:
        """Whether it belongs to a backward pass."""
        return "transpose(" in self.origin


def crossings(text: str) -> list[Crossing]:
    """Every collective of a scheduled text that runs at all, with what hides it.

    Raises:
      ValueError: the text is not scheduled (its order is not that of execution).
    """
    if "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise ValueError("compiled text: it is not scheduled, so it does not tell what runs between a start and its end")
    module = parse(text)
    reader = _Reader(module)
    found = []
    for name, instructions in module.computations.items():
        if module.runs[name] == 0 or name in reader.fused:
            continue
        found += [reader.crossing(name, one, kind, reader.between(instructions, one))
                  for one in instructions if (kind := reader.kind(one))]
    return found


class _Reader:
    def __init__(self, module: Module):
        self.module = module
        self.contents = functools.cache(self._contents)
        self.fused = {called for instructions in module.computations.values() for one in instructions
                      if one.opcode in WRAPPERS for called in one.called}

    def _contents(self, computation: str) -> frozenset[str]:
        """Opcodes in a computation and all that it calls; of custom calls the targets."""
        found = set()
        for one in self.module.computations.get(computation, []):
            target = one.attribute("custom_call_target") if one.opcode == "custom-call" else None
            found.add((target or one.opcode).strip('"'))
            for called in one.called:
                found |= self.contents(called)
        return frozenset(found)

    def _inside(self, one: Instruction) -> frozenset[str]:
        return frozenset().union(*(self.contents(called) for called in one.called))

    def kind(self, one: Instruction) -> str | None:
        """The collective that an instruction starts (or is); None for any other instruction."""
        if one.opcode in WRAPPERS:
            if "-done" in one.name or not one.called or one.called[0].startswith("async_collective_fusion"):
                return None  # the latter carry a transfer that has started before them
            inside = {name.removesuffix("-start") for name in self._inside(one)} & set(COLLECTIVES)
            return min(inside) if inside else None
        kind = one.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    def crossing(self, computation: str, start: Instruction, kind: str, between: list[Instruction]) -> Crossing:
        written = [one.rest for called in start.called for one in self.module.computations.get(called, [])
                   if one.opcode.removesuffix("-start") == kind]  # a fusion's own name may be its neighbour's
        origin = re.search(r'op_name="([^"]*)"', (written or [start.rest])[0])
        given = results(start)
        if start.opcode == "custom-call-start":  # its own type is of its queues
            given = arrays(self.module.computations[start.called[0]][-1].type)
        elif start.opcode in WRAPPERS and "-start" in start.opcode + start.name:
            given = arrays(start.type)[1:2]  # (what goes in, what comes out, flags)
        return Crossing(kind, start.name, computation, origin[1] if origin else "", self.module.loops[computation],
                        tuple(given), self.module.runs[computation],
                        tuple(one.name for one in between if self.is_kernel(one)),
                        tuple(one.name for one in (start, *between) if self.multiplies(one)))

    def between(self, instructions: list[Instruction], start: Instruction) -> list[Instruction]:
        """What runs from the start to its end; nothing where it is not split in two, or does not end here."""
        if "-start" not in start.opcode + start.name:
            return []
        under_way = {start.name}
        for one in instructions[start.at + 1:]:
            if under_way.isdisjoint(one.operands):
                continue
            if "-done" in one.opcode + one.name:
                return instructions[start.at + 1:one.at]
            if one.opcode in ("get-tuple-element", "fusion") or one.opcode.endswith("-update"):
                under_way.add(one.name)
        return []

    def is_kernel(self, one: Instruction) -> bool:
        """A Pallas kernel, or a loop that multiplies matrices and moves nothing."""
        if one.opcode == "custom-call":
            return (one.attribute("custom_call_target") or "").strip('"') in KERNEL_TARGETS
        inside = self._inside(one)
        if one.opcode == "while":
            return bool(inside & {*PRODUCTS, *KERNEL_TARGETS}) and not self._moves(inside)
        return one.opcode in ("fusion", "call") and bool(inside & set(KERNEL_TARGETS))

    def multiplies(self, one: Instruction) -> bool:
        """A matrix product, alone or in a fusion."""
        return one.opcode in PRODUCTS or (one.opcode == "fusion" and bool(self._inside(one) & set(PRODUCTS)))

    @staticmethod
    def _moves(inside: frozenset[str]) -> bool:
        return any(name.removesuffix("-start") in COLLECTIVES for name in inside)
