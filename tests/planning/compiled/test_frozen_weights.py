"""What compilers do with frozen weights: no float32 array of their size, and gathers of codes."""

import collections

import pytest

from model.adapter import AdapterConfig
from model.config import TransformerConfig
from planning.compiled.text import arrays, parse
from planning.compiled.transfers import results
from planning.plan import Job
from tests.compiled_text import NEEDS_CUDA
from trainer.config.schema import MeshConfig

MODEL = TransformerConfig(
    vocab_size=1408,
    hidden_size=640,
    intermediate_size=1152,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=128,
)
DEVICES = 4
# Divides no matrix size, so that no partial sum of a gradient has the size of a matrix.
RANK = 7
MATRICES = {640 * 768, 640 * 256, 640 * 1152}


def compiled(topology, quantize):
    """Returns the parsed text of a training step of adapters over weights quantized with
    `quantize`."""
    job = Job.of(
        MODEL,
        topology,
        1024,
        batch=DEVICES,
        mesh=MeshConfig(fsdp=DEVICES),
        adapter=AdapterConfig(rank=RANK, quantize=quantize),
    )
    return parse(job.compile().as_text())


def in_memory(module):
    """Returns dtype -> sizes of the arrays that instructions outside fusions produce, which are
    those in memory."""
    fused = {
        name
        for instructions in module.computations.values()
        for instruction in instructions
        if instruction.opcode == "fusion"
        for name in instruction.called
    }
    sizes = collections.defaultdict(set)
    for computation, instructions in module.computations.items():
        for array in (
            array
            for instruction in instructions
            if computation not in fused
            for array in arrays(instruction.type)
        ):
            sizes[array.dtype].add(array.elements)
    return sizes


def gathered(module):
    """Returns dtype -> bytes of the results of all gathers of a step."""
    total = collections.Counter()
    for computation, instructions in module.computations.items():
        for instruction in instructions:
            if instruction.opcode.removesuffix("-start") == "all-gather":
                for array in results(instruction):
                    total[array.dtype] += module.runs[computation] * array.nbytes
    return total


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", pytest.param("h100:4", marks=NEEDS_CUDA)])
def test_no_frozen_weight_is_float32_and_only_codes_are_gathered(topology):
    """No float32 array has the size of a layer's matrix, a quarter of one, or all layers', so there
    is no copy, gradient or moment; gathers of NF4 carry at most 0.30 of the bytes of those in
    bfloat16. Dequantized matrices are bfloat16."""
    layers = MODEL.num_hidden_layers
    shapes = {
        size * count // parts
        for size in MATRICES
        for count in (1, layers)
        for parts in (1, DEVICES)
    }
    plain, codes = compiled(topology, "none"), compiled(topology, "nf4")
    for module in (plain, codes):
        assert not in_memory(module)["f32"] & shapes, in_memory(module)["f32"] & shapes
        assert in_memory(module)["bf16"] & shapes
    plain_bytes, code_bytes = gathered(plain), gathered(codes)
    assert set(plain_bytes) == {"bf16"} and set(code_bytes) == {"bf16", "u8"}
    # Only the embedding and the head are still gathered in bfloat16.
    assert code_bytes["u8"] <= 0.30 * (plain_bytes["bf16"] - code_bytes["bf16"])
