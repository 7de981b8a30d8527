"""A layer with attention sinks gives the same results however it is split."""

import jax
import numpy as np
import pytest

from model.families import FAMILIES
from tests.model.build import TILED, llama, mean_loss, packed_batch, permuted, tiny

CONFIG = tiny(
    family="gpt_oss",
    **FAMILIES["gpt_oss"].computes,
    attention_bias=True,
    num_hidden_layers=1,
    num_experts=2,
    num_experts_per_tok=1,
)
PIECES = (
    {"prefetch": True},
    {"query_chunks": 2, "attention_groups": 2, "remat": "nothing"},
)


@pytest.mark.slow
def test_layers_with_sinks_do_not_depend_on_how_they_run():
    """The loss and the gradients, including those of the sinks."""
    batch, rng = packed_batch(CONFIG, rows=1, length=64), np.random.default_rng(0)
    initial = {name: np.asarray(x) for name, x in llama(CONFIG).init(0).items()}
    sinks = "layers.self_attn.sinks"
    initial[sinks] = rng.normal(size=initial[sinks].shape).astype(np.float32)

    def run(**options):
        model = llama(CONFIG, {"sequence": 2}, kernel=TILED, **options)
        params = {name: jax.device_put(x, model.shardings[name]) for name, x in initial.items()}
        return jax.jit(jax.value_and_grad(mean_loss(model), has_aux=True))(
            params, permuted(batch, model)[0]
        )

    (expected, _), expected_gradients = run()
    assert np.abs(expected_gradients[sinks]).max() > 1e-4
    for options in PIECES:
        (loss, _), gradients = run(**options)
        np.testing.assert_allclose(loss, expected, rtol=1e-6, err_msg=str(options))
        for name, gradient in expected_gradients.items():
            bound = 1e-5 * np.abs(gradient).max()
            np.testing.assert_allclose(gradients[name], gradient, atol=bound, err_msg=name)
