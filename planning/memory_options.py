"""The memory options that a plan varies and reports; imports no JAX, so commands start fast."""

import dataclasses

from model.memory.options import MemoryConfig

# Chunk sizes, which a plan takes from the recipe.
_CHUNK_SIZES = ("feed_forward_chunk", "projection_chunk", "loss_chunk")
MEMORY_OPTIONS = tuple(
    field.name for field in dataclasses.fields(MemoryConfig) if field.name not in _CHUNK_SIZES
)
