"""How much attention some tokens pay to groups of tokens, layer by layer.

Attention's output is a mean of values. For a value that is 1 at a group's tokens and 0 elsewhere,
that mean is the group's share, so each layer attends a second time, with such values, by the
model's own schedule and kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from .attention import TokenCoords
from .attention.schedules import in_any_layout
from .dropout import TokenInfo
from .frozen import Weight
from .layer import Heads, ShardedLayer
from .transformer import EVERY_TOKEN, Batch, Transformer
from .weight_gathering import Shards


def attention_mass(
    model: Transformer,
    params: Shards,
    batch: Batch,
    group: Int[Array, "B L"] | Int[np.ndarray, "B L"],
    groups: int,
    query_mask: Bool[Array, "B L"] | Bool[np.ndarray, "B L"],
) -> Float[Array, "N G"]:
    """Returns the share of each layer's attention on each group, in 0 .. 1, float32: the mean over
    heads and over the tokens in `query_mask` of all rows.

    A layer's shares sum to 1, or to less if it has attention sinks or tokens are in no group.

    Args:
      model: on a mesh without the axis tensor, in any layout.
      batch: of the model, [B, L, ...] each.
      group: of each token, 0 .. groups - 1, or a negative number for none.
      query_mask: whether a token's attention counts.

    Raises:
      ValueError: the mesh has an axis tensor.
    """
    if model.mesh.shape["tensor"] > 1:
        raise ValueError("attention_mass needs a mesh without the axis tensor, whose heads it adds")
    model = dataclasses.replace(model, schedule=in_any_layout(model.schedule))

    def local(params: Shards, batch: Batch) -> Float[Array, "N G"]:
        group, query_mask = batch["group"], batch["query_mask"]
        coords, info = model.local_coords(batch), TokenInfo(batch["positions"])
        length = info.positions.shape[1] * model.mesh.shape["sequence"]
        x, shares = model.local_embed(params, batch), []
        for layer, weights in _each_layer(model, params, length):
            q, k, v = layer.project(weights, x, info)
            share = _shares(layer, weights, q, k, coords, group, groups)
            shares.append(jnp.einsum("btg,bt->g", share, query_mask.astype(jnp.float32)))
            attended = layer.attend(weights, q, k, v, coords)
            x = layer.finish(weights, x, attended, info).hidden
        total, tokens = lax.psum((jnp.stack(shares), jnp.sum(query_mask)), EVERY_TOKEN)
        return total / tokens

    every = {**batch, "group": group, "query_mask": query_mask}
    return jax.jit(model.sharded(local, PartitionSpec()))(params, every)


def _each_layer(
    model: Transformer, params: Shards, length: int
) -> Iterator[tuple[ShardedLayer, dict[str, Weight]]]:
    """Yields every layer with its whole weights, for whole rows of `length` tokens."""
    for stack in model.config.stacks:
        gatherer, layers = model.weights_of(stack), model.layers(stack, length)
        shards = gatherer.of_layers(params)
        for number in range(stack.layers):
            own: Shards = {name: array[number] for name, array in shards.items()}
            yield layers[number % len(layers)], gatherer.gather_layer(own)


def _shares(
    layer: ShardedLayer,
    weights: dict,
    q: Heads,
    k: Heads,
    coords: TokenCoords,
    group: Int[Array, "B T"],
    groups: int,
) -> Float[Array, "B T G"]:
    """Returns each token's attention on each group, the mean over heads."""
    width, parts = k.shape[-1], []
    for first in range(0, groups, width):  # as many groups at once as values have channels
        values = jax.nn.one_hot(group - first, width, dtype=k.dtype)
        values = jnp.broadcast_to(values[:, :, None], k.shape)
        attended = layer.attend(weights, q, k, values, coords)
        parts.append(jnp.mean(attended.astype(jnp.float32), 2))
    return jnp.concatenate(parts, -1)[..., :groups]
