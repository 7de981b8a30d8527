"""Rows of a table, and the sums that are their gradient on GPUs, against float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import lookup
from model.families import FAMILIES
from tests.model.build import abstract, llama, packed_batch, tiny


@pytest.mark.parametrize("tokens", [7, 512, 1100])
def test_sums_by_block_are_those_of_float64(tokens):
    """Half of the tokens have the same id, as padding does; blocks are full, partial and several."""
    rng = np.random.default_rng(0)
    ids = np.where(rng.random((1, tokens)) < 0.5, 0, rng.integers(0, 300, (1, tokens)))
    values = rng.normal(size=(1, tokens, 8)).astype(np.float32)
    expected = np.zeros((300, 8))
    np.add.at(expected, ids[0], values[0].astype(np.float64))
    found = jax.jit(lookup.sums_by_block)(jnp.zeros((300, 8)), ids, values)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sums", [lookup.sums_by_block, lookup._sums_by_scatter])
def test_the_gradient_reaches_the_rows_that_were_read_where_they_learn(monkeypatch, sums):
    monkeypatch.setattr(lookup.lax, "platform_dependent", lambda *args, **_: sums(*args))
    ids, weights = np.array([[2, 0, 2], [2, 1, 1]]), np.arange(24.0).reshape(2, 3, 4)
    learned = np.array([[True, False, True], [False, True, False]])
    gradient = jax.grad(lambda table: (lookup.rows(table, ids, learned) * weights).sum())(
        jnp.ones((5, 4))
    )
    expected = np.zeros((5, 4))
    np.add.at(expected, ids[learned], weights[learned])
    np.testing.assert_array_equal(gradient, expected)


MIXTURE = {
    "family": "gpt_oss",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    **FAMILIES["gpt_oss"].computes,
}


@pytest.mark.parametrize("kind", ["loss", "document_sums", "loss of a mixture"])
def test_on_gpus_no_float_is_added_in_the_order_of_threads(kind):
    """A scatter whose indices may repeat is made of atomic additions there; rounding would then
    differ from run to run."""
    model = llama(tiny(**(MIXTURE if "mixture" in kind else {})))
    batch = packed_batch(model.config, rows=2, length=64)

    def loss(params):
        if kind == "document_sums":
            return model.document_sums(params, batch, 3)[0].sum()
        return model.loss(params, batch).total

    lowered = jax.jit(jax.grad(loss)).trace(abstract(model)).lower(lowering_platforms=("cuda",))
    scatters = re.findall(
        r'"stablehlo\.scatter"\(.*?unique_indices = (\w+).*?\}\) : \((\S+),',
        lowered.as_text(),
        re.S,
    )
    assert ("true", "tensor<128x64xf32>") in scatters, "the embedding's gradient"
    # The router's, of a chunk's 32 tokens: an expert is chosen once by each.
    repeating = {type_ for unique, type_ in scatters if unique == "false" and "f32" in type_}
    assert repeating == ({"tensor<32x4xf32>"} if "mixture" in kind else set())
