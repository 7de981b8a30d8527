"""Position-wise work in chunks that do not divide the length: the same results in the fewest
chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.memory.chunked import chunked, chunked_total
from tests.model.attention.jaxprs import operations

LENGTH = 13  # prime: its only smaller divisor is one token


def fn(weights, arrays, constants):
    return jnp.tanh(arrays["x"] @ weights["w"]) * constants["n"][..., None]


def total(weights, arrays, constants):
    return fn(weights, arrays, constants).sum(-1)


def value(chunk, weights, arrays, constants, loss_weights):
    y = chunked(fn, weights, arrays, constants, dtype=jnp.float32, chunk=chunk)
    summed, values = chunked_total(
        total, weights, {"x": y}, constants, loss_weights, dtype=jnp.float32, chunk=chunk
    )
    return summed, (y, values)


@pytest.fixture
def inputs():
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(6, 6)).astype(np.float32)}
    x = rng.normal(size=(2, LENGTH, 6)).astype(np.float32)
    constants = {"n": rng.integers(0, 3, (2, LENGTH), np.int32)}
    loss_weights = rng.random((2, LENGTH), np.float32)
    return weights, {"x": x}, constants, loss_weights


def test_a_shorter_last_chunk_changes_no_result(inputs):
    run = jax.jit(jax.value_and_grad(value, argnums=(1, 2), has_aux=True), static_argnums=0)
    for got, expected in zip(
        *map(jax.tree.leaves, (run(4, *inputs), run(None, *inputs))), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)


def test_there_are_as_few_chunks_as_possible(inputs):
    traced = jax.make_jaxpr(lambda *inputs: value(4, *inputs))(*inputs)
    assert {
        equation.params["length"]
        for equation, _ in operations(traced.jaxpr)
        if equation.primitive.name == "scan"
    } == {3}
