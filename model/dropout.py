"""Dropout of adapters' inputs. Its mask is a hash that identifies each element: the same on every
mesh, in every layout, with every memory option, and after a resume. Nothing is drawn and no mask is
kept; the backward pass recomputes it.

Each element has a 32-bit number, from the seed, the step, the row, the token's index in the row,
the layer, the projection and the feature; it is kept if that number is at least the rate times
2^32. Each of these is folded in by adding its product with an odd constant and applying
MurmurHash3's finalizer (Appleby), a bijection on 32 bits.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

# Weyl's constant for 32 bits, 2^32 divided by the golden ratio, and odd.
_WEYL = 0x9E3779B9


class TokenInfo(NamedTuple):
    """What a layer reads about its tokens besides hidden states and the attention mask's
    coordinates.

    Attributes:
      positions: RoPE's.
      dropout: each token's number for the masks, from `token_keys`; None outside training and
        without dropout.
      real: whether a token is not padding; None if no layer needs it.
    """

    positions: Int[Array, "B T"]
    dropout: UInt32[Array, "B T"] | None = None
    real: Bool[Array, "B T"] | None = None

    @property
    def without_positions(self) -> TokenInfo:
        """The same without positions, for the part after attention."""
        return self._replace(positions=None)  # type: ignore[arg-type]

    def from_layer(self, first: int) -> TokenInfo:
        """Returns the same for a stack of layers whose first has this number: within it, `of_layer`
        counts from 0."""
        if self.dropout is None or not first:
            return self
        return self._replace(dropout=self.dropout + jnp.uint32(first * _WEYL % 2**32))

    def of_layer(self, layer: Any) -> TokenInfo:
        """Returns the same within the layer of this number."""
        return self if self.dropout is None else self._replace(dropout=_mix(self.dropout, layer))


def _mix(key: jax.Array, number: Any) -> jax.Array:
    """Returns new keys, uint32, from keys and a number each; for a given number the map is
    injective."""
    x = key + jnp.asarray(number).astype(jnp.uint32) * jnp.uint32(_WEYL)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def token_keys(seed: int, step: Int[Array, ""], index: Int[Array, "B L"]) -> UInt32[Array, "B L"]:
    """Returns the number of each token in a global batch.

    Args:
      seed: taken modulo 2^32; step: number of finished steps.
      index: the tokens' indices in their rows; rows are numbered by their order in the batch.
    """
    key = _mix(_mix(jnp.uint32(_WEYL), np.uint32(seed % 2**32)), step)
    return _mix(_mix(key, jnp.arange(index.shape[0])[:, None]), index)


def zero_dropped(
    x: Float[Array, "B T *F"],
    keys: UInt32[Array, "B T"],
    rate: float,
    projection: int,
    first: Any = 0,
) -> Float[Array, "B T *F"]:
    """Returns x with dropped elements as zeros; the others are not scaled.

    Args:
      keys: the tokens', within the layer.
      rate: the probability of being dropped.
      projection: the number of the projection that reads x; masks differ between projections.
      first: the number of the first feature, if x has only part of them.
    """
    return _zero_dropped(x, _mix(keys, projection), jnp.asarray(first, jnp.uint32), rate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _zero_dropped(x, keys, first, rate):
    features = first + jnp.arange(math.prod(x.shape[2:]), dtype=jnp.uint32)
    numbers = _mix(keys[..., None], features).reshape(x.shape)
    return jnp.where(numbers >= jnp.uint32(round(rate * 2**32)), x, jnp.zeros((), x.dtype))


_zero_dropped.defvjp(
    lambda x, keys, first, rate: (_zero_dropped(x, keys, first, rate), (keys, first)),
    lambda rate, residuals, dy: (_zero_dropped(dy, *residuals, rate), None, None),
)
