"""Quantized frozen weights: their declaration, creation, assembly from gathered parts, and
dequantization.

A weight [E, H, D] of a layer becomes arrays of the same axes, named after it: in NF4 `.codes` [E/2,
H, D] and `.absmax` [E/64, H, D], both uint8, and `.nested` [1 + S], float32; in int8 `.codes` [E,
H, D] and `.absmax` [1, H, D]. Blocks run along the last of a product's inputs. Shards of codes hold
whole blocks: an axis of blocks is split only if a mesh axis divides their number
(`Parameter.granularity`), otherwise another axis is. The few scales of the second quantization,
whose groups of 256 blocks would straddle shards, are replicated on each device: 4 bytes per 16,384
weights. In a mixture each expert's matrix is quantized separately; all parts have a leading axis of
experts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped, UInt8

from .codecs import (
    INT8_UNIT,
    NESTED_BLOCK,
    NF4_BLOCK,
    NF4_LEVELS,
    NF4_ZEROS,
    Int8Rows,
    Nf4,
    dynamic_levels,
    nested_count,
    quantize_int8,
    quantize_nf4,
)
from .frozen import FrozenWeight, part_of
from .sharding import HIDDEN, Parameter, mesh_axes_of

# The arrays of a weight, by the kind of quantization; NF4 has all of them.
QUANTIZED_PARTS = {"nf4": ("codes", "absmax", "nested"), "int8": ("codes", "absmax")}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Nf4Weight(FrozenWeight):
    """A weight in NF4 with decoded scales: [.., I/2, ..] codes and [.., I/64, ..] float32
    scales."""

    codes: UInt8[Array, ...]
    absmax: Float[Array, ...]
    axis: int = dataclasses.field(metadata={"static": True})
    """The axis that blocks run along."""

    def dequantize(self, dtype: Any) -> Float[Array, ...]:
        """See `FrozenWeight.dequantize`. The product of level and scale is rounded once, as
        bitsandbytes does.

        The TPU compiler materializes the interleaved pair of 4-bit values. With the barrier these
        are uint8 codes; without it they would be float32 levels, a full copy of the weight. The
        table of levels goes through the barrier too: a level known before the loop over layers
        would be broadcast there to the weight's shape, and kept for all layers.
        """
        axis, shape = self.axis, self.absmax.shape
        # A broadcast: CPU compilers turn a concatenation into a branch per element.
        shifts = jnp.array([4, 0], jnp.uint8).reshape(2, *[1] * (len(shape) - axis - 1))
        pairs = (jnp.expand_dims(self.codes, axis + 1) >> shifts) & 15
        blocks, table = lax.optimization_barrier(
            (
                pairs.reshape(*shape[: axis + 1], NF4_BLOCK, *shape[axis + 1 :]),
                jnp.asarray(NF4_LEVELS, jnp.float32),
            )
        )
        return (
            (_nf4_levels(blocks, table) * jnp.expand_dims(self.absmax, axis + 1))
            .astype(dtype)
            .reshape(*shape[:axis], shape[axis] * NF4_BLOCK, *shape[axis + 1 :])
        )

    def part(self, i: Any, count: int, axis: int) -> Nf4Weight:
        """See `FrozenWeight.part`."""
        return dataclasses.replace(
            self,
            codes=part_of(self.codes, i, count, axis),
            absmax=part_of(self.absmax, i, count, axis),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Weight(FrozenWeight):
    """A weight in int8: codes of its shape, and a float32 scale per output, whose input axes have
    size 1."""

    codes: Int[Array, ...]
    absmax: Float[Array, ...]

    def dequantize(self, dtype: Any) -> Float[Array, ...]:
        """See `FrozenWeight.dequantize`."""
        return (self.codes.astype(jnp.float32) * self.absmax * INT8_UNIT).astype(dtype)

    def part(self, i: Any, count: int, axis: int) -> Int8Weight:
        """See `FrozenWeight.part`."""
        absmax = (
            self.absmax if self.absmax.shape[axis] == 1 else part_of(self.absmax, i, count, axis)
        )
        return Int8Weight(part_of(self.codes, i, count, axis), absmax)


def _nf4_levels(codes: UInt8[Array, ...], table: Float[Array, "16"]) -> Float[Array, ...]:
    """The levels of codes from 0 to 15, chosen bit by bit: a table lookup is slow on a TPU, and not
    fused elsewhere."""
    levels = list(table)
    for bit in range(4):
        is_set = (codes & (1 << bit)) != 0
        levels = [
            jnp.where(is_set, odd, even)
            for even, odd in zip(levels[::2], levels[1::2], strict=True)
        ]
    return levels[0]


# Declaring


def input_axes(name: str) -> int:
    """Returns how many leading axes of a layer's projection are its inputs."""
    return 2 if "o_proj." in name else 1


def is_of_experts(name: str) -> bool:
    """Whether a layer's projection has a matrix per expert, along its first axis."""
    return ".experts." in name


def is_quantized(name: str) -> bool:
    """Whether the frozen weight of this name is quantized: the layers' projections are; adapters
    and parts of quantized weights are not.

    Args:
      name: as `model.parameter_declarations.declare` or `declare_layer` names it.
    """
    return name.endswith("_proj.weight")


