"""What each device receives by the collectives of a compiled text: shapes, pairs or groups, and loops' rounds."""
from __future__ import annotations

import collections
import math
import re
from typing import NamedTuple

import numpy as np

from .text import ArrayType, Instruction, arrays, parse

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
_VIEWS = ("slice", "bitcast", "copy", "reshape", "get-tuple-element")


class Transfer(NamedTuple):
    """One collective of the text.

    Attributes:
      nbytes: float64 [devices], what each device receives when it runs once; times: how often it runs.
    """

    kind: str
    name: str
    nbytes: np.ndarray
    times: float


def transfers(text: str, devices: int) -> list[Transfer]:
    """Every collective that moves something, by the counting rules of `model.attention.schedules.plan`.

    Raises:
      ValueError: a collective in a loop whose number of rounds is not in the text.
    """
    module = parse(text)
    found = []
    fused = {name for name in module.computations if "all-reduce-scatter" in name}  # the TPU's reduce-scatter
    for computation, instructions in module.computations.items():
        times = module.runs[computation]
        for one in instructions:
            kind = one.opcode.removesuffix("-start")
            if kind not in COLLECTIVES or times == 0:
                continue
            if math.isnan(times):
                raise ValueError(f"compiled text: {one.name} is in a loop whose number of rounds is not in the text")
            nbytes = _received(one, kind, devices)
            if kind == "all-reduce" and computation in fused:
                kind, nbytes = "reduce-scatter", nbytes / 2
            if kind == "collective-permute" and _origin(one, instructions).called[:1] in [[name] for name in fused]:
                kind = "reduce-scatter"  # it pads the shards, and moves the last rows to where they belong
            if nbytes.any():
                found.append(Transfer(kind, one.name, nbytes, times))
    return found


def collectives(text: str) -> collections.Counter:
    """How often each collective stands in a compiled text; an asynchronous pair counts once."""
    kinds = (one.opcode.removesuffix("-start") for instructions in parse(text).computations.values() for one in instructions)
    return collections.Counter(kind for kind in kinds if kind in COLLECTIVES)


def received(found: list[Transfer], kind: str | None = None) -> np.ndarray:
    """Bytes that each device receives in all, by one kind of collective or by any: float64 [devices]."""
    return sum((one.times * one.nbytes for one in found if kind in (None, one.kind)), np.float64(0))


def _origin(one: Instruction, instructions: list[Instruction]) -> Instruction:
    """The instruction whose result this one is given, whole or in part."""
    here = {other.name: other for other in instructions}
    while one.operands and (one.opcode.startswith("collective-permute") or one.opcode in _VIEWS):
        one = here[one.operands[0]]
    return one


def results(one: Instruction) -> list[ArrayType]:
    """What a collective gives. A start's type is (operands, results, contexts of its own), as many of the first two."""
    if not one.opcode.endswith("-start"):
        return arrays(one.type)
    found = arrays(re.sub(r"\b[su]32\[\](\{[^}]*\})?", "", one.type))
    return found if one.opcode == "all-reduce-start" else found[len(found) // 2:]  # the former's type is the results alone


def _received(one: Instruction, kind: str, devices: int) -> np.ndarray:
    nbytes, size = np.zeros(devices), sum(array.nbytes for array in results(one))
    if kind == "collective-permute":
        for source, target in re.findall(r"\{(\d+),(\d+)\}", one.attribute("source_target_pairs")):
            nbytes[int(target)] += size * (source != target)
        return nbytes
    for group in groups(one.attribute("replica_groups"), devices):
        others = len(group) - 1
        share = {"all-gather": others / len(group), "all-to-all": others / len(group), "reduce-scatter": others,
                 "all-reduce": 2 * others / len(group)}[kind]
        nbytes[group] = size * share
    return nbytes


def groups(written: str | None, devices: int) -> list[list[int]]:
    """Replica groups, as lists ({{0,1},{2,3}}), as a reshaped, transposed count ([2,4]<=[4,2]T(1,0)), or as axes of a mesh,
    whole or by (size before) and size of a part (mesh['x'=2,'y'=4] {'x','y':(2)2}); none are all."""
    if not written or written == "{}":
        return [list(range(devices))]
    if mesh := re.match(r"mesh\[([^\]]*)\] ?\{([^}]*)\}", written):
        return _mesh_groups(*mesh.groups())
    if counted := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", written):
        shape, source, order = ([int(x) for x in part.split(",")] if part else None for part in counted.groups())
        return np.arange(math.prod(source)).reshape(source).transpose(order).reshape(shape).tolist()
    return [[int(x) for x in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", written)]


def _mesh_groups(axes: str, chosen: str) -> list[list[int]]:
    """Devices in the order of the mesh; those that differ in the chosen axes alone form a group."""
    written = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", chosen)
    parts = {name: (int(before or 1), int(size or 0)) for name, before, size in written}
    shape, along = [], []
    for name, size in ((name, int(size)) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)):
        before, part = parts.get(name, (size, 1))
        part = part or size
        along += [len(shape) + 1] if name in parts else []
        shape += [before, part, size // before // part]
    devices = np.moveaxis(np.arange(math.prod(shape)).reshape(shape), along, range(-len(along), 0))
    return devices.reshape(-1, math.prod(shape[axis] for axis in along)).tolist()
