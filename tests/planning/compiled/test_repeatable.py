"""What the CUDA compiler makes of sums whose order could vary from run to run."""

import pytest

from model.config import TransformerConfig
from planning.compiled.text import arrays, parse
from planning.plan import Job
from tests.compiled_text import NEEDS_CUDA

MODEL = TransformerConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.mark.slow
@NEEDS_CUDA
def test_no_step_adds_floats_by_atomic_operations():
    """A scatter with repeated indices adds in whatever order threads arrive."""
    module = parse(Job.of(MODEL, "h100:1", 1024).compile().as_text())
    scatters = [
        instruction.rest
        for instructions in module.computations.values()
        for instruction in instructions
        if instruction.opcode == "scatter" and arrays(instruction.type)[0].dtype[0] in "fb"
    ]
    assert scatters and all("unique_indices=true" in line for line in scatters)