def weight_of(name: str) -> str:
    """Returns the name of the weight that a parameter is part of; any other name unchanged."""
    weight, _, part = name.rpartition(".")
    return weight if is_quantized(weight) and part in QUANTIZED_PARTS["nf4"] else name


def weights_in(name: str, array: Any) -> int:
    """Returns how many of a model's weights an array stands for; none if it holds scales.

    Args:
      array: has a shape and a dtype.
    """
    if weight_of(name) == name:
        return math.prod(array.shape)
    return (
        math.prod(array.shape) * (2 if array.dtype == "uint8" else 1)
        if name.endswith(".codes")
        else 0
    )


def declare_parts(name: str, weight: Parameter, kind: str) -> dict[str, Parameter]:
    """Returns the quantized arrays of a layer's stacked weight [N, ...], by name."""
    inputs, first = input_axes(name), 1 + is_of_experts(name)
    shape, axes = weight.shape[first:], weight.axes[first:]

    def declared(shape, axes, dtype, granularity=()):
        return Parameter(
            (*weight.shape[:first], *shape),
            (*weight.axes[:first], *axes),
            dtype,
            frozen=True,
            granularity=granularity,
        )

    if kind == "int8":
        return {
            f"{name}.codes": declared(shape, axes, "int8"),
            f"{name}.absmax": declared(
                (*[1] * inputs, *shape[inputs:]), (*["unit"] * inputs, *axes[inputs:]), "float32"
            ),
        }
    blocks = [n // NF4_BLOCK if i == inputs - 1 else n for i, n in enumerate(shape)]
    pairs = [n // 2 if i == inputs - 1 else n for i, n in enumerate(shape)]
    granularity = (
        *[1] * first,
        *(NF4_BLOCK // 2 if i == inputs - 1 else 1 for i in range(len(shape))),
    )
    scales = nested_count(math.prod(shape[inputs:]), math.prod(shape[:inputs]))
    return {
        f"{name}.codes": declared(pairs, axes, "uint8", granularity),
        f"{name}.absmax": declared(blocks, axes, "uint8"),
        f"{name}.nested": declared((1 + scales,), ("unit",), "float32"),
    }


# Assembling, inside `shard_map`


def assemble(
    name: str,
    parts: Mapping[str, Array],
    own: Parameter,
    padded: Mapping[str, tuple[int, ...]],
    spec: PartitionSpec,
) -> FrozenWeight:
    """Returns a layer's weight from its gathered parts, all of this tensor rank, without the
    padding of its hidden axis.

    Runs inside `shard_map` if `spec` names `tensor`.

    Args:
      name: of the weight.
      parts: arrays by the last parts of their names (`QUANTIZED_PARTS`), without the axis of the
        layers.
      own: one layer's weight without padding, as in `declare_layer`.
      padded: the shapes of the same parts, by the same names, over all tensor ranks and with
        padding.
      spec: of one layer's codes.
    """
    if not is_of_experts(name):
        return _assemble(input_axes(name), parts, own, padded, spec)
    expert = dataclasses.replace(own, shape=own.shape[1:], axes=own.axes[1:])
    shapes = {part: shape[1:] for part, shape in padded.items()}
    weights = jax.vmap(
        lambda parts: _assemble(input_axes(name), parts, expert, shapes, PartitionSpec(*spec[1:]))
    )(dict(parts))
    if isinstance(weights, Nf4Weight):
        return dataclasses.replace(weights, axis=weights.axis + 1)
    return weights


def _assemble(
    inputs: int,
    parts: Mapping[str, Array],
    own: Parameter,
    padded: Mapping[str, tuple[int, ...]],
    spec: PartitionSpec,
) -> FrozenWeight:
    """`assemble` of one matrix, whose first `inputs` axes are inputs."""
    block = NF4_BLOCK if "nested" in parts else 1
    own_blocks = [n // block if i == inputs - 1 else n for i, n in enumerate(own.shape)]
    padded_blocks = [
        n * 2 // block if block > 1 and i == inputs - 1 else n
        for i, n in enumerate(padded["codes"])
    ]

    def trimmed(x):
        return x[
            tuple(
                slice(max(1, n * own_blocks[i] // padded_blocks[i]))
                if own.axes[i] in HIDDEN
                else slice(None)
                for i, n in enumerate(x.shape)
            )
        ]

    if block == 1:
        return Int8Weight(trimmed(parts["codes"]), trimmed(parts["absmax"]))
    codes, absmax, nested = parts["codes"], parts["absmax"], parts["nested"]
    # Scales are in the order of the matrix [outputs, inputs / 64] of bitsandbytes.
    scales = jnp.repeat(nested[1:], NESTED_BLOCK)[: math.prod(own_blocks)].reshape(
        *own_blocks[inputs:], *own_blocks[:inputs]
    )
    scales = jnp.moveaxis(scales, range(len(own_blocks) - inputs, len(own_blocks)), range(inputs))
    scales = jnp.pad(
        scales,
        [(0, after - before) for after, before in zip(padded_blocks, own_blocks, strict=True)],
    )
    for axis, entry in enumerate(spec):
        if "tensor" in mesh_axes_of(entry):
            scales = part_of(
                scales, lax.axis_index("tensor"), scales.shape[axis] // absmax.shape[axis], axis
            )
    return Nf4Weight(
        trimmed(codes), trimmed(_dequantize_absmax(absmax, scales, nested[0])), inputs - 1
    )


def _dequantize_absmax(
    codes: UInt8[Array, ...], scales: Float[Array, ...], offset: Float[Array, ""]
) -> Float[Array, ...]:
    product = jnp.asarray(dynamic_levels())[codes] * scales
    # Always true. Without a step in between, compilers would fuse product and sum into one
    # rounding; bitsandbytes rounds twice.
    return jnp.where(product == product, product, 0.0) + offset


# Making


def quantized(
    stored: Mapping[str, Any],
    kind: str,
    unpadded_shapes: Mapping[str, tuple[int, ...]],
    parameters: Mapping[str, Parameter],
    shardings: Mapping[str, Any],
) -> dict[str, jax.Array]:
    """Returns the parts of all quantized weights on their devices, reading and quantizing weights
    layer by layer.

    The host holds one layer's weight in float32, and the codes of one weight of all layers.

    Args:
      stored: the weights by name, stacked [N, ...]: arrays, or arrays on disk that are read when
        sliced; padded or not. If they have a method `quantized(layer)`, its result is used.
      unpadded_shapes: the weights', without padding.
      parameters, shardings: of all parameters in memory, by name.
    """
    arrays: dict[str, jax.Array] = {}
    for name, (count, *unpadded) in unpadded_shapes.items():
        layers = [
            quantize_layer(name, stored[name], i, tuple(unpadded), kind) for i in range(count)
        ]
        for part in QUANTIZED_PARTS[kind]:
            full = f"{name}.{part}"
            shape, dtype = parameters[full].shape, parameters[full].dtype
            fill = NF4_ZEROS if (part, kind) == ("codes", "nf4") else 0
            values = [_own_layout(name, layer, part, tuple(unpadded)) for layer in layers]
            arrays[full] = jax.make_array_from_callback(
                shape, shardings[full], _reader(values, shape, dtype, fill)
            )
            arrays[full].block_until_ready()
    return arrays


def quantize_layer(
    name: str, stored: Any, layer: int, own: tuple[int, ...], kind: str
) -> list[Nf4 | Int8Rows]:
    """Returns a layer's weight as quantized matrices [outputs, inputs]: one, or one per expert.

    Args:
      name: of the weight; stored: all layers of it, as in `quantized`.
      own: the layer's shape without padding.
    """
    if kind == "nf4" and hasattr(stored, "quantized"):
        return stored.quantized(layer)
    weight, inputs = np.asarray(stored[layer])[tuple(map(slice, own))], input_axes(name)
    matrices = [
        matrix.reshape(math.prod(matrix.shape[:inputs]), -1).T
        for matrix in (weight if is_of_experts(name) else weight[None])
    ]
    return list(map(quantize_nf4 if kind == "nf4" else quantize_int8, matrices))


def _own_layout(
    name: str, matrices: list[Nf4 | Int8Rows], part: str, own: tuple[int, ...]
) -> Shaped[np.ndarray, ...]:
    """A part of a layer's matrices with our axes; a view if there is one matrix."""
    if is_of_experts(name):
        return np.stack(
            [_part_in_own_layout(matrix, part, own[1:], input_axes(name)) for matrix in matrices]
        )
    return _part_in_own_layout(matrices[0], part, own, input_axes(name))


def _part_in_own_layout(
    matrix: Nf4 | Int8Rows, part: str, own: tuple[int, ...], inputs: int
) -> Shaped[np.ndarray, ...]:
    if part == "nested":
        assert isinstance(matrix, Nf4)
        return np.concatenate([[matrix.offset], matrix.nested])
    value = getattr(matrix, part)
    value = value.reshape(len(value), -1)
    per_input = math.prod(own[:inputs]) // value.shape[1]
    # A row's scale belongs to all inputs.
    input_shape = (
        [1] * inputs if value.shape[1] == 1 else [*own[: inputs - 1], own[inputs - 1] // per_input]
    )
    return value.T.reshape(*input_shape, *own[inputs:])


def _reader(
    layers: list[Shaped[np.ndarray, ...]], shape: tuple[int, ...], dtype: str, fill: int
) -> Callable[[Any], np.ndarray]:
    """Returns a callback for a part of the layers, stacked and padded with `fill`."""

    def read(index: Any) -> np.ndarray:
        bounds = [axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True)]
        part = np.full([stop - start for start, stop in bounds], fill, dtype)
        for i, layer in enumerate(range(*bounds[0])):
            value = layers[layer][tuple(slice(*bound) for bound in bounds[1:])]
            part[i][tuple(map(slice, value.shape))] = value
        return part

    return read


def quantized_names(names: Iterable[str]) -> list[str]:
    """Returns the names of the weights whose codes are in `names`."""
    return [weight_of(name) for name in names if name.endswith(".codes")]
