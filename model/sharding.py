"""Placement of parameters on a mesh: one table from logical axes to mesh axes, and the gathers and
scatters of shards and gradients.

Every parameter is split over `tensor` along its heads, feed-forward width or vocabulary, and also
over `fsdp`, `expert` and `sequence`, whose devices share the parameters (ZeRO-3 over all devices
that share a batch).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Shaped

from .config import TransformerConfig

STORAGE_AXES = ("fsdp", "expert", "sequence")


class AxisRule(NamedTuple):
    """The mesh axes a logical axis may be split over.

    Attributes:
      tensor: whether `tensor` splits it, if `TensorParallel` says so under the axis's name.
      storage: when the storage axes are tried on it: 0 first, 1 if they divide none of the former,
        None never.
      expert: whether `expert` splits it, like `tensor`: products take a device's part of it.
    """

    tensor: bool
    storage: int | None
    expert: bool = False


RULES = {
    "layers": AxisRule(tensor=False, storage=None),  # scanned over, so never split
    "embed": AxisRule(tensor=False, storage=0),
    "norm": AxisRule(tensor=False, storage=0),  # the hidden axis of a vector
    "vocab": AxisRule(tensor=True, storage=1),
    "experts": AxisRule(tensor=False, storage=1, expert=True),
    "router": AxisRule(tensor=False, storage=None),  # a number for each expert
    "heads": AxisRule(tensor=True, storage=1),
    "kv_heads": AxisRule(tensor=True, storage=1),
    "mlp": AxisRule(tensor=True, storage=1),
    "head_dim": AxisRule(tensor=False, storage=1),
    "rank": AxisRule(tensor=False, storage=None),  # of an adapter
    # Scales of quantized weights, whole on each device.
    "unit": AxisRule(tensor=False, storage=None),
    # A trajectory's continuous inputs and outputs: a few numbers.
    "inputs": AxisRule(tensor=False, storage=None),
    "actions": AxisRule(tensor=False, storage=None),
    "kinds": AxisRule(tensor=False, storage=None),
}
# The logical axes of the hidden size.
HIDDEN = tuple(axis for axis, rule in RULES.items() if rule.storage == 0)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter's shape, the logical names of its axes, and its dtype in storage.

    Attributes:
      frozen: whether it has no gradient in any run of the model; `trainable` may freeze others.
      constant: whether no run trains it; it is frozen, and keeps its dtype everywhere.
      granularity: along each axis, how many elements stay on one device; () for 1 along all.
      stages: of a layer, those that read it (`stages.STAGES`).
      inputs: how many of a matrix's axes, after those of layers and experts, are a product's
        inputs; 0 for a table of rows; None for vectors.
      hf_name: of Hugging Face's tensors, with {i} for the layer.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: str = "float32"
    frozen: bool = False
    constant: bool = False
    granularity: tuple[int, ...] = ()
    stages: tuple[str, ...] = ()
    inputs: int | None = None
    hf_name: str = ""

    @property
    def is_matrix(self) -> bool:
        """Whether this is a matrix, or a stack of them, rather than vectors."""
        return self.inputs is not None

    @property
    def stacked(self) -> int:
        """How many leading axes number the layers, and a layer's experts."""
        return sum(axis in ("layers", "experts") for axis in self.axes)


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """What the tensor axis splits in a model. The vocabulary, and heads it does not divide, are
    padded in memory (`model.padding`); a feed-forward width it does not divide is replicated.

    Padding adds key heads, each with its whole group of query heads, so that query head h still
    attends to key head h // group. It multiplies attention's weights, moments and work by
    query_heads / num_attention_heads: 9 and 3 heads on 2 ranks become 12 and 4 (a third more), 33
    on 8 become 40 (a fifth). All heads on each rank would cost `tensor` times as much. One key head
    shared by query heads that `tensor` does not divide is the exception: a rank would have as many
    heads either way, so they are replicated.

    Attributes:
      tensor: size of the tensor axis.
      heads, kv_heads, mlp, vocab: whether that axis is split; the vocabulary always is. With
        `heads` and not `kv_heads`, each rank computes with the one key/value head that its query
        heads share.
      vocab_size, query_heads, key_heads: in memory, padding included.
      split_tokens: Megatron's sequence parallelism (Korthikanti et al., Reducing Activation
        Recomputation in Large Transformer Models, section 4.2): between attention and feed-forward
        each rank keeps its own tokens of the hidden states. They are gathered before a product over
        a split axis and reduce-scattered after it, which sends as many bytes as the sum would.
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
    def of(cls, config: TransformerConfig, tensor: int) -> TensorParallel:
        """Returns the splits that the model's sizes allow, and the padding that allows them."""
        query, key = config.num_attention_heads, config.num_key_value_heads
        shared = query % tensor == 0 and tensor % key == 0
        if key % tensor and not shared and key > 1:
            group, key = query // key, -(-key // tensor) * tensor
            query = group * key
        kv_heads = key % tensor == 0
        # A quantized down_proj has its blocks along the width, and ranks hold whole blocks.
        block = config.adapter.block if config.adapter else 1
        widths = config.feed_forward_widths
        return cls(
            tensor=tensor,
            heads=kv_heads or shared,
            kv_heads=kv_heads,
            mlp=all(width // block % tensor == 0 for width in widths),
            vocab_size=-(-config.vocab_size // tensor) * tensor,
            query_heads=query,
            key_heads=key,
        )

    @property
    def local_key_heads(self) -> int:
        """The number of key/value heads that a rank attends with."""
        if self.kv_heads:
            return self.key_heads // self.tensor
        return 1 if self.heads else self.key_heads

    def reduce_output(self, x: Float[Array, "B T E"], axis: str) -> Float[Array, "B T E"]:
        """Returns hidden states from the ranks' partial sums of a product over the split logical
        `axis`; with `split_tokens` only this rank's T / tensor tokens."""
        if self.split_tokens:
            return lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True)
        return self.sum(x, axis)

    def all_gather_tokens(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Returns the hidden states of all ranks' tokens, from this rank's if `split_tokens` splits
        them."""
        return lax.all_gather(x, "tensor", axis=1, tiled=True) if self.split_tokens else x

    def sum(self, x: jax.Array, axis: str) -> jax.Array:
        """Returns the sum of the tensor ranks' `x`, or `x` itself if the ranks do not split the
        logical `axis`."""
        return lax.psum(x, "tensor") if self.tensor > 1 and getattr(self, axis) else x

    def sum_of_heads(self, x: Float[Array, "B T 1 1"], axis: str) -> Float[Array, "B T 1 1"]:
        """Returns a sum over the heads of all tensor ranks, from the sum over this rank's heads. A
        key head that several ranks share counts once.

        Args:
          axis: "heads" for query heads, "kv_heads" for key heads.
        """
        if axis == "kv_heads" and self.heads and not self.kv_heads:
            return lax.psum(x, "tensor") * (self.key_heads / self.tensor)
        return self.sum(x, axis)

    def rank(self) -> jax.Array:
        """Returns this device's index on the tensor axis."""
        return lax.axis_index("tensor")


@dataclasses.dataclass(frozen=True)
class Sharding:
    """The shardings of a model's parameters on a mesh.

    Attributes:
      mesh: has all of `names.MESH_AXES`.
      storage_axes: mesh axes over which storage is split; () keeps a whole copy on each device
        (small models, decoding).
    """

    mesh: Mesh
    config: TransformerConfig
    storage_axes: tuple[str, ...] = STORAGE_AXES

    @property
    def parallel(self) -> TensorParallel:
        """What the mesh's tensor axis splits."""
        return TensorParallel.of(self.config, self.mesh.shape["tensor"])

    def spec(self, name: str, parameter: Parameter) -> PartitionSpec:
        """Returns the mesh axes of each axis of a parameter. JAX refuses uneven shards, so a mesh
        axis is used only if it divides the remaining size.

        Raises:
          ValueError: a logical axis without a rule; names the parameter.
        """
        for axis in parameter.axes:
            if axis not in RULES:
                raise ValueError(f"{name}: no sharding rule for its axis {axis!r}")
        rules = [RULES[axis] for axis in parameter.axes]
        granularity = parameter.granularity or (1,) * len(rules)
        shape = [
            size // together for size, together in zip(parameter.shape, granularity, strict=True)
        ]
        local_shape = list(shape)
        splits: list[list[str]] = [[] for _ in shape]

        def split(i: int, mesh_axis: str) -> bool:
            """Splits axis i over a mesh axis if the latter divides it; returns whether it does."""
            size = self.mesh.shape[mesh_axis]
            if local_shape[i] % size:
                return False
            if size > 1:
                local_shape[i] //= size
                splits[i].append(mesh_axis)
            return True

        storage_axes = self.storage_axes
        for i, (axis, rule) in enumerate(zip(parameter.axes, rules, strict=True)):
            if rule.expert:
                storage_axes = tuple(name for name in storage_axes if name != "expert")
                split(i, "expert")  # `Transformer` refuses experts that it does not divide
            if rule.tensor and getattr(self.parallel, axis):
                split(i, "tensor")
        by_preference = sorted(
            (rule.storage, -shape[i], i) for i, rule in enumerate(rules) if rule.storage is not None
        )
        for mesh_axis in storage_axes:
            for *_, i in by_preference:
                if split(i, mesh_axis):
                    break
        return PartitionSpec(
            *(tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in splits)
        )

    def specs(self, parameters: dict[str, Parameter]) -> dict[str, PartitionSpec]:
        """Returns the spec of each parameter."""
        return {name: self.spec(name, parameter) for name, parameter in parameters.items()}

    def shardings(self, parameters: dict[str, Parameter]) -> dict[str, NamedSharding]:
        """Returns the sharding of each parameter."""
        return {
            name: NamedSharding(self.mesh, spec) for name, spec in self.specs(parameters).items()
        }


def mesh_axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes that an entry of a PartitionSpec names."""
    return (entry,) if isinstance(entry, str) else entry or ()


def storage_axes_of(spec: PartitionSpec) -> list[tuple[int, tuple[str, ...]]]:
    """Returns the array axes split by storage, each with its mesh axes."""
    splits = []
    for i, entry in enumerate(spec):
        axes = tuple(axis for axis in mesh_axes_of(entry) if axis in STORAGE_AXES)
        if axes:
            splits.append((i, axes))
    return splits


def storage_spec(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    """Returns the spec without the mesh axis `expert` if it splits experts, since a device computes
    with its own experts: only the remaining storage axes are gathered."""
    return PartitionSpec(
        *(
            tuple(name for name in mesh_axes_of(entry) if name != "expert")
            if entry and RULES[axis].expert
            else entry
            for entry, axis in zip(spec, axes, strict=True)
        )
    )


def without_storage(spec: PartitionSpec) -> PartitionSpec:
    """Returns the spec of a gathered array: its splits other than storage."""

    def others(entry):
        return tuple(axis for axis in mesh_axes_of(entry) if axis not in STORAGE_AXES) or None

    return PartitionSpec(*map(others, spec))


class OnHost(NamedTuple):
    """A parameter in host memory, with a placeholder on the device. The placeholder has the
    parameter's shape and is never read; it receives the gradient, since JAX cannot return a
    gradient in host memory from a `shard_map`."""

    value: jax.Array
    placeholder: jax.Array


def to_device(parameter: jax.Array | OnHost) -> jax.Array:
    """Returns the parameter in device memory. The gradient of an `OnHost` goes to the
    placeholder."""
    if isinstance(parameter, OnHost):
        return _fetch(*parameter)
    on_host = jax.typeof(parameter).memory_space == jax.memory.Space.Host
    return jax.device_put(parameter, jax.memory.Space.Device) if on_host else parameter


@jax.custom_vjp
def _fetch(value: jax.Array, placeholder: jax.Array) -> jax.Array:
    return jax.device_put(value, jax.memory.Space.Device)


_fetch.defvjp(
    lambda value, placeholder: (_fetch(value, placeholder), None),
    lambda _, gradient: (None, gradient),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(shard: Float[Array, ...], spec: PartitionSpec, dtype: Any) -> Float[Array, ...]:
    """Returns the whole parameter (of this tensor rank) from its shard. Runs inside `shard_map`.

    It is sent in `dtype` and float32 by type: a cotangent has its primal's dtype, so the devices'
    gradients are float32 until the reduce-scatter has summed them. The sum has the shard's dtype.
    """
    return gather_frozen(shard.astype(dtype), spec).astype(jnp.float32)


def gather_frozen(shard: Shaped[Array, ...], spec: PartitionSpec) -> Shaped[Array, ...]:
    """Returns the whole array (of this tensor rank) from its shard, in the shard's dtype and
    without gradient."""
    whole = shard
    for i, axes in storage_axes_of(spec):
        for stage_axes, groups in reversed(_stages(axes)):
            whole = lax.all_gather(whole, stage_axes, axis=i, axis_index_groups=groups, tiled=True)
    return whole


def reduce_scatter(spec: PartitionSpec, gradient: Float[Array, ...]) -> Float[Array, ...]:
    """Returns this device's shard of the sum, over the storage axes, of all devices' gradients of a
    whole parameter."""
    for i, axes in reversed(storage_axes_of(spec)):
        for stage_axes, groups in _stages(axes):
            gradient = lax.psum_scatter(
                gradient, stage_axes, scatter_dimension=i, axis_index_groups=groups, tiled=True
            )
    return gradient


def _stages(
    axes: tuple[str, ...],
) -> Sequence[tuple[str | tuple[str, ...], list[list[int]] | None]]:
    """Returns the stages of a reduce-scatter over mesh axes: the axes of each, and groups of their
    ranks or None. A gather runs the same stages backwards.

    The TPU compilers may turn a reduce-scatter over all devices of a mesh into an all-reduce: twice
    the bytes, and the whole sum in memory. Such a reduce-scatter goes axis by axis; if one axis is
    the whole mesh, in two stages: distant ranks first, then neighbours. (Not on v5e and v6e, whose
    compilers have no route for groups that are not rows or boxes of the slice.)
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


def _device_kind(mesh: Any) -> str:
    return getattr(mesh.abstract_device, "device_kind", "")


def _gather_forward(shard: Float[Array, ...], spec: PartitionSpec, dtype: Any):
    # An empty array carries the shard's dtype.
    like = None if shard.dtype == jnp.float32 else jnp.zeros(0, shard.dtype)
    return gather(shard, spec, dtype), like


def _gather_backward(spec: PartitionSpec, dtype: Any, like: jax.Array | None, gradient: jax.Array):
    shard_gradient = reduce_scatter(spec, gradient)
    return (shard_gradient if like is None else shard_gradient.astype(like.dtype),)


gather.defvjp(_gather_forward, _gather_backward)
