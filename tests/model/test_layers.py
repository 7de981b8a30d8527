"""A layer of another form than LLaMA's, written as one class, under every runner: parallel
residuals, whose norm is read twice."""

import functools

import jax
import numpy as np
import pytest

from model import modules, parameter_declarations
from model.feedforward import FeedForward
from model.modules import DecoderLayer, SelfAttention
from model.norms import RMSNorm, rms_norm
from model.stages import STAGES
from tests.model import formula
from tests.model.build import llama, packed_batch, permuted, tiny
from trainer.huggingface.table import hf_layout

ROWS, LENGTH = 4, 32
CONFIG = tiny(vocab_size=32, hidden_size=16, intermediate_size=16, num_attention_heads=4)


class ParallelLayer(DecoderLayer):
    """Attention and feed-forward in parallel, after one norm."""

    def __init__(self, config, *, rngs):
        self.input_layernorm = RMSNorm(config, *STAGES)
        self.self_attn = SelfAttention(config, rngs=rngs)
        self.mlp = FeedForward(config, rngs=rngs)

    def output(self, x, attended, feed_forward, add):
        branch, auxiliary = feed_forward(self.input_layernorm(x))
        return add(add(x, attended), branch), auxiliary


@pytest.fixture(autouse=True)
def parallel_layers(monkeypatch):
    monkeypatch.setitem(modules.LAYER_MODULES, "before", ParallelLayer)
    parameter_declarations._layer_module.cache_clear()
    yield
    parameter_declarations._layer_module.cache_clear()


def by_formula(params, batch):
    """Returns the weighted sum of the token losses, which jax differentiates itself."""
    x = params["embed_tokens.weight"][batch["tokens"]]
    for weights in formula.layers(params, CONFIG):
        hidden = rms_norm(x, weights["input_layernorm.weight"], CONFIG.rms_norm_eps)
        attended = formula.attention(weights, hidden, batch, CONFIG)
        x = x + attended + formula.feed_forward(weights, hidden)
    return formula.loss(params, x, batch, CONFIG)


@functools.cache
def expected():
    batch, params = packed_batch(CONFIG, ROWS, LENGTH), llama(CONFIG).init(0)
    return (
        batch,
        params,
        *jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(by_formula))(params, batch)),
    )


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"fsdp": 2, "tensor": 2, "sequence": 2}, {}),
        ({"sequence": 2}, {"attention_groups": 2}),
        ({"sequence": 2}, {"remat": "nothing", "query_chunks": 2}),
        ({"fsdp": 2, "sequence": 2}, {"prefetch": True}),
    ],
    ids=str,
)
def test_every_runner_runs_a_parallel_layer(mesh, options):
    batch, params, total, gradient = expected()
    model = llama(CONFIG, mesh, **options)
    placed, _ = permuted(batch, model)
    sharded = {name: jax.device_put(x, model.shardings[name]) for name, x in params.items()}
    value, gradients = jax.jit(
        jax.value_and_grad(lambda params, batch: model.loss(params, batch).total)
    )(sharded, placed)
    np.testing.assert_allclose(value, total, rtol=1e-5)
    for name, dw in gradient.items():
        np.testing.assert_allclose(
            gradients[name], dw, rtol=1e-4, atol=1e-5 * np.abs(dw).max(), err_msg=name
        )


def test_the_hugging_face_table_follows_from_the_declaration():
    names = [entry.hf_name for entry in hf_layout(CONFIG) if "layernorm" in entry.hf_name]
    assert names == ["model.layers.{i}.input_layernorm.weight"]
