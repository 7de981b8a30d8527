"""A compiled text as computations and instructions, and how often each computation runs."""
from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.* -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
                     r"|(?:branch_computations|called_computations)=\{([^}]*)\}")
_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+|c64|c128|f8\w+)\[([\d,]*)\]")
_WIDTH = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16}


class ArrayType(NamedTuple):
    """One array in a type: its dtype as written, and its number of elements."""

    dtype: str
    elements: int

    @property
    def nbytes(self) -> int:
        """Bytes; what is narrower than one byte counts as one."""
        width = _WIDTH.get(self.dtype) or max(1, int(re.sub(r"\D.*", "", self.dtype[1:]) or 8) // 8)
        return width * self.elements


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      type: the result's type as written; rest: what follows the opcode, operands first.
      at: place in the computation, which is the order of execution where the text is scheduled.
    """

    name: str
    type: str
    opcode: str
    rest: str
    at: int

    @functools.cached_property
    def operands(self) -> list[str]:
        """Names of the operands."""
        depth, end = 0, len(self.rest)
        for end, letter in enumerate(self.rest):  # noqa: B007
            depth += {"(": 1, ")": -1}.get(letter, 0)
            if depth == 0:
                break
        inside = self.rest[1:end]
        return re.findall(r"%([\w.\-]+)", inside)

    def attribute(self, name: str) -> str | None:
        """An attribute that is one word, braces within braces, counted groups or axes of a mesh, as written; or None."""
        braces, counted = r"\{(?:[^{}]|\{[^{}]*\})*\}", r"\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?"
        mesh = r"mesh\[[^\]]*\] ?\{[^}]*\}"
        found = re.search(rf"\b{name}=({braces}|{counted}|{mesh}|[^,\s]+)", self.rest)
        return found and found[1]

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs."""
        names = [one or many for one, many in _CALLED.findall(self.rest)]
        return [name.strip().lstrip("%") for group in names for name in group.split(",") if name.strip()]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: its computations by name, each a list of instructions, and the one that is run."""

    computations: dict[str, list[Instruction]]
    entry: str

    @functools.cached_property
    def runs(self) -> dict[str, float]:
        """How often each computation runs; NaN within a loop whose number of rounds is not in the text."""
        total = dict.fromkeys(self.computations, 0.0)
        self._walk(self.entry, 1.0, total)
        return total

    @functools.cached_property
    def loops(self) -> dict[str, int]:
        """How many loops stand around each computation that runs."""
        found = {self.entry: 0}
        callers = [self.entry]
        for name in callers:  # grows as computations are found
            for one in self.computations[name]:
                for called in one.called:
                    if called in self.computations and called not in found:
                        found[called] = found[name] + (one.opcode == "while")
                        callers.append(called)
        return found

    def _walk(self, name: str, times: float, total: dict[str, float]) -> None:
        total[name] += times
        for instruction in self.computations[name]:
            rounds = self.trip_count(name, instruction) if instruction.opcode == "while" else 1
            for called in instruction.called:
                if called in self.computations:
                    self._walk(called, times * rounds, total)

    def trip_count(self, computation: str, loop: Instruction) -> float:
        """Rounds of a `while` that counts up to a constant by one; NaN for any other."""
        known = re.search(r'known_trip_count[^\d]*?"?n"?:"?(\d+)', loop.rest)
        if known:
            return int(known[1])
        condition = {one.name: one for one in self.computations[loop.attribute("condition").lstrip("%")]}
        for test in condition.values():
            if test.opcode == "compare" and "direction=LT" in test.rest:
                count, limit = (condition.get(name) for name in test.operands)
                if limit is None or limit.opcode != "constant" or count is None or count.opcode != "get-tuple-element":
                    continue
                start = self._constant(computation, loop.operands[0], int(count.attribute("index")))
                if start is not None:
                    return int(limit.rest.split("(")[1].split(")")[0]) - start
        return math.nan

    def _constant(self, computation: str, name: str, element: int) -> int | None:
        """The value of an element of a tuple, if it is a constant."""
        here = {one.name: one for one in self.computations[computation]}
        found = here[name]
        if found.opcode != "tuple" or element >= len(found.operands):
            return None
        found = here[found.operands[element]]
        while found.opcode in ("copy", "bitcast"):
            found = here[found.operands[0]]
        return int(found.rest.split("(")[1].split(")")[0]) if found.opcode == "constant" else None


def parse(text: str) -> Module:
    """Reads the text of a compiled program (`compiled.as_text()`), of any platform.

    Raises:
      ValueError: it has no ENTRY computation.
    """
    computations: dict[str, list[Instruction]] = {}
    entry = here = None
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            here = computations.setdefault(start[2], [])
            entry = start[2] if start[1] else entry
        elif line.startswith("}"):
            here = None
        elif here is not None and (match := _INSTRUCTION.match(line)) and (split := _split(match[2])):
            here.append(Instruction(match[1], *split, len(here)))
    if entry is None:
        raise ValueError("compiled text: no ENTRY computation found; give the output of compiled.as_text()")
    return Module(computations, entry)


def _split(line: str) -> tuple[str, str, str] | None:
    """`type opcode(rest` as three; a tuple's type holds parentheses and spaces itself."""
    depth, end = 0, 0
    for end, letter in enumerate(line):  # noqa: B007
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(letter, 0)
        if depth == 0 and letter == " ":
            break
    found = re.match(r"([a-z][\w\-]*)(\(.*)", line[end + 1:])
    return (line[:end], found[1], found[2]) if found else None


def arrays(type_: str) -> list[ArrayType]:
    """The arrays in a type, in the order in which they stand."""
    return [ArrayType(dtype, math.prod(int(size) for size in dims.split(",") if size)) for dtype, dims in _ARRAY.findall(type_)]
