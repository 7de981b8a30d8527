"""A layer's shards as a parcel that can travel the sequence axis, and all ranks' parcels as the layer's weights.

Every matrix has one axis that storage is split along, mostly the hidden one. With that axis first, a rank's shards of one
length stand side by side as columns of one array, so that one transfer carries them all, and the ranks' parcels, one under the
other, are the whole matrices. Ranks of `fsdp` gather theirs before a parcel leaves: what goes round is what they share.
"""
from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from model.sharding import storage_axes_of


@dataclasses.dataclass(frozen=True)
class Parcels:
    """How the parameters of a layer are packed.

    Attributes:
      shapes: name -> shape of a rank's shard, of those that travel.
      places: name -> the axis that is split.
      fsdp, sequence: how many ranks have shards.
      dtype: in which weights travel; sums of gradients are float32.
    """

    shapes: dict[str, tuple[int, ...]]
    places: dict[str, int]
    fsdp: int
    sequence: int
    dtype: object

    @classmethod
    def of(cls, specs: dict[str, PartitionSpec], shapes: dict[str, tuple[int, ...]], fsdp: int, sequence: int, dtype):
        """Of a layer's specs and shards; those that are not split over all ranks along one axis stay behind."""
        axes = ("fsdp", "sequence") if fsdp > 1 else ("sequence",)
        split = {name: storage_axes_of(spec) for name, spec in specs.items()}
        places = {name: found[0][0] for name, found in split.items() if [over for _, over in found] == [axes]}
        return cls({name: shapes[name] for name in places}, places, fsdp, sequence, dtype)

    @property
    def _groups(self) -> dict[int, list[str]]:
        """length of the split axis in a shard -> names."""
        groups = {}
        for name, shape in self.shapes.items():
            groups.setdefault(shape[self.places[name]], []).append(name)
        return groups

    def pack(self, shards: dict) -> list[jax.Array]:
        """name -> float32 shard, to a parcel: arrays [fsdp, rows, columns] in `dtype`."""
        parcel = [self._columns({name: shards[name].astype(self.dtype) for name in names}) for names in self._groups.values()]
        return [lax.all_gather(x, "fsdp") if self.fsdp > 1 else x[None] for x in parcel]

    def unpack(self, parcels: list[jax.Array]) -> dict:
        """All ranks' parcels [sequence, fsdp, rows, columns] -> name -> whole weight, float32 by type as by `gather`."""
        found = {}
        for names, x in zip(self._groups.values(), parcels, strict=True):
            found |= self._cut(names, x.swapaxes(0, 1).reshape(-1, x.shape[-1]), self.fsdp * self.sequence)
        return {name: w.astype(jnp.float32) for name, w in found.items()}

    def pack_gradients(self, gradients: dict) -> list[jax.Array]:
        """name -> float32 gradient of the whole weight, to this rank's shares of all ranks' parcels."""
        shares = [self._columns({name: gradients[name] for name in names}) for names in self._groups.values()]
        return [x.reshape(self.fsdp, self.sequence, -1, x.shape[-1]).swapaxes(0, 1) for x in shares]

    def unpack_gradient(self, parcel: list[jax.Array]) -> dict:
        """The sum over the sequence axis of a parcel's shares -> name -> gradient of the shard, float32."""
        found = {}
        for names, x in zip(self._groups.values(), parcel, strict=True):
            found |= self._cut(names, lax.psum_scatter(x, "fsdp") if self.fsdp > 1 else x[0], 1)
        return found

    def _columns(self, arrays: dict) -> jax.Array:
        """Arrays side by side, the split axis first: [rows, columns]."""
        first = (jnp.moveaxis(x, self.places[name], 0) for name, x in arrays.items())
        return jnp.concatenate([x.reshape(x.shape[0], -1) for x in first], 1)

    def _cut(self, names: list[str], columns: jax.Array, ranks: int) -> dict:
        """What stands side by side, as it was; of so many ranks' shards."""
        start, found = 0, {}
        for name in names:
            place, shape = self.places[name], list(self.shapes[name])
            rows = shape.pop(place) * ranks
            part = columns[:, start:start + math.prod(shape)].reshape(rows, *shape)
            start += math.prod(shape)
            found[name] = jnp.moveaxis(part, 0, place)
        return found
