"""A vocabulary that `tensor` does not divide is padded, and nothing else changes."""

import jax
import numpy as np
import pytest

from .build import llama, mean_loss, packed_batch, permuted, tiny


@pytest.mark.parametrize(
    ("vocab_size", "tied"), [pytest.param(131, False, marks=pytest.mark.slow), (5, True)]
)
def test_a_padded_vocabulary_changes_no_result(vocab_size, tied):
    """Loss, gradients and logits match one device; the padding is zero and gets no gradient. With 5
    ids on 4 ranks, one rank holds only padding."""
    config = tiny(vocab_size=vocab_size, tie_word_embeddings=tied)
    results = []
    for shape in ({}, {"tensor": 4}):
        model = llama(config, shape)
        batch, order = permuted(packed_batch(config, rows=2, length=32), model)
        params = model.init(0)
        (loss, _), gradient = jax.jit(jax.value_and_grad(mean_loss(model), has_aux=True))(
            params, batch
        )
        results.append(
            (
                float(loss),
                gradient,
                params,
                np.asarray(jax.jit(model.logits)(params, batch))[:, np.argsort(order)],
            )
        )
    (loss, gradient, params, logits), (got, got_gradient, got_params, got_logits) = results
    assert abs(got - loss) <= 1e-5 * abs(loss)
    assert (
        got_logits.shape == logits.shape
        and np.abs(got_logits - logits).max() <= 1e-4 * np.abs(logits).max()
    )
    for name, g in gradient.items():
        own = tuple(map(slice, g.shape))
        np.testing.assert_array_equal(np.asarray(got_params[name])[own], params[name])
        assert np.abs(np.asarray(got_gradient[name])[own] - g).max() <= 1e-5 * np.abs(g).max(), name
    for name, axis in (("embed_tokens.weight", 0), ("lm_head.weight", 1)):
        if name in gradient:
            assert got_params[name].shape[axis] == -(-vocab_size // 4) * 4
            for array in (got_params[name], got_gradient[name]):
                assert not np.take(
                    np.asarray(array), range(vocab_size, array.shape[axis]), axis
                ).any()
