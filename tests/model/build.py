"""Small models and batches shared by the model's tests."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from model.attention.kernels import get_kernel
from model.attention.layout import permutation
from model.config import TransformerConfig
from model.language_model import LanguageModel
from model.memory.options import MemoryConfig
from trainer.config.schema import MeshConfig
from trainer.mesh import make_mesh

# Attention in tiles so small that there are several, for tests of how layers run around it. The other
# tests' kernel, the reference, compiles in half the time.
TILED = get_kernel(query_tile=16, key_tile=16)
# Chunk sizes with which position-wise work runs on all of a device's tokens at once.
ALL_AT_ONCE = {"projection_chunk": 0, "feed_forward_chunk": 0, "loss_chunk": 0}
MESHES = {
    "one": {},
    "fsdp 8": {"fsdp": 8},
    "sequence 8": {"sequence": 8},
    "tensor 2 x sequence 4": {"tensor": 2, "sequence": 4},
    "fsdp 2 x tensor 2 x sequence 2": {"fsdp": 2, "tensor": 2, "sequence": 2},
    "data 2 x tensor 4": {"data": 2, "tensor": 4},
}


def tiny(**changes) -> TransformerConfig:
    """Returns a config of two layers with grouped heads and sizes that all meshes divide."""
    values = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.1,
    }
    return TransformerConfig(**{**values, **changes})


def mesh_of(shape: dict):
    """Returns a mesh on the first devices, as many as it needs."""
    config = MeshConfig(**shape)
    return make_mesh(config, jax.devices()[: config.devices])


def llama(config, shape=None, **options) -> LanguageModel:
    """Returns a float32 model with the reference kernel and chunks so small that there are several;
    memory options go by their names."""
    options = {
        "dtype": jnp.float32,
        "kernel": get_kernel("reference"),
        "projection_chunk": 16,
        "feed_forward_chunk": 16,
        "loss_chunk": 8,
        **options,
    }
    memory = {
        field.name: options.pop(field.name)
        for field in dataclasses.fields(MemoryConfig)
        if field.name in options
    }
    return LanguageModel(config, mesh_of(shape or {}), memory=MemoryConfig(**memory), **options)


def initial(model) -> dict[str, jax.Array]:
    """Returns `model.init(0)`, from numbers drawn once per config: a program that draws them takes
    two seconds to compile, for each model anew."""

    def placed(name, drawn):
        parameter = model.parameters[name]
        missing = np.subtract(parameter.shape, drawn.shape)
        padded = np.pad(drawn, [(0, count) for count in missing])
        return jax.device_put(padded.astype(parameter.dtype), model.shardings[name])

    return {name: placed(name, drawn) for name, drawn in _drawn(model.config).items()}


@functools.cache
def _drawn(config):
    return {name: np.asarray(x) for name, x in llama(config).init(0).items()}


def abstract(model) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of the model's parameters, for tracing."""
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in model.parameters.items()}


def mean_loss(model):
    """Returns (params, batch) -> (mean loss in nats including router losses, sum of weights)."""

    def loss(params, batch):
        sums = model.loss(params, batch)
        return sums.trained / sums.weight, sums.weight

    return loss


def one_document(tokens) -> dict[str, np.ndarray]:
    """A batch of these tokens without targets; each row is one document."""
    index = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return {
        "tokens": tokens,
        "index": index,
        "positions": index,
        "segment_ids": np.ones_like(tokens),
    }


def packed_batch(config, rows=8, length=128, seed=0) -> dict[str, np.ndarray]:
    """Returns documents of uneven lengths, padding at the end of each row and an uneven loss mask;
    in natural order."""
    rng = np.random.default_rng(seed)
    batch = {
        name: np.zeros((rows, length), np.int32) for name in ("index", "segment_ids", "positions")
    }
    batch["index"][:] = np.arange(length)
    for row in range(rows):
        cuts = [0, *sorted(rng.choice(np.arange(1, length), 3, replace=False))]
        for number, (start, end) in enumerate(itertools.pairwise(cuts), 1):
            batch["segment_ids"][row, start:end] = number
            batch["positions"][row, start:end] = np.arange(end - start)
    batch["tokens"], batch["targets"] = (
        rng.integers(0, config.vocab_size, (rows, length), np.int32) for _ in "tt"
    )
    # The first rows have far more targets than the last, so a mean of the shards' means would be
    # wrong.
    share = np.linspace(0.9, 0.02, rows)[:, None]
    batch["loss_weights"] = (
        (rng.random((rows, length)) < share) & (batch["segment_ids"] > 0)
    ).astype(np.float32)
    return batch


def permuted(batch, model, layout="striped"):
    """Returns the batch in the order of the model's mesh, and the order."""
    length = batch["tokens"].shape[1]
    order = permutation(length, model.mesh.shape["sequence"], layout)
    return {name: x[:, order] for name, x in batch.items()}, order
