"""The model's products of activations with weights: operands in the compute dtype, gradients of
weights summed in float32."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .frozen import FrozenWeight, Weight, array


def einsum_subscripts(equation: str) -> list[str]:
    """Returns the axes of x, of w and of the result in an einsum equation."""
    return equation.replace("->", ",").split(",")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def product(equation: str, x: Float[Array, ...], w: Weight, dtype: Any = None) -> Float[Array, ...]:
    """Returns the einsum of activations with a weight that is frozen or float32 by type; the
    latter's gradient is a float32 sum.

    Operands have x's dtype, in the backward pass too. The result too, unless `dtype` is given; sums
    are always float32.
    """
    return jnp.einsum(equation, x, array(w, x.dtype), preferred_element_type=dtype)


def _forward(equation, x, w, dtype):
    # A plain einsum: remat policies that keep products do not look into a call of `product`.
    y = jnp.einsum(equation, x, array(w, x.dtype), preferred_element_type=dtype)
    # A frozen weight is kept as stored, and has no gradient: of x only the dtype is needed.
    return y, (jnp.zeros(0, x.dtype) if isinstance(w, FrozenWeight) else x, w)


def _backward(equation, _, residuals, dy):
    x, w = residuals
    dy = dy.astype(x.dtype)
    x_axes, w_axes, y_axes = einsum_subscripts(equation)
    dx = jnp.einsum(f"{y_axes},{w_axes}->{x_axes}", dy, array(w, x.dtype))
    if isinstance(w, FrozenWeight):
        return dx, None
    dw = jnp.einsum(f"{x_axes},{y_axes}->{w_axes}", x, dy, preferred_element_type=jnp.float32)
    return dx, dw.astype(w.dtype)


product.defvjp(_forward, _backward)
