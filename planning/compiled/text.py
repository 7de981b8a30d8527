"""Parses a compiled program's text into computations, and counts how often each runs.

The text is XLA's HLO as `compiled.as_text()` prints it after scheduling. Nothing else tells which
collectives the compiler chose and where they start and end: JAX offers the program as this text, or
as a protocol buffer whose schema comes with neither JAX nor libtpu. Each line of a computation is
one instruction:

    %name = type opcode(%operand, ...), attribute=value, ...
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import NamedTuple

# "ENTRY %main (a: f32[2]) -> f32[2] {" begins a computation, which ends at a line "}".
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.* -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"([a-z][\w\-]*)(\(.*)")
# Attributes that name computations: one each, or a list in braces.
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
    r"|(?:branch_computations|called_computations)=\{([^}]*)\}"
)
# Values of attributes: braces within braces, counted groups ([2,4]<=[8]T(1,0)), axes of a mesh, or
# one word.
_VALUE = (
    r"(\{(?:[^{}]|\{[^{}]*\})*\}"
    r"|\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?"
    r"|mesh\[[^\]]*\] ?\{[^}]*\}"
    r"|[^,\s]+)"
)
_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+|c64|c128|f8\w+)\[([\d,]*)\]")
_WIDTH = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16}


class ArrayType(NamedTuple):
    """One array of a type: its dtype in XLA's spelling, and its number of elements."""

    dtype: str
    elements: int

    @property
    def nbytes(self) -> int:
        """Bytes; an element of less than a byte counts as one."""
        width = _WIDTH.get(self.dtype) or max(1, int(re.sub(r"\D.*", "", self.dtype[1:]) or 8) // 8)
        return width * self.elements


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction, that is one line of a computation.

    Attributes:
      type: the result's type as written.
      rest: what follows the opcode, the operands in parentheses first.
      index: the line's number in its computation; in a scheduled text this is the order of
        execution.
    """

    name: str
    type: str
    opcode: str
    rest: str
    index: int

    @functools.cached_property
    def operands(self) -> list[str]:
        """The operands' names."""
        return re.findall(r"%([\w.\-]+)", self.rest[1 : _closing(self.rest)])

    def attribute(self, name: str) -> str | None:
        """An attribute's value as written; None if the instruction lacks it."""
        match = re.search(rf"\b{name}={_VALUE}", self.rest)
        return match and match[1]

    def required(self, name: str) -> str:
        """An attribute's value as written. Raises ValueError if the instruction lacks it."""
        value = self.attribute(name)
        if value is None:
            raise ValueError(f"compiled text: {self.opcode} {self.name} has no attribute {name}")
        return value

    @property
    def called(self) -> list[str]:
        """The names of the computations that the instruction runs."""
        lists = [single or several for single, several in _CALLED.findall(self.rest)]
        return [
            name.strip().lstrip("%") for names in lists for name in names.split(",") if name.strip()
        ]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: computations (lists of instructions) by name, and the entry's name."""

    computations: dict[str, list[Instruction]]
    entry: str

    @functools.cached_property
    def runs(self) -> dict[str, float]:
        """How often each computation runs; NaN in a loop whose trip count is not in the text."""
        total = dict.fromkeys(self.computations, 0.0)
        self._add_runs(self.entry, 1.0, total)
        return total

    @functools.cached_property
    def loops(self) -> dict[str, int]:
        """How many loops enclose each computation that runs."""
        depth = {self.entry: 0}
        callers = [self.entry]
        for name in callers:  # grows while computations are found
            for instruction in self.computations[name]:
                for called in instruction.called:
                    if called in self.computations and called not in depth:
                        depth[called] = depth[name] + (instruction.opcode == "while")
                        callers.append(called)
        return depth

    def _add_runs(self, name: str, times: float, total: dict[str, float]) -> None:
        total[name] += times
        for instruction in self.computations[name]:
            iterations = self.trip_count(name, instruction) if instruction.opcode == "while" else 1
            for called in instruction.called:
                if called in self.computations:
                    self._add_runs(called, times * iterations, total)

    def trip_count(self, computation: str, loop: Instruction) -> float:
        """The trip count of a `while` that counts by one to a constant; NaN for other loops.

        The compiler notes the count on most loops. For others it follows from the condition, which
        compares an element of the state with a constant, and that element's initial constant.
        """
        noted = re.search(r'known_trip_count[^\d]*?"?n"?:"?(\d+)', loop.rest)
        if noted:
            return int(noted[1])
        condition = {
            instruction.name: instruction
            for instruction in self.computations[loop.required("condition").lstrip("%")]
        }
        for compare in condition.values():
            if compare.opcode != "compare" or "direction=LT" not in compare.rest:
                continue
            counter, limit = (condition.get(name) for name in compare.operands)
            if (
                limit is None
                or limit.opcode != "constant"
                or counter is None
                or counter.opcode != "get-tuple-element"
            ):
                continue
            start = self._constant_element(
                computation, loop.operands[0], int(counter.required("index"))
            )
            if start is not None:
                return _constant(limit) - start
        return math.nan

    def _constant_element(self, computation: str, name: str, element: int) -> int | None:
        """The value of an element of the tuple `name`; None unless it is a constant."""
        instructions = {
            instruction.name: instruction for instruction in self.computations[computation]
        }
        source = instructions[name]
        if source.opcode != "tuple" or element >= len(source.operands):
            return None
        source = instructions[source.operands[element]]
        while source.opcode in ("copy", "bitcast"):
            source = instructions[source.operands[0]]
        return _constant(source) if source.opcode == "constant" else None


def parse(text: str) -> Module:
    """The program that a compiled text describes (`compiled.as_text()`), of any platform.

    Raises:
      ValueError: it has no ENTRY computation.
    """
    computations: dict[str, list[Instruction]] = {}
    entry: str | None = None
    instructions: list[Instruction] | None = None
    for line in text.splitlines():
        if begin := _COMPUTATION.match(line):
            instructions = computations.setdefault(begin[2], [])
            entry = begin[2] if begin[1] else entry
        elif line.startswith("}"):
            instructions = None
        elif (
            instructions is not None
            and (match := _INSTRUCTION.match(line))
            and (parts := _split(match[2]))
        ):
            instructions.append(Instruction(match[1], *parts, len(instructions)))
    if entry is None:
        raise ValueError(
            "compiled text: no ENTRY computation found; give the output of compiled.as_text()"
        )
    return Module(computations, entry)


def arrays(type_: str) -> list[ArrayType]:
    """The arrays in a type, in the order in which they are written."""
    return [
        ArrayType(dtype, math.prod(int(size) for size in dims.split(",") if size))
        for dtype, dims in _ARRAY.findall(type_)
    ]


def _constant(instruction: Instruction) -> int:
    """The value of a whole number, `constant(7)`."""
    return int(instruction.rest.split("(")[1].split(")")[0])


def _split(line: str) -> tuple[str, str, str] | None:
    """Splits `type opcode(rest` into three; a tuple's type contains parentheses and spaces."""
    depth = 0
    for end, letter in enumerate(line):
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(letter, 0)
        if depth == 0 and letter == " ":
            match = _OPCODE.match(line[end + 1 :])
            return (line[:end], match[1], match[2]) if match else None
    return None


def _closing(text: str) -> int:
    """The index of the parenthesis that closes the first character, or of the last character."""
    depth = 0
    for index, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return index
    return len(text) - 1
