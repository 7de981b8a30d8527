"""The head in bfloat16: logits and losses are as accurate as float32 sums, and every product has
bfloat16 operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.loss import token_losses
from model.sharding import TensorParallel

from .attention.jaxprs import operations
from .build import abstract, llama, mean_loss, packed_batch, tiny

VOCABULARY, WIDTH = 160, 64


def test_logits_and_losses_in_bfloat16_match_float64():
    """A layer that adds nothing and embeddings of plus and minus one: the head's input is known
    without rounding."""
    config = tiny(vocab_size=VOCABULARY, num_hidden_layers=1)
    model = llama(config, {"tensor": 2}, dtype=jnp.bfloat16)
    batch = packed_batch(config, rows=2, length=32)
    rng = np.random.default_rng(3)
    params = {
        name: np.zeros(parameter.shape, np.float32) + name.endswith("norm.weight")
        for name, parameter in model.parameters.items()
    }
    table = np.where(rng.random((VOCABULARY, WIDTH)) < 0.5, -1, 1)
    head = np.asarray(
        jnp.asarray(rng.standard_normal((WIDTH, VOCABULARY)), jnp.bfloat16), np.float32
    )
    params |= {"embed_tokens.weight": table.astype(np.float32), "lm_head.weight": head}
    params = {name: jax.device_put(x, model.shardings[name]) for name, x in params.items()}
    got = jax.jit(
        lambda params, batch: (model.logits(params, batch), model.token_losses(params, batch))
    )(params, batch)
    logits = table[batch["tokens"]] @ head.astype(np.float64)
    losses = (
        np.log(np.exp(logits).sum(-1))
        - np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    )
    for values, truth in zip(got, (logits, losses), strict=True):
        np.testing.assert_allclose(values, truth, rtol=0, atol=1e-6 * np.abs(logits).max())


def test_the_losss_gradient_is_exact_without_a_scatter():
    """Softmax minus targets. A scatter into the logits would write their whole gradient in float32
    before it is cast."""
    config = tiny(vocab_size=VOCABULARY)
    parallel = TensorParallel.of(config, 1)
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((2, 5, VOCABULARY)).astype(np.float32)
    targets = rng.integers(0, VOCABULARY, (2, 5))
    weights = rng.random((2, 5)).astype(np.float32)

    def total(logits):
        return jnp.sum(weights * token_losses(logits, jnp.asarray(targets), parallel))

    exact = np.exp(logits.astype(np.float64))
    exact = exact / exact.sum(-1, keepdims=True) - np.eye(VOCABULARY)[targets]
    got = jax.grad(total)(jnp.asarray(logits))
    np.testing.assert_allclose(got, exact * weights[..., None], rtol=0, atol=1e-6)
    names = {
        equation.primitive.name
        for equation, _ in operations(jax.make_jaxpr(jax.grad(total))(logits).jaxpr)
    }
    assert not any(name.startswith("scatter") for name in names), names


@pytest.mark.parametrize("tied", [True, False])
def test_every_product_with_the_head_has_bfloat16_operands(tied):
    """A training step has three: logits and dW with float32 results, and dx."""
    model = llama(
        tiny(vocab_size=VOCABULARY, num_hidden_layers=1, tie_word_embeddings=tied),
        dtype=jnp.bfloat16,
    )
    batch = packed_batch(model.config)
    traced = jax.make_jaxpr(jax.grad(lambda params: mean_loss(model)(params, batch)[0]))(
        abstract(model)
    )
    dtypes = []
    for equation, _ in operations(traced.jaxpr):
        shapes = [x.aval for x in (*equation.invars, *equation.outvars)]
        if equation.primitive.name == "dot_general" and any(VOCABULARY in x.shape for x in shapes):
            dtypes.append([str(x.dtype) for x in shapes])
    operands = ["bfloat16", "bfloat16"]
    assert sorted(dtypes) == [
        [*operands, "bfloat16"],
        [*operands, "float32"],
        [*operands, "float32"],
    ]
