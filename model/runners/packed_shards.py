"""A layer's shards packed into few arrays that can travel the sequence axis, and unpacked as the
layer's weights.

Every matrix has one axis along which storage is split, mostly the hidden one. With that axis first,
a rank's shards with equally long split axes are placed side by side as columns of one array, so
that one transfer carries them all. All ranks' packed arrays, stacked, are the whole matrices. Ranks
of `fsdp` gather theirs first, since they share what travels the sequence axis.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from model.sharding import storage_axes_of


@dataclasses.dataclass(frozen=True)
class PackedShards:
    """How the parameters of a layer are packed. R is the rows of a packed array (the length of the
    split axis in a shard), C its columns, F the ranks of `fsdp`, P those of `sequence`.

    Attributes:
      shapes: name -> shape of a rank's shard, for the parameters that travel.
      split_axes: name -> the axis that storage is split along.
      dtypes: name -> the dtype it is sent in; sums of gradients are float32.
      trained: the names of those with a gradient.
    """

    shapes: dict[str, tuple[int, ...]]
    split_axes: dict[str, int]
    fsdp: int
    sequence: int
    dtypes: dict[str, Any]
    trained: frozenset[str]

    @classmethod
    def of(
        cls,
        specs: dict[str, PartitionSpec],
        shapes: dict[str, tuple[int, ...]],
        sizes: dict[str, int],
        dtypes: dict[str, Any],
        trained: frozenset[str],
    ) -> PackedShards:
        """Returns how a layer is packed. Parameters not split over all ranks along one axis do not
        travel.

        Args:
          specs, shapes, dtypes: of a layer's parameters and their shards; sizes: of the mesh axes.
        """
        axes = ("fsdp", "sequence") if sizes["fsdp"] > 1 else ("sequence",)
        splits = {name: storage_axes_of(spec) for name, spec in specs.items()}
        split_axes = {
            name: split[0][0]
            for name, split in splits.items()
            if [mesh_axes for _, mesh_axes in split] == [axes]
        }
        return cls(
            {name: shapes[name] for name in split_axes},
            split_axes,
            sizes["fsdp"],
            sizes["sequence"],
            dtypes,
            trained,
        )

    @property
    def _arrays(self) -> list[list[str]]:
        """The names of the parameters in each packed array: those of one dtype with equally long
        split axes in a shard."""
        arrays: dict[Any, list[str]] = {}
        for name, shape in self.shapes.items():
            arrays.setdefault(
                (shape[self.split_axes[name]], jnp.dtype(self.dtypes[name])), []
            ).append(name)
        return list(arrays.values())

    @property
    def _gradient_arrays(self) -> list[list[str]]:
        """The names of the parameters in each packed array of gradients: the trained ones of
        `_arrays`."""
        trained = ([name for name in names if name in self.trained] for names in self._arrays)
        return [names for names in trained if names]

    def pack(self, shards: dict[str, jax.Array]) -> list[Float[Array, "F R C"]]:
        """Returns the packed arrays of shards."""
        packed = [
            self._columns({name: shards[name].astype(self.dtypes[name]) for name in names})
            for names in self._arrays
        ]
        return [lax.all_gather(x, "fsdp") if self.fsdp > 1 else x[None] for x in packed]

    def unpack(self, packed: list[Float[Array, "P F R C"]]) -> dict[str, jax.Array]:
        """Returns the whole weights from all ranks' packed arrays: trained ones float32 by type as
        in `sharding.gather`, the others in their stored dtype."""
        weights: dict[str, jax.Array] = {}
        for names, x in zip(self._arrays, packed, strict=True):
            weights |= self._cut(
                names, x.swapaxes(0, 1).reshape(-1, x.shape[-1]), self.fsdp * self.sequence
            )
        return {
            name: weight.astype(jnp.float32) if name in self.trained else weight
            for name, weight in weights.items()
        }

    def zero_gradients(self) -> list[Float[Array, "P F R C"]]:
        """Returns zeros of the shapes of `pack_gradients`."""
        ranks = self.fsdp * self.sequence
        whole = {
            name: jax.ShapeDtypeStruct(
                [n * ranks if i == self.split_axes[name] else n for i, n in enumerate(shape)],
                jnp.float32,
            )
            for name, shape in self.shapes.items()
        }
        return [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(self.pack_gradients, whole)]

    def pack_gradients(self, gradients: dict[str, jax.Array]) -> list[Float[Array, "P F R C"]]:
        """Returns this rank's partial sums for all ranks' packed arrays, from the float32 gradients
        of whole weights."""
        columns = [
            self._columns({name: gradients[name] for name in names})
            for names in self._gradient_arrays
        ]
        return [
            x.reshape(self.fsdp, self.sequence, -1, x.shape[-1]).swapaxes(0, 1) for x in columns
        ]

    def unpack_gradient(self, packed: list[Float[Array, "F R C"]]) -> dict[str, jax.Array]:
        """Returns the float32 gradients of the shards, from packed gradients summed over the
        sequence axis."""
        gradients: dict[str, jax.Array] = {}
        for names, x in zip(self._gradient_arrays, packed, strict=True):
            gradients |= self._cut(names, lax.psum_scatter(x, "fsdp") if self.fsdp > 1 else x[0], 1)
        return gradients

    def _columns(self, arrays: dict[str, jax.Array]) -> Float[Array, "R C"]:
        """The arrays side by side, each with its split axis first."""
        split_first = (jnp.moveaxis(x, self.split_axes[name], 0) for name, x in arrays.items())
        return jnp.concatenate([x.reshape(x.shape[0], -1) for x in split_first], 1)

    def _cut(
        self, names: list[str], columns: Float[Array, "R C"], ranks: int
    ) -> dict[str, jax.Array]:
        """The arrays that `_columns` placed side by side, from the shards of that many ranks."""
        start, arrays = 0, {}
        for name in names:
            axis, shape = self.split_axes[name], list(self.shapes[name])
            rows = shape.pop(axis) * ranks
            part = columns[:, start : start + math.prod(shape)].reshape(rows, *shape)
            start += math.prod(shape)
            arrays[name] = jnp.moveaxis(part, 0, axis)
        return arrays
