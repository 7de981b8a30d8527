"""Auxiliary losses of the layers: values and gradients under every runner, against a plain function
on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import modules, parameter_declarations
from model.attention.layout import permutation
from model.feedforward import FeedForward
from model.language_model import LanguageModel
from model.norms import rms_norm
from tests.model import formula
from tests.model.build import ALL_AT_ONCE, llama, packed_batch, tiny
from trainer.config.schema import OptimizerConfig, TrainConfig
from trainer.mesh import place_batch
from trainer.step import StepBuilder
from trainer.text import text_batch

ROWS, LENGTH = 4, 32
CONFIG = tiny(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=4
)
RING = {"fsdp": 2, "sequence": 4}


class RoutedFeedForward(FeedForward):
    """Returns the router z-loss summed over the tokens, with the gate as the router (Zoph et al.,
    ST-MoE)."""

    def __call__(self, x, parallel, info):
        y, _ = super().__call__(x, parallel, info)
        return y, {
            "z": jnp.sum(
                jnp.square(jax.nn.logsumexp(self.gate_proj(x, parallel).astype(jnp.float32), -1))
            )
        }


class RoutedLlama(LanguageModel):
    """Adds each layer's z-loss, with more weight in upper layers so that swapped layers would
    show."""

    def auxiliary_losses(self, sums, batch):
        return {"router_z": jnp.dot(jnp.arange(1.0, 5), sums["z"]), "twice": 2 * jnp.sum(sums["z"])}


@pytest.fixture(autouse=True)
def routed_layers(monkeypatch):
    """Builds layers with the routed feed-forward."""
    monkeypatch.setattr(modules, "FeedForward", RoutedFeedForward)
    parameter_declarations._layer_module.cache_clear()
    yield
    parameter_declarations._layer_module.cache_clear()


def by_formula(params, batch):
    """Returns the token loss and both auxiliary losses, as sums over the batch that jax
    differentiates itself."""
    x, z_losses = params["embed_tokens.weight"][batch["tokens"]], []
    for weights in formula.layers(params, CONFIG):
        hidden = rms_norm(x, weights["input_layernorm.weight"], CONFIG.rms_norm_eps)
        x = x + formula.attention(weights, hidden, batch, CONFIG)
        hidden = rms_norm(x, weights["post_attention_layernorm.weight"], CONFIG.rms_norm_eps)
        gate = hidden @ weights["mlp.gate_proj.weight"]
        z_losses.append(jnp.sum(jnp.square(jax.nn.logsumexp(gate, -1))))
        x = x + formula.feed_forward(weights, hidden)
    auxiliary = {
        "router_z": sum((i + 1) * z for i, z in enumerate(z_losses)),
        "twice": 2 * sum(z_losses),
    }
    total = formula.loss(params, x, batch, CONFIG)
    return total + auxiliary["router_z"] + auxiliary["twice"], (total, auxiliary)


@functools.cache
def expected():
    """Returns a batch, parameters, and their loss, auxiliary losses and gradient, all divided by
    the sum of weights."""
    batch = packed_batch(CONFIG, ROWS, LENGTH)
    params = llama(CONFIG).init(0)
    weight = batch["loss_weights"].sum()
    (_, sums), gradient = jax.jit(jax.value_and_grad(by_formula, has_aux=True))(params, batch)
    return batch, params, *jax.tree.map(lambda x: np.asarray(x) / weight, (sums, gradient))


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("mesh", "options", "parts"),
    [
        ({}, {}, 1),
        slow(RING, {"remat": "everything"}, 2),
        slow(RING, {"remat": "every_k"}, 1),
        slow(RING, {"attention_groups": 2}, 2),
        slow(RING, {"remat": "nothing", "query_chunks": 2}, 1),
        (RING, {"remat": "nothing", "query_chunks": 2, "attention_groups": 2}, 2),
        (RING, {"prefetch": True}, 2),
        slow(RING, {"prefetch": True, "remat": "nothing"}, 1),
    ],
)
def test_every_runner_trains_auxiliary_losses(mesh, options, parts):
    batch, params, (loss, auxiliary), gradient = expected()
    plain = llama(CONFIG, mesh, **{**ALL_AT_ONCE, "feed_forward_chunk": 4}, **options)
    model = RoutedLlama(
        CONFIG, plain.mesh, kernel=plain.kernel, dtype=plain.dtype, memory=plain.memory
    )
    optimizer = OptimizerConfig(learning_rate=1.0, schedule="constant", clip_norm=0.0)
    builder = StepBuilder(
        model,
        model.loss,
        text_batch(ROWS, LENGTH, model.mesh),
        optimizer,
        TrainConfig(steps=20, accumulation=parts),
        model.memory,
    )
    order = permutation(LENGTH, model.mesh.shape["sequence"], "striped")
    placed = place_batch({name: x[:, order] for name, x in batch.items()}, model.mesh)

    def sums_and_gradient(params, batch):
        return builder._over_parts(functools.partial(builder._sums_and_gradient, params, {}), batch)

    sharded = {name: jax.device_put(x, model.shardings[name]) for name, x in params.items()}
    sums, gradients = jax.jit(sums_and_gradient)(sharded, placed)
    np.testing.assert_allclose(sums.total / sums.weight, loss, rtol=1e-5)
    assert sums.auxiliary.keys() == auxiliary.keys()
    for name, value in auxiliary.items():
        np.testing.assert_allclose(sums.auxiliary[name] / sums.weight, value, rtol=1e-5)
    for name, value in gradient.items():
        np.testing.assert_allclose(
            gradients[name] / sums.weight,
            value,
            rtol=1e-4,
            atol=1e-5 * np.abs(value).max(),
            err_msg=name,
        )


def test_metrics_report_auxiliary_losses_by_name():
    batch, params, (loss, auxiliary), _ = expected()
    plain = llama(CONFIG)
    model = RoutedLlama(
        CONFIG, plain.mesh, kernel=plain.kernel, dtype=plain.dtype, memory=plain.memory
    )
    builder = StepBuilder(
        model, model.loss, text_batch(ROWS, LENGTH, model.mesh), train_config=TrainConfig(steps=20)
    )
    state, placed = builder.init_optimizer(params), place_batch(batch, model.mesh)
    *_, metrics = jax.jit(builder.train)(params, {}, state, placed, np.int32(0))
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)  # without auxiliary losses
    assert {
        name: pytest.approx(float(value), rel=1e-5) for name, value in metrics.auxiliary.items()
    } == auxiliary


def test_dense_layers_have_no_auxiliary_losses(monkeypatch):
    monkeypatch.undo()
    parameter_declarations._layer_module.cache_clear()
    batch, model = packed_batch(CONFIG, ROWS, LENGTH), llama(CONFIG)
    assert model.loss(model.init(0), batch).auxiliary == {}
