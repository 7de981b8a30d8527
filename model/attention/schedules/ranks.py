"""Ranks: the shards of the sequence axis, or one line of them where a schedule splits the axis in two."""
from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Ranks:
    """`size` ranks of the mesh axis `axis`, `stride` apart; all `total` ranks of the axis form such lines side by side.

    Every rank runs the same program: what is said of "the line" happens in each line at once.
    """

    axis: str
    size: int
    stride: int = 1
    total: int = 0  # 0: this line is the whole axis

    def split(self, inner: int) -> tuple[Ranks, Ranks]:
        """(outer, inner) lines: neighbours form lines of `inner` ranks; the outer ones join ranks of one place in these."""
        total = self.total or self.size
        return (Ranks(self.axis, self.size // inner, self.stride * inner, total), Ranks(self.axis, inner, self.stride, total))

    def index(self) -> jax.Array:
        """This rank's place in its line: int32 scalar."""
        return lax.axis_index(self.axis) // self.stride % self.size

    def groups(self) -> list[list[int]] | None:
        """The lines, as lists of ranks of the axis; None where there is but one."""
        total = self.total or self.size
        if self.size == total:
            return None
        starts = [rank for rank in range(total) if rank // self.stride % self.size == 0]
        return [[start + place * self.stride for place in range(self.size)] for start in starts]

    def shift(self, tree, by: int = 1, senders: Iterable[int] | None = None):
        """Every array of the tree from the rank `by` places before, round the ring; zeros where that one sends nothing.

        Arrays of one shape and type go in one permute: only so many transfers can be under way at once.
        senders: the places in the line that send (all of them unless given).
        """
        senders = range(self.size) if senders is None else senders
        groups = self.groups() or [list(range(self.size))]
        pairs = [(line[place], line[(place + by) % self.size]) for line in groups for place in senders]
        if not pairs:
            return jax.tree.map(jnp.zeros_like, tree)
        arrays, structure = jax.tree.flatten(tree)
        alike = collections.defaultdict(list)
        for place, x in enumerate(arrays):
            alike[x.shape, x.dtype].append(place)
        for places in alike.values():
            if len(places) == 1:
                arrays[places[0]] = lax.ppermute(arrays[places[0]], self.axis, pairs)
            else:
                sent = lax.ppermute(jnp.stack([arrays[place] for place in places]), self.axis, pairs)
                for place, x in zip(places, sent, strict=True):
                    arrays[place] = x
        return structure.unflatten(arrays)

    def gather(self, tree, dimension: int):
        """Every array of the tree of all ranks of the line, joined along `dimension`."""
        return jax.tree.map(
            lambda x: lax.all_gather(x, self.axis, axis=dimension, tiled=True, axis_index_groups=self.groups()), tree)

    def exchange(self, x: jax.Array, split: int, join: int) -> jax.Array:
        """All-to-all: dimension `split` is dealt out over the line, what arrives is joined along `join`."""
        return lax.all_to_all(x, self.axis, split, join, tiled=True, axis_index_groups=self.groups())

    def reduce_scatter(self, tree, dimension: int):
        """The sum over the line of every array of the tree, of which each rank gets its part of `dimension`.

        Each rank's part is made one row: else the TPU's compiler pads the parts, or adds up all of them everywhere.
        """
        def scatter(x):
            parts = x.reshape(*x.shape[:dimension], self.size, -1, *x.shape[dimension + 1:])
            parts = jnp.moveaxis(parts, dimension, 0)
            part = lax.psum_scatter(parts.reshape(self.size, -1, parts.shape[-1]), self.axis, axis_index_groups=self.groups())
            return part.reshape(parts.shape[1:])

        return jax.tree.map(scatter, tree)
