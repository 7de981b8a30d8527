"""The part of a step that a kernel belongs to, and the bytes that each part has to move.

The compiled step's text identifies parts best: by scopes (`attention`, `optimizer`), products
inside fusions, and fusions that only move data. For a GPU's libraries, or without that text, only
the kernels' names are known.
"""

from __future__ import annotations

import collections
import functools
import re

from planning.compiled.text import Instruction, Module, arrays, parse

PRODUCTS, ATTENTION, ELEMENTWISE = "products", "attention", "norms and elementwise"
OPTIMIZER, COPIES, COMMUNICATION = "optimizer", "casts and copies", "communication"
PARTS = (PRODUCTS, ATTENTION, ELEMENTWISE, OPTIMIZER, COPIES, COMMUNICATION)

_COLLECTIVE = re.compile(
    r"nccl|all[-_]?(?:reduce|gather|to[-_]?all)|reduce[-_]?scatter|collective[-_]?(?:permute|broad)"
    r"|(?:send|recv)(?:[-_.]|$)|memcpyp2p",
    re.IGNORECASE,
)
# All our Mosaic kernels are attention's; JAX gives one of them another name.
_ATTENTION_NAME = re.compile(r"attention|flash|fmha|sdpa|splash|mosaic_gpu", re.IGNORECASE)
# nvjet: cuBLAS on Hopper; ynn and onednn: XLA's libraries for products on CPUs.
_PRODUCT_NAME = re.compile(
    r"nvjet|gemm|cutlass|cublas|splitk|matmul|convolution|ynn|onednn|(?:^|[_.])dot(?:[_.]|$)",
    re.IGNORECASE,
)
# Words in XLA's fusion names, which come from opcodes.
_MOVES = {
    *("convert", "copy", "transpose", "broadcast", "slice", "dynamic", "update", "concatenate"),
    *("pad", "bitcast", "reshape", "reverse", "gather", "iota"),
}
_NO_WORK = {"loop", "input", "wrapped", "fusion", "start", "done", "computation", "clone"}
# Opcodes that only move or convert numbers.
_MOVING_OPCODES = {
    *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "copy", "convert"),
    *("transpose", "broadcast", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate"),
    *("pad", "reshape", "reverse", "gather", "iota", "copy-start", "copy-done"),
}
# Opcodes that take no time themselves: views, and instructions that run other instructions.
_NO_KERNEL = {
    *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "while", "conditional"),
    *("call", "after-all", "partition-id", "opt-barrier"),
}
_DOTS = {"dot", "convolution", "ragged-dot"}


def is_communication(kernel: str) -> bool:
    """Returns whether a kernel's name denotes a collective or a transfer between devices."""
    return bool(_COLLECTIVE.search(kernel))


def part_of_name(kernel: str) -> str:
    """Returns a kernel's part from its name alone; the optimizer's kernels count as elementwise."""
    if is_communication(kernel):
        return COMMUNICATION
    if _ATTENTION_NAME.search(kernel):
        return ATTENTION
    if _PRODUCT_NAME.search(kernel):
        return PRODUCTS
    words = {word for word in re.split(r"[_.\-\d]+", kernel.lower()) if word} - _NO_WORK
    if re.match(r"memcpy|memset", kernel, re.IGNORECASE) or (words and words <= _MOVES):
        return COPIES
    return ELEMENTWISE


