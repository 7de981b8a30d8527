"""Axes zero-padded in memory so that the mesh divides them.

The vocabulary and the heads are padded for the tensor axis, the hidden size for the ranks that
share the storage: 3,200 on 512 ranks is 3,584. Padding stays zero: it has no logit, no gradient and
no share in norms, exports omit it, and `trim` removes it from the hidden size before any product.
Checkpoints hold arrays as they were in memory; any mesh reads them, since zeros may be added or cut
at an axis's end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .adapter import AdapterConfig
from .config import TransformerConfig
from .families import FAMILIES
from .families.family import WITH_EXPERTS
from .frozen import FrozenWeight, Plain
from .parameter_declarations import declare, without_stack
from .sharding import HIDDEN, Sharding, TensorParallel

# The logical axes that may be padded.
PADDED = (*HIDDEN, "vocab", "heads", "kv_heads")
# A difference of this or more means another vocabulary or model; but if the hidden size without
# padding is known, any padding of it is accepted, since it grows with the ranks that share the
# storage: 5,120 on 2,048 ranks is 6,144.
MAX_PADDING = 1024


def sizes_in_memory(sharding: Sharding) -> TransformerConfig:
    """Returns the model's sizes in memory, padding included."""
    config, parallel = sharding.config, sharding.parallel
    ranks = math.prod(sharding.mesh.shape[axis] for axis in sharding.storage_axes)
    # Padding keeps blocks of quantized weights whole.
    multiple = (
        math.lcm(ranks, config.adapter.block if config.adapter else 1)
        if config.hidden_size % ranks
        else ranks
    )
    return dataclasses.replace(
        config,
        vocab_size=parallel.vocab_size,
        num_attention_heads=parallel.query_heads,
        num_key_value_heads=parallel.key_heads,
        hidden_size=-(-config.hidden_size // multiple) * multiple,
    )


def pad(array: Float[Array, ...], shape: tuple[int, ...]) -> Float[Array, ...]:
    """Returns the array with zeros at the end of each axis, up to `shape`."""
    return jnp.pad(
        array, [(0, after - before) for after, before in zip(shape, array.shape, strict=True)]
    )


def trim(
    whole: Float[Array, ...],
    axes: tuple[str, ...],
    config: TransformerConfig,
    parallel: TensorParallel,
) -> Float[Array, ...]:
    """Returns a gathered weight without the padding of its hidden axis, for products.

    Runs inside `shard_map`. If `tensor` does not split the key/value heads, only the head that this
    rank's query heads share remains.

    Args:
      axes: the weight's logical axes; config: the model's sizes without padding.
    """
    whole = whole[
        tuple(slice(config.hidden_size) if axis in HIDDEN else slice(None) for axis in axes)
    ]
    weight = own_key_head(Plain(whole), axes, parallel)
    assert isinstance(weight, Plain)
    return weight.value


def own_key_head(
    weight: FrozenWeight, axes: tuple[str, ...], parallel: TensorParallel
) -> FrozenWeight:
    """Returns, from a weight whose key/value heads `tensor` does not split, the one head that this
    rank's query heads share; any other weight unchanged. Runs inside `shard_map`."""
    if "kv_heads" not in axes or not parallel.heads or parallel.kv_heads:
        return weight
    head = parallel.rank() * parallel.key_heads // parallel.tensor
    return weight.part(head, parallel.key_heads, axes.index("kv_heads"))


def whole_heads(
    vector: Float[Array, ...], axes: tuple[str, ...], parallel: TensorParallel
) -> Float[Array, ...]:
    """Returns all ranks' key/value heads from this rank's, if `own_key_head` left only one;
    otherwise the array unchanged. Runs inside `shard_map`."""
    if "kv_heads" not in axes or not parallel.heads or parallel.kv_heads:
        return vector
    axis = axes.index("kv_heads")
    every = lax.all_gather(vector, "tensor", axis=axis, tiled=True)
    return lax.slice_in_dim(every, 0, None, parallel.tensor // parallel.key_heads, axis)


@functools.cache
def _declared_axes() -> dict[str, tuple[str, ...]]:
    """The logical axes of every parameter that any model has."""
    axes: dict[str, tuple[str, ...]] = {}
    for name, family in FAMILIES.items():
        biases: dict[str, Any] = {
            field: True for field in ("attention_bias", "mlp_bias") if field in family.configurable
        }
        if "num_experts" in family.configurable:
            biases |= {"num_experts": 1, "num_experts_per_tok": 1}
        if "shared_expert_intermediate_size" in family.configurable:
            biases["shared_expert_intermediate_size"] = 1
        config = TransformerConfig(
            family=name, tie_word_embeddings=False, **biases, **family.computes
        )
        configs = [config]
        if family.all_linear == WITH_EXPERTS:
            adapter = AdapterConfig(rank=1, targets=WITH_EXPERTS)
            configs.append(dataclasses.replace(config, adapter=adapter))
        for config in configs:
            axes |= {parameter: declared.axes for parameter, declared in declare(config).items()}
    # The same in all families.
    adapters = TransformerConfig(
        tie_word_embeddings=False, adapter=AdapterConfig(rank=1, use_dora=True)
    )
    axes |= {parameter: declared.axes for parameter, declared in declare(adapters).items()}
    return axes


def logical_axes(name: str) -> tuple[str, ...]:
    """Returns the logical axes of a parameter or its moment: `name` may be its path in an
    optimizer's state. () for anything else."""
    # The layers' norms end in `norm.weight`, as does the path of the last norm: the longest name
    # wins.
    name = without_stack(name)
    declared = max(
        (known for known in _declared_axes() if name.endswith(known)), key=len, default=None
    )
    return _declared_axes()[declared] if declared else ()


def vocabulary_axes() -> dict[str, int]:
    """Returns the parameters that have a row or column for each id, with that axis."""
    return {name: axes.index("vocab") for name, axes in _declared_axes().items() if "vocab" in axes}


def fits(
    name: str, shape: tuple[int, ...], other: tuple[int, ...], own: tuple[int, ...] | None = None
) -> bool:
    """Returns whether two shapes are equal except for padding.

    Args:
      name: a parameter's name, or its path in an optimizer's state.
      own: the shape without padding, if known: neither of the two may be shorter.
    """
    axes = logical_axes(name)
    if not axes or len(shape) != len(other) or len(axes) != len(shape):
        return shape == other
    return all(
        size == other_size or _is_padding(axis, size, other_size, None if own is None else own[i])
        for i, (axis, size, other_size) in enumerate(zip(axes, shape, other, strict=True))
    )


def _is_padding(axis: str, size: int, other: int, own: int | None) -> bool:
    """Returns whether two sizes of an axis may differ by padding; `own` is the size without it, if
    known."""
    if axis not in PADDED or (own is not None and own > min(size, other)):
        return False
    return abs(size - other) < MAX_PADDING or (own is not None and axis in HIDDEN)
