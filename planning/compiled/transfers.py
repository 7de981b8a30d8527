"""Counts what each device receives by a compiled text's collectives: shapes, groups, loops.

The counting rules are those of `model.attention.schedules.plan`, so a schedule's plan can be
compared.
"""

from __future__ import annotations

import collections
import math
import re
from typing import NamedTuple

import numpy as np

from .text import ArrayType, Instruction, Module, arrays, parse

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
# Instructions whose result is all or a part of their first operand.
_VIEWS = ("slice", "bitcast", "copy", "reshape", "get-tuple-element")


class Transfer(NamedTuple):
    """One collective of the text.

    Attributes:
      kind: one of COLLECTIVES.
      nbytes: float64 [devices], the bytes that each device receives when the collective runs once.
      times: how often it runs.
    """

    kind: str
    name: str
    nbytes: np.ndarray
    times: float


def transfers(text: str, devices: int) -> list[Transfer]:
    """Every collective that moves data.

    Raises:
      ValueError: a collective is in a loop whose trip count is not in the text.
    """
    module = parse(text)
    moved = []
    # The TPU compiler writes a reduce-scatter as a fusion with this name around an all-reduce.
    scatters = {name for name in module.computations if "all-reduce-scatter" in name}
    carried_on = _carried_on(module)
    for computation, instructions in module.computations.items():
        times = 0 if computation in carried_on else module.runs[computation]
        for instruction in instructions:
            kind = instruction.opcode.removesuffix("-start")
            if kind not in COLLECTIVES or times == 0:
                continue
            if math.isnan(times):
                raise ValueError(
                    f"compiled text: {instruction.name} is in a loop whose number of rounds is "
                    "not in the text"
                )
            nbytes = _received(instruction, kind, devices)
            if kind == "all-reduce" and computation in scatters:
                kind, nbytes = "reduce-scatter", nbytes / 2
            if kind == "collective-permute" and scatters.intersection(
                _origin(instruction, instructions).called[:1]
            ):
                # The shards are padded, and a permute moves the last rows to their device.
                kind = "reduce-scatter"
            if nbytes.any():
                moved.append(Transfer(kind, instruction.name, nbytes, times))
    return moved


def is_carried_on(instruction: Instruction) -> bool:
    """Whether a fusion continues a transfer that another started; each repeats the transfer in
    full."""
    called = instruction.called
    return (
        instruction.opcode == "fusion"
        and bool(called)
        and ("-done" in instruction.name or called[0].startswith("async_collective_fusion"))
    )


def _carried_on(module: Module) -> set[str]:
    """The computations in fusions that continue or end a transfer."""
    return {
        called
        for instructions in module.computations.values()
        for instruction in instructions
        if is_carried_on(instruction)
        for called in instruction.called
    }


def collectives(text: str) -> collections.Counter[str]:
    """Counts each kind of collective in a compiled text; an asynchronous pair counts once."""
    opcodes = (
        instruction.opcode
        for instructions in parse(text).computations.values()
        for instruction in instructions
    )
    return collections.Counter(
        kind for opcode in opcodes if (kind := opcode.removesuffix("-start")) in COLLECTIVES
    )


def received(moved: list[Transfer], kind: str | None = None) -> np.ndarray:
    """Returns the bytes that each device receives in a step: float64 [devices].

    Args:
      moved: the step's transfers, as `transfers` reads them from compiled text.
      kind: counts only this kind of collective, such as collective-permute; None counts all.
    """
    return np.sum(
        [transfer.times * transfer.nbytes for transfer in moved if kind in (None, transfer.kind)],
        axis=0,
    )


def results(collective: Instruction) -> list[ArrayType]:
    """The arrays that a collective yields.

    The type of a start is (operands, results, contexts), with as many results as operands; an
    all-reduce-start has only the results.
    """
    if not collective.opcode.endswith("-start"):
        return arrays(collective.type)
    contexts = r"\b[su]32\[\](\{[^}]*\})?"
    operands_and_results = arrays(re.sub(contexts, "", collective.type))
    if collective.opcode == "all-reduce-start":
        return operands_and_results
    return operands_and_results[len(operands_and_results) // 2 :]


def groups(attribute: str | None, devices: int) -> list[list[int]]:
    """The groups of devices that communicate, from a `replica_groups` attribute.

    Args:
      attribute: as lists, {{0,1},{2,3}}; as a reshaped and transposed count, [2,4]<=[4,2]T(1,0); or
        as axes of a mesh, whole or in part, mesh['x'=2,'y'=4] {'x','y':(2)2}, where (2)2 is the
        part of size 2 behind a part of size 2. None or {} means one group of all devices.
      devices: number of devices.
    """
    if not attribute or attribute == "{}":
        return [list(range(devices))]
    if mesh := re.match(r"mesh\[([^\]]*)\] ?\{([^}]*)\}", attribute):
        return _mesh_groups(mesh[1], mesh[2])
    if counted := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attribute):
        shape, source = _numbers(counted[1]), _numbers(counted[2])
        order = _numbers(counted[3]) if counted[3] else None
        return np.arange(math.prod(source)).reshape(source).transpose(order).reshape(shape).tolist()
    return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", attribute)]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _mesh_groups(axes: str, chosen: str) -> list[list[int]]:
    """The groups of devices, in mesh order, that differ only in the chosen axes."""
    chosen_axes = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", chosen)
    # Axis -> (size before the chosen part, size of that part or 0 for the whole axis).
    parts = {name: (int(before or 1), int(size or 0)) for name, before, size in chosen_axes}
    shape: list[int] = []
    group_axes = []
    for name, written_size in re.findall(r"'(\w+)'=(\d+)", axes):
        size = int(written_size)
        before, part = parts.get(name, (size, 1))
        part = part or size
        if name in parts:
            group_axes.append(len(shape) + 1)
        shape += [before, part, size // before // part]
    devices = np.moveaxis(
        np.arange(math.prod(shape)).reshape(shape), group_axes, range(-len(group_axes), 0)
    )
    return devices.reshape(-1, math.prod(shape[axis] for axis in group_axes)).tolist()


def _received(collective: Instruction, kind: str, devices: int) -> np.ndarray:
    """The bytes that each device receives when the collective runs once: float64 [devices]."""
    nbytes, size = np.zeros(devices), sum(array.nbytes for array in results(collective))
    if kind == "collective-permute":
        for source, target in re.findall(
            r"\{(\d+),(\d+)\}", collective.required("source_target_pairs")
        ):
            nbytes[int(target)] += size * (source != target)
        return nbytes
    for group in groups(collective.attribute("replica_groups"), devices):
        others = len(group) - 1
        share = {
            "all-gather": others / len(group),
            "all-to-all": others / len(group),
            "reduce-scatter": others,
            "all-reduce": 2 * others / len(group),
        }[kind]
        nbytes[group] = size * share
    return nbytes


def _origin(instruction: Instruction, instructions: list[Instruction]) -> Instruction:
    """The instruction whose result this one passes on, whole or in part."""
    by_name = {other.name: other for other in instructions}
    while instruction.operands and (
        instruction.opcode.startswith("collective-permute") or instruction.opcode in _VIEWS
    ):
        instruction = by_name[instruction.operands[0]]
    return instruction
