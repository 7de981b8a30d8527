"""Position-wise work done chunk by chunk: run, and run again in the backward, with float32 dW.

The one place where the sequence is cut into chunks (blockwise feed-forward and loss, after Liu and Abbeel's Blockwise
Parallel Transformer). What is kept for the backward is the input alone. A cotangent has its primal's dtype, so plain autodiff
would add one bfloat16 dW per chunk (3.5% off after 128); here each chunk's dW is a float32 product, and so is their sum.

Weights are float32 *by type*: `sharding.gather` sent them in the compute precision, and every cast back to it is exact.
"""
from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from model.attention.kernels.padding import tile_size


def _chunk_size(length: int, at_most: int) -> int:
    """Tokens in a chunk: a divisor of the length where there is one not much below `at_most`; all of them for 0."""
    return tile_size(length, at_most) if at_most else length


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def product(equation: str, x: jax.Array, w: jax.Array, dtype=None) -> jax.Array:
    """einsum of activations with a weight that is float32 by type; the weight's gradient is a float32 sum.

    Operands have x's dtype, backward too; so has the result, unless `dtype` asks for more of the sums' own float32.
    """
    return jnp.einsum(equation, x, w.astype(x.dtype), preferred_element_type=dtype)


def _product_forward(equation, x, w, dtype):
    return product(equation, x, w, dtype), (x, w)


def _product_backward(equation, _, residuals, dy):
    x, w = residuals
    dy = dy.astype(x.dtype)
    inputs, y_axes = equation.split("->")
    x_axes, w_axes = inputs.split(",")
    dx = jnp.einsum(f"{y_axes},{w_axes}->{x_axes}", dy, w.astype(x.dtype))
    dw = jnp.einsum(f"{x_axes},{y_axes}->{w_axes}", x, dy, preferred_element_type=jnp.float32)
    return dx.astype(x.dtype), dw.astype(w.dtype)


product.defvjp(_product_forward, _product_backward)


def _slice(tree, start, size):
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, 1), tree)


def over_chunks(step: Callable, carry, arrays, size: int):
    """`step(carry, chunk of arrays) -> (carry, results)` over all chunks, one after the other: the last carry, and the results
    joined along the length. The last chunk is shorter where `size` does not divide the length.

    A result is written over the last of `arrays` that has its shape and type, chunk by chunk: it needs memory of its own only
    where that array is still needed behind the loop.
    """
    leaves, structure = jax.tree.flatten(arrays)
    length = leaves[0].shape[1]
    if size == length:
        return step(carry, arrays)
    joined, results = jax.tree.flatten(jax.eval_shape(step, carry, _slice(arrays, 0, size))[1])
    free = list(reversed(range(len(leaves))))
    places = []  # for each result the number of its array; what finds none has a new one behind the others
    for result in joined:
        shape = (result.shape[0], length, *result.shape[2:])
        place = next((i for i in free if (leaves[i].shape, leaves[i].dtype) == (shape, result.dtype)), None)
        if place is None:
            place = len(leaves)
            leaves.append(jnp.zeros(shape, result.dtype))
        else:
            free.remove(place)
        places.append(place)

    def one(state, start, size):
        carry, leaves = state
        # Behind the barrier a chunk is read once, before its place is written: no copy of the whole array is needed.
        part = lax.optimization_barrier(_slice(leaves[:structure.num_leaves], start, size))
        carry, found = step(carry, jax.tree.unflatten(structure, part))
        for place, value in zip(places, jax.tree.leaves(found), strict=True):
            leaves[place] = lax.dynamic_update_slice_in_dim(leaves[place], value, start, 1)
        return carry, leaves

    whole, rest = divmod(length, size)
    state = lax.scan(lambda state, i: (one(state, i * size, size), None), (carry, leaves), jnp.arange(whole))[0]
    carry, leaves = one(state, whole * size, rest) if rest else state
    return carry, jax.tree.unflatten(results, [leaves[place] for place in places])


