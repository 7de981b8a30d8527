"""The values passed between a model, a schedule and a kernel: a block of queries, a block of keys,
and their gradients."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from .coords import TokenCoords


class Queries(NamedTuple):
    """A block of queries.

    Attributes:
      q: the queries; Hq is a multiple of the keys' Hkv, and query head h attends to key head h //
        (Hq / Hkv).
      coords: the coordinates of their tokens, [B, Tq].
    """

    q: Float[Array, "B Tq Hq D"]
    coords: TokenCoords


class Keys(NamedTuple):
    """A block of keys and values.

    Attributes:
      k, v: keys and values; they are never expanded to Hq heads.
      coords: the coordinates of their tokens, [B, Tk].
    """

    k: Float[Array, "B Tk Hkv D"]
    v: Float[Array, "B Tk Hkv D"]
    coords: TokenCoords

    def stacked(self) -> StackedKeys:
        """The same block with K and V in one array, for a single transfer."""
        return StackedKeys(jnp.stack([self.k, self.v]), self.coords)


class StackedKeys(NamedTuple):
    """A block of keys and values as sent between ranks; kernels take it too, since cutting the
    stack would copy it.

    Attributes:
      kv: K and V stacked on a leading axis.
      coords: the coordinates of their tokens, [B, Tk].
    """

    kv: Float[Array, "2 B Tk Hkv D"]
    coords: TokenCoords

    def separate(self) -> Keys:
        """The same block with separate K and V."""
        k, v = self.kv
        return Keys(k, v, self.coords)


class BackwardInputs(NamedTuple):
    """The backward pass's inputs for a block besides queries and keys (FlashAttention-2, Algorithm
    2).

    Attributes:
      dout: the gradient of attention's output.
      lse: logarithm of the sum of exponentiated scores over *all* keys, merged over all blocks.
      delta: sum over D of dout * out, minus the gradient of lse, if any.
    """

    dout: Float[Array, "B Tq Hq D"]
    lse: Float[Array, "B Hq Tq"]
    delta: Float[Array, "B Hq Tq"]


class Gradients(NamedTuple):
    """The gradients of a block's queries, keys and values, float32 unless stated otherwise."""

    dq: Float[Array, "B Tq Hq D"]
    dk: Float[Array, "B Tk Hkv D"]
    dv: Float[Array, "B Tk Hkv D"]
