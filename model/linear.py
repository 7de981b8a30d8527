"""The model's products of activations with weights: operands in the compute dtype, gradients of
weights summed in float32."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .frozen import FrozenWeight, Weight


def einsum_subscripts(equation: str) -> list[str]:
    """Returns the axes of x, of w and of the result in an einsum equation."""
    return equation.replace("->", ",").split(",")


def product(equation: str, x: Float[Array, ...], w: Weight, dtype: Any = None) -> Float[Array, ...]:
    """Returns the einsum of activations with a weight that is frozen or float32 by type; the
    latter's gradient is a float32 sum.

    Operands have x's dtype, in the backward pass too. The result too, unless `dtype` is given; sums
    are always float32.
    """
    if isinstance(w, FrozenWeight):
        return _frozen_product(equation, x, w, dtype)
    return _trained_product(equation, x, w, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _trained_product(equation, x, w, dtype):
    return jnp.einsum(equation, x, w.astype(x.dtype), preferred_element_type=dtype)


def _product_forward(equation, x, w, dtype):
    # A plain einsum: remat policies that keep products do not look into a call of
    # `_trained_product`.
    return jnp.einsum(equation, x, w.astype(x.dtype), preferred_element_type=dtype), (x, w)


def _product_backward(equation, _, residuals, dy):
    x, w = residuals
    dy = dy.astype(x.dtype)
    x_axes, w_axes, y_axes = einsum_subscripts(equation)
    dx = jnp.einsum(f"{y_axes},{w_axes}->{x_axes}", dy, w.astype(x.dtype))
    dw = jnp.einsum(f"{x_axes},{y_axes}->{w_axes}", x, dy, preferred_element_type=jnp.float32)
    return dx.astype(x.dtype), dw.astype(w.dtype)


_trained_product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _frozen_product(equation, x, w, dtype):
    return jnp.einsum(equation, x, w.dequantize(x.dtype), preferred_element_type=dtype)


def _frozen_forward(equation, x, w, dtype):
    # The weight is kept as stored, and the backward pass dequantizes it again; it needs only the
    # dtype of x.
    return jnp.einsum(equation, x, w.dequantize(x.dtype), preferred_element_type=dtype), (
        w,
        jnp.zeros(0, x.dtype),
    )


def _frozen_backward(equation, _, residuals, dy):
    w, like = residuals
    x_axes, w_axes, y_axes = einsum_subscripts(equation)
    return jnp.einsum(
        f"{y_axes},{w_axes}->{x_axes}", dy.astype(like.dtype), w.dequantize(like.dtype)
    ), None


_frozen_product.defvjp(_frozen_forward, _frozen_backward)