def _sum_over_chunks(step: Callable, arrays, size: int):
    """`step(chunk of arrays) -> (summands, results)` over all chunks: the sums, and the results as of `over_chunks`."""
    if size == jax.tree.leaves(arrays)[0].shape[1]:
        return step(arrays)

    def add(sums, part):
        more, found = step(part)
        return jax.tree.map(jnp.add, sums, more), found

    sums = jax.eval_shape(step, _slice(arrays, 0, size))[0]
    return over_chunks(add, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums), arrays, size)


def cast(weights: dict, dtype) -> dict:
    """Cast to the compute precision *outside* a loop over chunks and back inside it, the loop reads the narrow ones."""
    return {name: w.astype(dtype) for name, w in weights.items()}


def chunked(fn: Callable, weights: dict, arrays: dict, labels: dict, *, dtype, chunk: int = 0,
            through: str | None = None):
    """fn(weights, arrays, labels) over chunks of the sequence.

    Args:
      fn: position-wise; takes weights, float arrays and integer labels of one chunk [B, c, ...],
        and gives a tree of arrays [B, c, ...]. It must close over no traced value.
      weights: whole, float32 by type.
      arrays: differentiated, [B, T, ...]; labels: not differentiated, [B, T].
      dtype: compute precision, which the weights' values have.
      chunk: most tokens in a chunk; 0 computes all at once.
      through: one of `arrays` that is given back as it is, before fn's results: the gradient that comes in for it has fn's
        share added where it lies, and a second array of its length is never there.
    """
    size = _chunk_size(jax.tree.leaves((arrays, labels))[0].shape[1], chunk)

    @jax.custom_vjp
    def run(weights, arrays, labels):
        narrow = cast(weights, dtype)
        y = _sum_over_chunks(lambda part: ((), fn(cast(narrow, jnp.float32), *part)), (arrays, labels), size)[1]
        return (arrays[through], *y) if through else y

    def forward(weights, arrays, labels):
        return run(weights, arrays, labels), (cast(weights, dtype), arrays, labels)

    def backward(residuals, dy):
        narrow, arrays, labels = residuals

        def step(part):
            arrays, labels, dy = part
            passed, dy = (dy[0], dy[1:]) if through else (None, dy)
            dw, dx = jax.vjp(lambda w, a: fn(w, a, labels), cast(narrow, jnp.float32), arrays)[1](dy)
            return dw, {**dx, through: passed + dx[through]} if through else dx

        return *_sum_over_chunks(step, (arrays, labels, dy), size), None

    run.defvjp(forward, backward)
    return run(weights, arrays, labels)


def chunked_total(fn: Callable, weights: dict, arrays: dict, labels: dict, shares: jax.Array, *, dtype,
                  chunk: int = 0):
    """The sum of fn(weights, arrays, labels) * shares over all tokens, and fn's values: float32 scalar and [B, T].

    The gradient is taken in the forward pass, chunk by chunk, where the values are at hand: the backward only scales it by the
    sum's cotangent, and nothing is run again. The values are for looking at: no gradient passes through them.

    Args:
      fn: position-wise, gives float32 [B, c]; else as for `chunked`.
      shares: float32 [B, T], not differentiated.
    """
    size = _chunk_size(shares.shape[1], chunk)

    def total(weights, arrays, labels, shares):
        values = fn(weights, arrays, labels)
        return jnp.sum(values * shares), lax.stop_gradient(values)

    @jax.custom_vjp
    def run(weights, arrays, labels, shares):
        narrow = cast(weights, dtype)
        return _sum_over_chunks(lambda part: total(cast(narrow, jnp.float32), *part), (arrays, labels, shares), size)

    def forward(weights, arrays, labels, shares):
        narrow = cast(weights, dtype)

        def step(part):
            arrays, *rest = part
            value, pull, values = jax.vjp(lambda w, a: total(w, a, *rest), cast(narrow, jnp.float32), arrays, has_aux=True)
            dw, dx = pull(jnp.ones_like(value))
            return (value, dw), (values, dx)

        (value, dw), (values, dx) = _sum_over_chunks(step, (arrays, labels, shares), size)
        return (value, values), (dw, dx)

    def backward(residuals, cotangents):
        dw, dx = jax.tree.map(lambda x: (x * cotangents[0]).astype(x.dtype), residuals)
        return dw, dx, None, None

    run.defvjp(forward, backward)
    return run(weights, arrays, labels, shares)
