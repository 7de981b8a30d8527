"""Sums of token losses, against float64."""

import jax
import numpy as np
import pytest

from model.loss import sums_by_document


@pytest.mark.parametrize("tokens", [4096, 131072])
def test_sums_by_document_are_those_of_float64(tokens):
    """Long completions need it: a preference's log-ratio is the difference of two such sums."""
    values = np.random.default_rng(0).exponential(2.0, (2, tokens)).astype(np.float32)
    ids = np.ones((2, tokens), np.int32)
    ids[1] = np.arange(tokens) * 4 // tokens  # padding, then documents 1 to 3
    expected = [
        [values[row, ids[row] == d].sum(dtype=np.float64) for d in (1, 2, 3)] for row in (0, 1)
    ]
    found = jax.jit(sums_by_document, static_argnums=2)(values, ids, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_gradients_of_sums_by_document_reach_their_tokens_only():
    ids = np.array([[0, 1, 1, 3, 2]])

    def weighted(values):
        return (sums_by_document(values, ids, 3) * np.array([10.0, 20.0, 30.0])).sum()

    gradient = jax.grad(weighted)(np.full((1, 5), -np.inf, np.float32))
    np.testing.assert_array_equal(gradient, [[0, 10, 10, 30, 20]])
