"""Compiled steps, and facts about their texts, that only tests need, in addition to planning."""

import math
import re
from collections.abc import Iterator
from importlib import metadata

import pytest

from planning.compiled.text import Instruction, Module, parse
from planning.plan import DEFAULT_RECIPE, changed, compile_run
from trainer.config.schema import MeshConfig

NEEDS_CUDA = pytest.mark.skipif(
    not any(distribution.name.startswith("jax-cuda") for distribution in metadata.distributions()),
    reason="needs JAX's CUDA compiler; make evidence installs it",
)


def compile_step(
    model,
    devices,
    context,
    *,
    batch=1,
    mesh=None,
    recipe=DEFAULT_RECIPE,
    kernel=None,
    flags=None,
    **memory,
):
    """Compiles the training step of a model on these devices, by a recipe with some changes.

    Args:
      context: tokens in a row; batch: rows.
      mesh: None puts all devices on the sequence axis.
      kernel, flags: as for `compile_run`.
      memory: options that replace the recipe's section `memory`.
    """
    run = changed(
        recipe,
        data={"context_length": context},
        train={"batch_size": batch},
        memory=memory,
        mesh=mesh or MeshConfig(sequence=len(devices)),
    )
    return compile_run(run, model, devices, kernel=kernel, flags=flags)


def arrays_with(text: str, size: int) -> set[str]:
    """Arrays in a compiled text with two axes of at least `size`, which attention must not keep
    between passes."""
    return {
        match[0]
        for match in re.finditer(r"\b(?:pred|bf16|[suf]\d+|c64|c128|f8\w+)\[([\d,]*)\]", text)
        if sum(int(axis) >= size for axis in match[1].split(",") if axis) >= 2
    }


def product_flops(text: str, where: str, steps: float) -> float:
    """The FLOPs of all matrix products in a compiled text.

    Args:
      where: a loop whose number of steps is not in the text counts if one of its operations has
        this in its name; other such loops are attention's, and do not count.
      steps: the number of steps of such a loop.
    """
    module = parse(text)

    def computation_flops(name: str) -> float:
        types = {instruction.name: instruction.type for instruction in module.computations[name]}
        total = 0.0
        for instruction in module.computations[name]:
            if instruction.opcode == "dot":
                total += _product(instruction, types[instruction.operands[0]])
            times = 1.0
            if instruction.opcode == "while":
                times = module.trip_count(name, instruction)
                if math.isnan(times):
                    times = steps if _named(module, instruction, where) else 0.0
            inner = [called for called in instruction.called if called in module.computations]
            total += times * sum(map(computation_flops, inner)) if times else 0.0
        return total

    return computation_flops(module.entry)


def _product(dot: Instruction, left: str) -> float:
    summed = [int(i) for i in re.findall(r"\d+", dot.required("lhs_contracting_dims"))]
    sizes = _sizes(left)
    return 2.0 * math.prod(_sizes(dot.type)) * math.prod(sizes[i] for i in summed)


def _sizes(type_: str) -> list[int]:
    match = re.search(r"\[([\d,]*)\]", type_)
    assert match
    return [int(size) for size in match[1].split(",") if size]


def _named(module: Module, loop: Instruction, where: str) -> bool:
    def inside(name: str) -> Iterator[Instruction]:
        for instruction in module.computations[name]:
            yield instruction
            for called in instruction.called:
                if called in module.computations:
                    yield from inside(called)

    return any(where in x.rest for x in inside(loop.required("body").lstrip("%")))
