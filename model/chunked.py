"""Position-wise work done chunk by chunk: gather weights, run, and run again in the backward, with float32 dW.

The one place where sharded weights become whole and where the sequence is cut into chunks (blockwise feed-forward and
loss, after Liu and Abbeel's Blockwise Parallel Transformer). What is kept for the backward is the input alone. A cotangent has
its primal's dtype, so plain autodiff would add one bfloat16 dW per chunk (3.5% off after 128); here each chunk's dW is
a float32 product, their sum is float32, and so is the reduce-scatter over the devices.
"""
from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .sharding import gather, reduce_scatter


def largest_divisor(length: int, at_most: int | None) -> int:
    """The largest chunk that divides `length`; the whole length for None."""
    if at_most is None:
        return length
    return next(size for size in range(min(length, at_most), 0, -1) if length % size == 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """einsum of activations with a weight, in x's dtype; the weight's gradient is a float32 sum.

    `w` is float32 by type: its cast to x's dtype undoes the cast that `chunked` made, so that no bit is lost.
    """
    return jnp.einsum(equation, x, w.astype(x.dtype))


def _product_forward(equation, x, w):
    return product(equation, x, w), (x, w)


def _product_backward(equation, residuals, dy):
    x, w = residuals
    inputs, y_axes = equation.split("->")
    x_axes, w_axes = inputs.split(",")
    dx = jnp.einsum(f"{y_axes},{w_axes}->{x_axes}", dy, w.astype(x.dtype))
    dw = jnp.einsum(f"{x_axes},{y_axes}->{w_axes}", x, dy, preferred_element_type=jnp.float32)
    return dx.astype(x.dtype), dw.astype(w.dtype)


product.defvjp(_product_forward, _product_backward)


def _slice(tree, i, size):
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * size, size, 1), tree)


def _write(buffers, values, i, size):
    return jax.tree.map(lambda b, v: lax.dynamic_update_slice_in_dim(b, v, i * size, 1), buffers, values)


def _like(tree, length):
    """Buffers of the full length for a tree of one chunk's results."""
    return jax.tree.map(lambda x: jnp.zeros((x.shape[0], length, *x.shape[2:]), x.dtype), tree)


def chunked(fn: Callable, weights: dict, specs: dict, arrays: dict, labels: dict, *, dtype, chunk: int | None = None):
    """fn(weights, arrays, labels) over chunks of the sequence.

    Args:
      fn: position-wise; takes whole float32-typed weights, float arrays and integer labels of one chunk [B, c, ...],
        and gives a tree of arrays [B, c, ...]. It must close over no traced value.
      weights: this device's float32 shards; specs: their PartitionSpecs.
      arrays: differentiated, [B, T, ...]; labels: not differentiated, [B, T].
      dtype: what weights are sent and used in.
      chunk: tokens in a chunk at most (the largest divisor of T is taken); None does all at once.
    """
    length = jax.tree.leaves((arrays, labels))[0].shape[1]
    size = largest_divisor(length, chunk)

    def whole(weights):
        return {name: gather(weights[name], specs[name], dtype) for name in weights}

    def typed(full):
        return jax.tree.map(lambda w: w.astype(jnp.float32), full)

    @jax.custom_vjp
    def run(weights, arrays, labels):
        full = whole(weights)
        if size == length:
            return fn(typed(full), arrays, labels)

        def step(out, i):
            value = fn(typed(full), _slice(arrays, i, size), _slice(labels, i, size))
            return _write(out, value, i, size), None

        shape = jax.eval_shape(fn, typed(full), _slice(arrays, 0, size), _slice(labels, 0, size))
        return lax.scan(step, _like(shape, length), jnp.arange(length // size))[0]

    def forward(weights, arrays, labels):
        return run(weights, arrays, labels), (weights, arrays, labels)

    def backward(residuals, dy):
        weights, arrays, labels = residuals
        full = whole(weights)

        def pull(arrays, labels, dy):
            return jax.vjp(lambda w, a: fn(w, a, labels), typed(full), arrays)[1](dy)

        if size == length:
            dw, dx = pull(arrays, labels, dy)
        else:
            def step(carry, i):
                dw, dx = carry
                dw_here, dx_here = pull(*(_slice(x, i, size) for x in (arrays, labels, dy)))
                return (jax.tree.map(jnp.add, dw, dw_here), _write(dx, dx_here, i, size)), None

            zero = {name: jnp.zeros(w.shape, jnp.float32) for name, w in full.items()}
            (dw, dx), _ = lax.scan(step, (zero, jax.tree.map(jnp.zeros_like, arrays)), jnp.arange(length // size))
        return {name: reduce_scatter(dw[name], specs[name]) for name in dw}, dx, None

    run.defvjp(forward, backward)
    return run(weights, arrays, labels)
