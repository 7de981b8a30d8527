"""The names of the memory options that a plan varies and reports; imports no JAX, so that commands can list them at once."""

import dataclasses

from model.memory.options import MemoryConfig

# Sizes of chunks: a plan takes them from the recipe.
_CHUNK_SIZES = ("feed_forward_chunk", "projection_chunk", "loss_chunk")
MEMORY_OPTIONS = tuple(
    field.name for field in dataclasses.fields(MemoryConfig) if field.name not in _CHUNK_SIZES
)
