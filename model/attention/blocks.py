"""The values that pass between a model, a schedule and a kernel: a block of queries, a block of
keys, and their gradients."""

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
        """The same block with K and V in one array, which one transfer can send."""
        return StackedKeys(jnp.stack([self.k, self.v]), self.coords)


class StackedKeys(NamedTuple):
    """A block of keys and values as it travels between ranks, and as kernels take it then: cutting
    the stack would copy it.

    Attributes:
      kv: K and V stacked on a leading axis.
      coords: the coordinates of their tokens, [B, Tk].
    """

    kv: Float[Array, "2 B Tk Hkv D"]
    coords: TokenCoords

    def separate(self) -> Keys:
        """The same block with K and V apart."""
        k, v = self.kv
        return Keys(k, v, self.coords)


class BackwardInputs(NamedTuple):
    """What the backward pass of a block reads besides the queries and keys (FlashAttention-2,
    Algorithm 2).

    Attributes:
      dout: the gradient of attention's output.
      lse: logarithm of the sum of exponentiated scores over *all* keys, merged over all blocks.
      delta: sum over D of dout * out, minus the gradient of lse where there is one.
    """

    dout: Float[Array, "B Tq Hq D"]
    lse: Float[Array, "B Hq Tq"]
    delta: Float[Array, "B Hq Tq"]


class Gradients(NamedTuple):
    """The gradients of a block's queries, keys and values, float32 unless said otherwise."""

    dq: Float[Array, "B Tq Hq D"]
    dk: Float[Array, "B Tk Hkv D"]
    dv: Float[Array, "B Tk Hkv D"]