class CompiledParts:
    """The parts of a compiled step's instructions.

    Args:
      text: the compiled step (`compiled.as_text()`); with "", only kernels' names are used.
    """

    def __init__(self, text: str = "") -> None:
        self.module = parse(text) if text else Module({}, "")

    @functools.cached_property
    def instructions(self) -> dict[str, Instruction]:
        """The instructions by kernel name; GPU kernel names have _ instead of . and -."""
        return {
            _kernel_name(instruction.name): instruction
            for name in self._running
            for instruction in self.module.computations[name]
        }

    @functools.cached_property
    def _running(self) -> list[str]:
        """The computations whose instructions are kernels, without those inside fusions."""
        fused = {
            called
            for instructions in self.module.computations.values()
            for instruction in instructions
            if instruction.opcode not in _NO_KERNEL
            for called in instruction.called
        }
        return [name for name in self.module.computations if name not in fused]

    def part(self, kernel: str) -> str:
        """Returns the part that a kernel of the trace belongs to."""
        instruction = self.instructions.get(_kernel_name(kernel))
        return part_of_name(kernel) if instruction is None else self._part(instruction)

    def _part(self, instruction: Instruction) -> str:
        # A collective's fusion or start instruction is named after it.
        if is_communication(instruction.opcode) or is_communication(instruction.name):
            return COMMUNICATION
        scopes = _scopes(instruction)
        if "attention" in scopes or _ATTENTION_NAME.search(instruction.name):
            return ATTENTION
        if "optimizer" in scopes:
            return OPTIMIZER
        opcodes = self._opcodes(instruction)
        target = instruction.attribute("custom_call_target") or ""
        if opcodes & _DOTS or _PRODUCT_NAME.search(target):
            return PRODUCTS
        return COPIES if opcodes <= _MOVING_OPCODES else ELEMENTWISE

    def _opcodes(self, instruction: Instruction) -> set[str]:
        """The opcodes of an instruction, or of all instructions in its fusion."""
        called = [name for name in instruction.called if name in self.module.computations]
        if instruction.opcode != "fusion" or not called:
            return {instruction.opcode}
        return set().union(
            *(self._opcodes(inner) for name in called for inner in self.module.computations[name])
        )

    def bytes_moved(self) -> dict[str, float]:
        """Returns the bytes that each part's instructions read and write in a step.

        Each operand is read once and each result written once. For an operand that is only sliced,
        the slices count; for one that is updated in place, the update.
        """
        total: dict[str, float] = collections.defaultdict(float)
        for name in self._running:
            runs, types = self.module.runs[name], self._types(name)
            for instruction in self.module.computations[name]:
                # NaN runs: a loop of unknown length.
                if runs > 0 and instruction.opcode not in _NO_KERNEL:
                    total[self._part(instruction)] += runs * self._bytes(instruction, types)
        return dict(total)

    def _types(self, computation: str) -> dict[str, str]:
        return {
            instruction.name: instruction.type
            for instruction in self.module.computations[computation]
        }

    def _bytes(self, instruction: Instruction, types: dict[str, str]) -> float:
        operands = [_size(types.get(name, "")) for name in instruction.operands]
        result = _size(instruction.type)
        if instruction.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * result
        if instruction.opcode == "dynamic-update-slice":
            return 2 * operands[1]
        called = [name for name in instruction.called if name in self.module.computations]
        if instruction.opcode != "fusion" or not called:
            return sum(operands) + result
        return self._fusion_bytes(called[0], operands, result)

    def _fusion_bytes(self, computation: str, operands: list[float], result: float) -> float:
        body, types = self.module.computations[computation], self._types(computation)
        users = collections.defaultdict(list)
        for inner in body:
            for name in inner.operands:
                users[name].append(inner)
        moved = result
        for update in (inner for inner in body if inner.opcode == "dynamic-update-slice"):
            moved += _size(types.get(update.operands[1], "")) - _size(update.type)
        for parameter in (inner for inner in body if inner.opcode == "parameter"):
            number = int(parameter.rest[1 : parameter.rest.index(")")])
            using = users[parameter.name]
            if using and all(user.opcode == "dynamic-slice" for user in using):
                moved += sum(_size(user.type) for user in using)
            elif not (using and all(_updates(user, parameter) for user in using)):
                moved += operands[number] if number < len(operands) else 0.0
        return max(moved, 0.0)


def _updates(user: Instruction, parameter: Instruction) -> bool:
    """Whether `user` writes into the parameter, in place."""
    return user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name


def _size(type_: str) -> float:
    return float(sum(array.nbytes for array in arrays(type_)))


def _kernel_name(name: str) -> str:
    return re.sub(r"[.\-]", "_", name)


def _scopes(instruction: Instruction) -> set[str]:
    """The jax.named_scope names around an instruction, mixed with names of transformations."""
    match = re.search(r'op_name="([^"]*)"', instruction.rest)
    return set(re.split(r"[/();]+", match[1])) if match else set()
