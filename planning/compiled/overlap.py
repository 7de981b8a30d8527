"""Finds what hides the collectives of a scheduled text: compute between their start and end.

An attention kernel between the two hides the transfer: a Pallas kernel (a custom call), or the loop
of the blockwise kernel in plain XLA (it multiplies matrices and communicates nothing). Start and
end must be in one computation, so in one iteration of a loop. Nothing hides a collective that is
not split into start and end.
"""

from __future__ import annotations

import dataclasses
import functools
import re

from .text import ArrayType, Instruction, Module, arrays, parse
from .transfers import COLLECTIVES, is_carried_on, results

PRODUCTS = ("dot", "convolution")
# Wrappers of collectives: the TPU's async-collective fusions, a fused reduce-scatter, SparseCore
# programs.
WRAPPERS = ("fusion", "async-start", "custom-call-start")
KERNEL_TARGETS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu", "mosaic_gpu_v2")


@dataclasses.dataclass(frozen=True)
class Crossing:
    """One collective, and what runs while it is in flight.

    Attributes:
      kind: one of COLLECTIVES; name: the instruction; computation: the one that contains it.
      origin: the operation's name as JAX wrote it; in a backward pass it contains `transpose(`.
      loops: how many loops enclose it; 1 inside the scan over layers.
      results: the arrays that arrive, with the compiler's shapes.
      times: how often it runs.
      kernels: attention kernels between start and end.
      products: other instructions there that multiply matrices, or the collective itself if fused
        with a product.
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
    """Every collective that a scheduled text runs, with what hides it.

    Raises:
      ValueError: the text is not scheduled: its order is not the order of execution.
    """
    if "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise ValueError(
            "compiled text: it is not scheduled, so it does not tell what runs between a start "
            "and its end"
        )
    module = parse(text)
    reader = _Reader(module)
    return [
        reader.crossing(name, instruction, kind, reader.between(instructions, instruction))
        for name, instructions in module.computations.items()
        if module.runs[name] and name not in reader.fused
        for instruction in instructions
        if (kind := reader.kind(instruction))
    ]


class _Reader:
    """Answers questions about the instructions of one program."""

    def __init__(self, module: Module):
        self.module = module
        self.contents = functools.cache(self._contents)
        # Computations inside a wrapper: the wrapper represents them and everything they call.
        self.fused: set[str] = set()
        remaining = [
            called
            for instructions in module.computations.values()
            for instruction in instructions
            if instruction.opcode in WRAPPERS
            for called in instruction.called
        ]
        while remaining:
            if (name := remaining.pop()) not in self.fused:
                self.fused.add(name)
                remaining += [
                    called
                    for instruction in module.computations.get(name, [])
                    for called in instruction.called
                ]

    def _contents(self, computation: str) -> frozenset[str]:
        """The opcodes in a computation and in those it calls; for custom calls, their targets."""
        opcodes: set[str] = set()
        for instruction in self.module.computations.get(computation, []):
            target = (
                instruction.attribute("custom_call_target")
                if instruction.opcode == "custom-call"
                else None
            )
            opcodes.add((target or instruction.opcode).strip('"'))
            for called in instruction.called:
                opcodes |= self.contents(called)
        return frozenset(opcodes)

    def _inside(self, instruction: Instruction) -> frozenset[str]:
        """The opcodes in everything an instruction calls."""
        return frozenset[str]().union(*(self.contents(called) for called in instruction.called))

    def kind(self, instruction: Instruction) -> str | None:
        """The collective that an instruction starts (or is); None for any other instruction."""
        if instruction.opcode in WRAPPERS:
            if not instruction.called or is_carried_on(instruction):
                return None
            inside = {opcode.removesuffix("-start") for opcode in self._inside(instruction)} & set(
                COLLECTIVES
            )
            return min(inside) if inside else None
        kind = instruction.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    def crossing(
        self, computation: str, start: Instruction, kind: str, between: list[Instruction]
    ) -> Crossing:
        """The collective that `start` begins, which waits until `between` has run."""
        return Crossing(
            kind,
            start.name,
            computation,
            self._origin(start, kind),
            self.module.loops[computation],
            tuple(self._results(start)),
            self.module.runs[computation],
            tuple(instruction.name for instruction in between if self.is_kernel(instruction)),
            tuple(
                instruction.name
                for instruction in (start, *between)
                if self.multiplies(instruction)
            ),
        )

    def _origin(self, start: Instruction, kind: str) -> str:
        """The operation's name in JAX; for a wrapper, the wrapped collective's."""
        inside = [
            instruction.rest
            for called in start.called
            for instruction in self.module.computations.get(called, [])
            if instruction.opcode.removesuffix("-start") == kind
        ]
        name = re.search(r'op_name="([^"]*)"', (inside or [start.rest])[0])
        return name[1] if name else ""

    def _results(self, start: Instruction) -> list[ArrayType]:
        """The arrays that arrive."""
        # Its own type may be that of a SparseCore's queues.
        if start.opcode in ("async-start", "custom-call-start"):
            return arrays(self.module.computations[start.called[0]][-1].type)
        if start.opcode in WRAPPERS and "-start" in start.opcode + start.name:
            return arrays(start.type)[1:2]  # of (operand, result, flags)
        return results(start)

    def between(self, instructions: list[Instruction], start: Instruction) -> list[Instruction]:
        """What runs from start to end; empty if unsplit or ended in another computation."""
        if "-start" not in start.opcode + start.name:
            return []
        under_way = {start.name}
        for instruction in instructions[start.index + 1 :]:
            if under_way.isdisjoint(instruction.operands):
                continue
            if "-done" in instruction.opcode + instruction.name:
                return instructions[start.index + 1 : instruction.index]
            if instruction.opcode in ("get-tuple-element", "fusion") or instruction.opcode.endswith(
                "-update"
            ):
                under_way.add(instruction.name)
        return []

    def is_kernel(self, instruction: Instruction) -> bool:
        """Whether this is a Pallas kernel, or a loop that multiplies and does not communicate."""
        if instruction.opcode == "custom-call":
            return (instruction.attribute("custom_call_target") or "").strip('"') in KERNEL_TARGETS
        inside = self._inside(instruction)
        if instruction.opcode == "while":
            communicates = any(opcode.removesuffix("-start") in COLLECTIVES for opcode in inside)
            return bool(inside & {*PRODUCTS, *KERNEL_TARGETS}) and not communicates
        return instruction.opcode in ("fusion", "call", "conditional") and bool(
            inside & set(KERNEL_TARGETS)
        )

    def multiplies(self, instruction: Instruction) -> bool:
        """Whether this is a matrix product, alone or in a fusion."""
        return instruction.opcode in PRODUCTS or (
            instruction.opcode == "fusion" and bool(self._inside(instruction) & set(PRODUCTS))
        )
