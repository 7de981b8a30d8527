"""Position-wise work in chunks, recomputed in the backward pass, with float32 dW.

The one place where the sequence is cut into chunks of tokens: the feed-forward and the loss of
Blockwise Parallel Transformer (Liu and Abbeel) and of Ring Attention (Algorithm 1). Only the input
is kept for the backward pass. A cotangent has its primal's dtype, so plain differentiation would
add one bfloat16 dW per chunk (3.5% off after 128); here each chunk's dW and their sum are float32.

Weights are float32 *by type*: `sharding.gather` sent them in the compute dtype, and every cast back
to it is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from model.attention.kernels.padding import tile_size
from model.frozen import FrozenWeight, Weight, split

# A tree of arrays [B, T, ...].
Arrays = Any


def _chunk_size(length: int, at_most: int) -> int:
    """Tokens per chunk: a divisor of the length if there is one not much below `at_most`; all for
    0."""
    return tile_size(length, at_most) if at_most else length


def _slice(tree: Any, start: Any, size: int) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, 1), tree)


def over_chunks(step: Callable, carry: Any, arrays: Any, size: int) -> tuple[Any, Any]:
    """Runs `step(carry, chunk of arrays) -> (carry, results)` over all chunks, one after the other.

    Returns the last carry, and the results joined along the length. The last chunk is shorter if
    `size` does not divide the length. A result overwrites the last of `arrays` with its shape and
    dtype, chunk by chunk: it needs extra memory only if that array is still needed after the loop.

    Args:
      arrays: a tree of arrays [B, T, ...]; size: tokens in a chunk.
    """
    leaves, structure = jax.tree.flatten(arrays)
    length = leaves[0].shape[1]
    if size == length:
        return step(carry, arrays)
    results, results_structure = jax.tree.flatten(
        jax.eval_shape(step, carry, _slice(arrays, 0, size))[1]
    )
    buffers = _buffers(
        leaves, [jax.ShapeDtypeStruct((x.shape[0], length, *x.shape[2:]), x.dtype) for x in results]
    )

    def run_chunk(state, start, size):
        carry, leaves = state
        # After the barrier a chunk is read once, before its buffer is overwritten, so the whole
        # array need not be copied.
        chunk = lax.optimization_barrier(_slice(leaves[: structure.num_leaves], start, size))
        carry, results = step(carry, jax.tree.unflatten(structure, chunk))
        for index, value in zip(buffers, jax.tree.leaves(results), strict=True):
            leaves[index] = lax.dynamic_update_slice_in_dim(leaves[index], value, start, 1)
        return carry, leaves

    count, rest = divmod(length, size)
    state = lax.scan(
        lambda state, i: (run_chunk(state, i * size, size), None),
        (carry, leaves),
        jnp.arange(count),
    )[0]
    carry, leaves = run_chunk(state, count * size, rest) if rest else state
    return carry, jax.tree.unflatten(results_structure, [leaves[index] for index in buffers])


def _buffers(leaves: list[jax.Array], results: list[jax.ShapeDtypeStruct]) -> list[int]:
    """For each result, the index of the leaf it overwrites. Appends a new leaf if none has its
    shape and dtype."""
    free = list(reversed(range(len(leaves))))
    buffers = []
    for result in results:
        index = next(
            (i for i in free if (leaves[i].shape, leaves[i].dtype) == (result.shape, result.dtype)),
            None,
        )
        if index is None:
            index = len(leaves)
            leaves.append(jnp.zeros(result.shape, result.dtype))
        else:
            free.remove(index)
        buffers.append(index)
    return buffers


def _sum_over_chunks(step: Callable, arrays: Any, size: int) -> tuple[Any, Any]:
    """Runs `step(chunk of arrays) -> (partial_sums, results)` over all chunks: the sums, and the
    results as in `over_chunks`."""
    if size == jax.tree.leaves(arrays)[0].shape[1]:
        return step(arrays)

    def add(sums, chunk):
        partial_sums, results = step(chunk)
        return jax.tree.map(jnp.add, sums, partial_sums), results

    sums = jax.eval_shape(step, _slice(arrays, 0, size))[0]
    return over_chunks(add, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums), arrays, size)


def cast(weights: Mapping[str, Weight], dtype: Any) -> dict[str, Weight]:
    """Returns the weights in another dtype, frozen ones unchanged. Cast to the compute dtype before
    a loop and back to float32 inside it, so that the loop reads bfloat16."""
    return {
        name: w if isinstance(w, FrozenWeight) else w.astype(dtype) for name, w in weights.items()
    }


def vjp(
    fn: Callable, weights: Mapping[str, Weight], *arrays: Any, has_aux: bool = False
) -> tuple[Any, ...]:
    """Returns `jax.vjp(fn, weights, *arrays)`, with gradient None for frozen weights."""
    trained, frozen = split(weights)

    def run(trained, *arrays):
        result = fn({**trained, **frozen}, *arrays)
        return result if has_aux else (result, None)

    result, pull, aux = jax.vjp(run, trained, *arrays, has_aux=True)

    def pull_all(cotangent):
        dw, *dx = pull(cotangent)
        return {name: dw.get(name) for name in weights}, *dx

    return (result, pull_all, aux) if has_aux else (result, pull_all)


def chunked(
    fn: Callable,
    weights: Mapping[str, Weight],
    arrays: Arrays,
    constants: Arrays,
    *,
    dtype: Any,
    chunk: int = 0,
) -> Any:
    """Returns fn(weights, arrays, constants), a tree of arrays [B, T, ...], computed in chunks of
    the sequence.

    All arguments are as in `chunked_with_sums`, except that fn returns no sums.
    """
    return chunked_with_sums(
        lambda *part: ((), fn(*part)), weights, arrays, constants, dtype=dtype, chunk=chunk
    )[1]


def chunked_with_sums(
    fn: Callable,
    weights: Mapping[str, Weight],
    arrays: Arrays,
    constants: Arrays,
    *,
    dtype: Any,
    chunk: int = 0,
) -> tuple[Any, Any]:
    """Returns fn(weights, arrays, constants), computed in chunks of the sequence: its sums over all
    tokens, and its results.

    Args:
      fn: position-wise; takes weights, float arrays and constants of one chunk [B, c, ...], and
        returns a tree of float32 sums over the chunk's tokens and a tree of arrays [B, c, ...]. It
        must close over no traced value.
      weights: whole, float32 by type, or frozen.
      arrays: differentiated, [B, T, ...]; constants: arrays [B, T, ...] of any dtype, without
        gradient.
      dtype: the compute dtype, in which the weights' values are exact.
      chunk: most tokens in a chunk; 0 computes all at once.
    """
    size = _chunk_size(jax.tree.leaves((arrays, constants))[0].shape[1], chunk)

    @jax.custom_vjp
    def run(weights, arrays, constants):
        cast_weights = cast(weights, dtype)
        return _sum_over_chunks(
            lambda part: fn(cast(cast_weights, jnp.float32), *part), (arrays, constants), size
        )

    def forward(weights, arrays, constants):
        return run(weights, arrays, constants), (cast(weights, dtype), arrays, constants)

    def backward(residuals, cotangents):
        cast_weights, arrays, constants = residuals
        d_sums, dy = cotangents

        def step(part):
            arrays, constants, dy = part
            return vjp(lambda w, a: fn(w, a, constants), cast(cast_weights, jnp.float32), arrays)[
                1
            ]((d_sums, dy))

        return *_sum_over_chunks(step, (arrays, constants, dy), size), None

    run.defvjp(forward, backward)
    return run(weights, arrays, constants)


def passed_through(
    fn: Callable,
    weights: Mapping[str, Weight],
    x: Float[Array, "B T E"],
    constants: Arrays,
    *,
    dtype: Any,
    chunk: int = 0,
) -> tuple[Float[Array, "B T E"], Any]:
    """Returns x unchanged, and fn(weights, x, constants), computed in chunks of the sequence.

    Later readers of x must use the returned one: fn's share is then added in place to x's incoming
    gradient, and a second array of that length never exists. All arguments are as in `chunked`.
    """
    size = _chunk_size(x.shape[1], chunk)

    @jax.custom_vjp
    def run(weights, x, constants):
        return x, chunked(fn, weights, x, constants, dtype=dtype, chunk=chunk)

    def forward(weights, x, constants):
        return run(weights, x, constants), (cast(weights, dtype), x, constants)

    def backward(residuals, cotangents):
        cast_weights, x, constants = residuals

        def step(part):
            x, constants, (dx, dy) = part
            dw, share = vjp(lambda w, x: fn(w, x, constants), cast(cast_weights, jnp.float32), x)[
                1
            ](dy)
            return dw, dx + share

        return *_sum_over_chunks(step, (x, constants, cotangents), size), None

    run.defvjp(forward, backward)
    return run(weights, x, constants)


def chunked_total(
    fn: Callable,
    weights: Mapping[str, Weight],
    arrays: Arrays,
    constants: Arrays,
    loss_weights: Float[Array, "B T"],
    *,
    dtype: Any,
    chunk: int = 0,
) -> tuple[Float[Array, ""], Float[Array, "B T"]]:
    """Returns the sum of fn(weights, arrays, constants) * loss_weights over all tokens, and fn's
    values without gradient.

    The gradient is computed in the forward pass, chunk by chunk, while the values are available:
    the backward pass only scales it by the sum's cotangent, and nothing is computed twice.

    Args:
      fn: position-wise, returns float32 [B, c]; otherwise all arguments are as in `chunked`.
      loss_weights: float32, not differentiated.
    """
    size = _chunk_size(loss_weights.shape[1], chunk)

    def total(weights, arrays, constants, loss_weights):
        values = fn(weights, arrays, constants)
        return jnp.sum(values * loss_weights), lax.stop_gradient(values)

    @jax.custom_vjp
    def run(weights, arrays, constants, loss_weights):
        cast_weights = cast(weights, dtype)
        return _sum_over_chunks(
            lambda part: total(cast(cast_weights, jnp.float32), *part),
            (arrays, constants, loss_weights),
            size,
        )

    def forward(weights, arrays, constants, loss_weights):
        cast_weights = cast(weights, dtype)

        def step(part):
            arrays, *rest = part
            value, pull, values = vjp(
                lambda w, a: total(w, a, *rest),
                cast(cast_weights, jnp.float32),
                arrays,
                has_aux=True,
            )
            dw, dx = pull(jnp.ones_like(value))
            return (value, dw), (values, dx)

        (value, dw), (values, dx) = _sum_over_chunks(step, (arrays, constants, loss_weights), size)
        return (value, values), (dw, dx)

    def backward(residuals, cotangents):
        dw, dx = jax.tree.map(lambda x: (x * cotangents[0]).astype(x.dtype), residuals)
        return dw, dx, None, None

    run.defvjp(forward, backward)
    return run(weights, arrays, constants, loss_weights)
