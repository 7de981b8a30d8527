"""The ranks of the sequence axis, or one line of them if a schedule divides the axis into a grid,
and their collectives."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A line of `size` ranks of a mesh axis. All lines of the axis run the same program side by
    side.

    Attributes:
      axis: name of the mesh axis.
      size: ranks in the line.
      stride: distance between neighbours of the line, in ranks of the axis.
      total: ranks of the whole axis; 0 if the line is the whole axis.
    """

    axis: str
    size: int
    stride: int = 1
    total: int = 0

    def split(self, inner: int) -> tuple[Ranks, Ranks]:
        """(outer, inner): inner lines of `inner` neighbours; outer lines join ranks of equal index
        in inner lines."""
        total = self.total or self.size
        return (
            Ranks(self.axis, self.size // inner, self.stride * inner, total),
            Ranks(self.axis, inner, self.stride, total),
        )

    def index(self) -> Int[Array, ""]:
        """This rank's index in its line."""
        return lax.axis_index(self.axis) // self.stride % self.size

    def groups(self) -> list[list[int]] | None:
        """All lines, as lists of ranks of the axis; None if there is only one."""
        total = self.total or self.size
        if self.size == total:
            return None
        starts = [rank for rank in range(total) if rank // self.stride % self.size == 0]
        return [[start + index * self.stride for index in range(self.size)] for start in starts]

    def shift(self, tree, by: int = 1, senders: Iterable[int] | None = None):
        """The tree of the rank `by` steps before this one on the ring; zeros if that rank does not
        send.

        Arrays of one shape and dtype share a permute, because only a few transfers can be in flight
        at a time.

        Args:
          senders: indices in the line of the ranks that send; all of them unless given.
        """
        senders = range(self.size) if senders is None else senders
        groups = self.groups() or [list(range(self.size))]
        pairs = [
            (line[index], line[(index + by) % self.size]) for line in groups for index in senders
        ]
        if not pairs:
            return jax.tree.map(jnp.zeros_like, tree)
        arrays, structure = jax.tree.flatten(tree)
        alike = collections.defaultdict(list)
        for number, x in enumerate(arrays):
            alike[x.shape, x.dtype].append(number)
        for numbers in alike.values():
            if len(numbers) == 1:
                arrays[numbers[0]] = lax.ppermute(arrays[numbers[0]], self.axis, pairs)
            else:
                received = lax.ppermute(
                    jnp.stack([arrays[number] for number in numbers]), self.axis, pairs
                )
                for number, x in zip(numbers, received, strict=True):
                    arrays[number] = x
        return jax.tree.unflatten(structure, arrays)

    def gather(self, tree, dimension: int):
        """All-gather over the line: every array of the tree, concatenated along `dimension`."""
        return jax.tree.map(
            lambda x: lax.all_gather(
                x, self.axis, axis=dimension, tiled=True, axis_index_groups=self.groups()
            ),
            tree,
        )

    def exchange(self, x: Array, split: int, concat: int) -> Array:
        """All-to-all over the line: `x` is split along one dimension, and the received parts are
        concatenated along the other."""
        return lax.all_to_all(
            x, self.axis, split, concat, tiled=True, axis_index_groups=self.groups()
        )

    def reduce_scatter(self, tree, dimension: int):
        """The sum over the line of every array of the tree; each rank gets its part along
        `dimension`.

        Each rank's part is made one row: otherwise the TPU compiler pads the parts, or sums all of
        them on every rank.
        """

        def scatter(x):
            parts = x.reshape(*x.shape[:dimension], self.size, -1, *x.shape[dimension + 1 :])
            parts = jnp.moveaxis(parts, dimension, 0)
            part = lax.psum_scatter(
                parts.reshape(self.size, -1, parts.shape[-1]),
                self.axis,
                axis_index_groups=self.groups(),
            )
            return part.reshape(parts.shape[1:])

        return jax.tree.map(scatter, tree)
