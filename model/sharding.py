"""From a parameter's logical axes to mesh axes: one table, one function that applies it, and how shards become whole.

Every parameter is sharded over `tensor` where its heads, feed-forward width or vocabulary are split, and over `fsdp` *and*
`sequence` as well, since the devices along both share the parameters (ZeRO-3 over all devices that share a batch).
"""
from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .config import LlamaConfig

MESH_AXES = ("data", "fsdp", "tensor", "sequence")
BATCH_AXES = ("data", "fsdp")
STORAGE_AXES = ("fsdp", "sequence")

# The axes that are split over `tensor` where `Parallel` says so, under the same names.
TENSOR_SPLIT = ("heads", "kv_heads", "mlp", "vocab")
# The axes of the hidden size: storage is split along them first. Biases, that have none, are split as their sizes allow.
HIDDEN = ("embed", "norm")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter's shape and the logical names of its axes."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Parallel:
    """What the tensor axis splits for this model. The vocabulary, and heads that it does not divide, are padded in memory
    with zeros that stay zero: no logit, no gradient, no share in norms; exports leave them out. A feed-forward width
    that it does not divide is replicated.

    Padding adds key heads, each with its whole group of query heads, so that query head h still meets key head h // group.
    It costs query_heads / num_attention_heads of the attention's weights, moments and work: 9 and 3 heads on 2 ranks
    become 12 and 4 (a third more), 33 on 8 become 40 (a fifth). All heads on each rank would cost `tensor` times. One key
    head shared by query heads that `tensor` does not divide is the exception: a rank would have as many heads either way,
    so they are replicated.

    Attributes:
      tensor: size of the tensor axis.
      heads, kv_heads, mlp, vocab: whether that is split; the vocabulary always is. With `heads` and not `kv_heads`, each rank
        computes with the one key/value head that its query heads share.
      vocab_size, query_heads, key_heads: in memory, padding among them.
      split_tokens: between attention and feed-forward, each rank keeps its own tokens of the hidden states (Korthikanti et al.,
        Reducing Activation Recomputation in Large Transformer Models, section 4.2): gathered before a product over a split
        axis and reduce-scattered behind it, which sends as much as the sum would.
    """

    tensor: int
    heads: bool
    kv_heads: bool
    mlp: bool
    vocab_size: int
    query_heads: int
    key_heads: int
    split_tokens: bool = False
    vocab = True

    @classmethod
    def of(cls, config: LlamaConfig, tensor: int) -> Parallel:
        """The splits that the sizes allow, and the padding that allows them."""
        query, key = config.num_attention_heads, config.num_key_value_heads
        shared = query % tensor == 0 and tensor % key == 0
        if key % tensor and not shared and key > 1:
            group, key = query // key, -(-key // tensor) * tensor
            query = group * key
        kv_heads = key % tensor == 0
        return cls(tensor, kv_heads or shared, kv_heads, config.intermediate_size % tensor == 0,
                   -(-config.vocab_size // tensor) * tensor, query, key)

    @property
    def local_key_heads(self) -> int:
        """Key/value heads that a rank attends with."""
        return self.key_heads // self.tensor if self.kv_heads else 1 if self.heads else self.key_heads

    def padded(self, config: LlamaConfig) -> LlamaConfig:
        """The model's sizes as they are in memory."""
        return dataclasses.replace(config, vocab_size=self.vocab_size, num_attention_heads=self.query_heads,
                                   num_key_value_heads=self.key_heads)

    def combine(self, x: jax.Array, what: str) -> jax.Array:
        """Hidden states [B, T, E] from the ranks' shares of a product over a split axis; with `split_tokens` a rank's own
        tokens of them, [B, T / tensor, E]."""
        if self.split_tokens:
            return lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True)
        return self.sum(x, what)

    def whole(self, x: jax.Array) -> jax.Array:
        """All of the ranks' tokens: [B, T, E]."""
        return lax.all_gather(x, "tensor", axis=1, tiled=True) if self.split_tokens else x

    def sum(self, x: jax.Array, what: str) -> jax.Array:
        """Adds the tensor ranks' shares of a product over a split axis; nothing to add where it is not split."""
        return lax.psum(x, "tensor") if self.tensor > 1 and getattr(self, what) else x

    def rank(self) -> jax.Array:
        """This device's place on the tensor axis."""
        return lax.axis_index("tensor")


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Where the parameters of one model lie on one mesh.

    Attributes:
      mesh: has all of MESH_AXES.
      storage_axes: mesh axes that storage is split over; () keeps a whole copy on each device (small models, decoding).
    """

    mesh: Mesh
    config: LlamaConfig
    storage_axes: tuple[str, ...] = STORAGE_AXES

    @property
    def parallel(self) -> Parallel:
        return Parallel.of(self.config, self.mesh.shape["tensor"])

    def padded(self, config: LlamaConfig) -> LlamaConfig:
        """With a hidden size that all ranks divide that share the storage, as in memory: 3,200 on 512 ranks are 3,584.
        What fills it up is zero, and cut off where a parameter is made whole: no product knows of it."""
        ranks = math.prod(self.mesh.shape[axis] for axis in self.storage_axes)
        return dataclasses.replace(config, hidden_size=-(-config.hidden_size // ranks) * ranks)

    def spec(self, name: str, parameter: Parameter) -> PartitionSpec:
        """Mesh axes of each axis of a parameter. JAX refuses uneven shards, so a mesh axis goes only where it divides.

        Raises:
          ValueError: a logical axis that the table lacks; names the parameter.
        """
        placed: list[list[str]] = [[] for _ in parameter.shape]
        left = list(parameter.shape)

        def place(i: int, axis: str) -> bool:
            size = self.mesh.shape[axis]
            if left[i] % size:
                return False
            left[i] //= size
            placed[i].append(axis)
            return True

        for i, logical in enumerate(parameter.axes):
            if logical in TENSOR_SPLIT:
                if self.mesh.shape["tensor"] > 1 and getattr(self.parallel, logical):
                    place(i, "tensor")
            elif logical not in (*HIDDEN, "layers", "head_dim"):
                raise ValueError(f"{name}: no sharding rule for its axis {logical!r}")
        order = sorted((i for i, logical in enumerate(parameter.axes) if logical != "layers"),
                       key=lambda i: (parameter.axes[i] not in HIDDEN, -parameter.shape[i]))
        for axis in self.storage_axes:
            if self.mesh.shape[axis] > 1:
                any(place(i, axis) for i in order)
        return PartitionSpec(*(tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in placed))

    def specs(self, parameters: dict[str, Parameter]) -> dict[str, PartitionSpec]:
        return {name: self.spec(name, parameter) for name, parameter in parameters.items()}

    def shardings(self, parameters: dict[str, Parameter]) -> dict[str, NamedSharding]:
        return {name: NamedSharding(self.mesh, spec) for name, spec in self.specs(parameters).items()}


def storage_axes_of(spec: PartitionSpec) -> list[tuple[int, tuple[str, ...]]]:
    """The axes of an array, and the storage mesh axes that split each."""
    found = []
    for i, entry in enumerate(spec):
        axes = tuple(a for a in ((entry,) if isinstance(entry, str) else entry or ()) if a in STORAGE_AXES)
        if axes:
            found.append((i, axes))
    return found


class OnHost(NamedTuple):
    """A parameter that lies in the host's memory, and what stands for it where gradients are taken: an array of its shape on
    the device, of which no value is read, and of which the gradient is the parameter's (jax cannot give back a gradient in the
    host's memory from a `shard_map`)."""

    value: jax.Array
    gradient: jax.Array


def arrive(parameter: jax.Array | OnHost) -> jax.Array:
    """A parameter on the device, from wherever it lies."""
    if isinstance(parameter, OnHost):
        return _fetch(*parameter)
    there = jax.typeof(parameter).memory_space == jax.memory.Space.Host
    return jax.device_put(parameter, jax.memory.Space.Device) if there else parameter


@jax.custom_vjp
def _fetch(value, gradient):
    return jax.device_put(value, jax.memory.Space.Device)


_fetch.defvjp(lambda value, gradient: (_fetch(value, gradient), None), lambda _, gradient: (None, gradient))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(shard: jax.Array, spec: PartitionSpec, dtype) -> jax.Array:
    """A parameter's float32 shard -> the whole (of this tensor rank), sent in `dtype`, float32 by type. Inside `shard_map`.

    A cotangent has its primal's dtype: the whole is float32 by type so that its gradient, one from each device, is float32
    until the reduce-scatter has added it up.
    """
    whole = shard.astype(dtype)
    for i, axes in storage_axes_of(spec):
        for over, groups in reversed(_turns(axes)):
            whole = lax.all_gather(whole, over, axis=i, axis_index_groups=groups, tiled=True)
    return whole.astype(jnp.float32)


def reduce_scatter(spec: PartitionSpec, gradient: jax.Array) -> jax.Array:
    """The sum over the storage axes of all devices' gradients of a whole parameter: of it this device's shard."""
    for i, axes in reversed(storage_axes_of(spec)):
        for over, groups in _turns(axes):
            gradient = lax.psum_scatter(gradient, over, scatter_dimension=i, axis_index_groups=groups, tiled=True)
    return gradient


def _turns(axes: tuple[str, ...]) -> list[tuple[str | tuple[str, ...], list | None]]:
    """A reduce-scatter over mesh axes as turns, a gather as the same turns backwards: axes, and groups of their ranks or None.

    Of one over all devices of a mesh the TPU's compilers may make an all-reduce: twice the bytes, the whole sum in memory.
    That one goes axis by axis, and where one axis is all of the mesh in two turns: ranks far apart first, then neighbours. (Not
    on v5e and v6e: their compilers know no route for groups that are no rows or boxes of the slice.)
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = [mesh.shape[axis] for axis in axes]
    kind = _device_kind(mesh)
    if math.prod(sizes) < mesh.size or "TPU" not in kind:
        return [(axes, None)]
    if len(axes) > 1:
        return [(axis, None) for axis in axes]
    if "lite" in kind:
        return [(axes, None)]
    first = max(n for n in range(1, math.isqrt(sizes[0]) + 1) if sizes[0] % n == 0)
    ranks = np.arange(sizes[0]).reshape(first, -1)
    return [(axes, None)] if first == 1 else [(axes, ranks.T.tolist()), (axes, ranks.tolist())]


def _device_kind(mesh) -> str:
    return getattr(mesh.abstract_device, "device_kind", "")


gather.defvjp(lambda shard, spec, dtype: (gather(shard, spec, dtype), None),
              lambda spec, dtype, _, gradient: (reduce_scatter(spec, gradient),))
