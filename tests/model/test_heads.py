"""Heads that `tensor` does not divide are padded, and nothing else changes."""

from collections import Counter

import jax
import numpy as np
import pytest

from model.parameter_declarations import declare
from tests.errors import within
from tests.model.attention.jaxprs import operations

from .build import ALL_AT_ONCE, abstract, llama, mean_loss, packed_batch, permuted, tiny


# Initial parameters are bitwise equal only with the compiler's default flags, which soak uses.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "key", "shape"),
    [
        (9, 3, {"tensor": 2, "sequence": 2}),
        pytest.param(33, 33, {"tensor": 8}, marks=pytest.mark.slow),
    ],
)
def test_padded_heads_change_no_result(query, key, shape):
    """Loss and gradients match one device, including biases; the padding is zero, gets a gradient
    of exactly zero, and is split."""
    config = tiny(
        num_attention_heads=query, num_key_value_heads=key, attention_bias=True, vocab_size=64
    )
    own = {name: parameter.shape for name, parameter in declare(config).items()}
    results = []
    for mesh in ({}, shape):
        model = llama(config, mesh, **ALL_AT_ONCE)
        batch, _ = permuted(packed_batch(config, rows=2, length=32), model)
        params = model.init(0)
        for name in params:  # biases start at zero, which would hide errors of their padding
            if name.endswith(".bias"):
                bias = np.random.default_rng(0).normal(size=own[name]).astype(np.float32)
                room = [(0, n - m) for n, m in zip(params[name].shape, own[name], strict=True)]
                params[name] = jax.device_put(np.pad(bias, room), model.shardings[name])
        (loss, _), gradient = jax.jit(jax.value_and_grad(mean_loss(model), has_aux=True))(
            params, batch
        )
        results.append(
            (float(loss), jax.tree.map(np.array, gradient), jax.tree.map(np.array, params))
        )
    (loss, gradient, params), (got, got_gradient, got_params) = results
    within(abs(got / loss - 1), 1e-5, "loss")
    padded = {name for name, shape in own.items() if got_params[name].shape != shape}
    assert padded == {
        f"layers.self_attn.{part}"
        for part in (
            "q_proj.weight",
            "k_proj.weight",
            "v_proj.weight",
            "q_proj.bias",
            "k_proj.bias",
            "v_proj.bias",
            "o_proj.weight",
        )
    }
    for name, size in own.items():
        part = tuple(map(slice, size))
        np.testing.assert_array_equal(got_params[name][part], params[name])
        difference = np.abs(got_gradient[name][part] - gradient[name]).max()
        within(difference / np.abs(gradient[name]).max(), 1e-5, "gradients", name)
        if name in padded:
            assert "tensor" in jax.tree.leaves(tuple(model.specs[name])), (
                "heads are not split over tensor"
            )
            for array in (got_params[name], got_gradient[name]):
                array[part] = 0
                assert not array.any(), name


def test_a_rank_projects_only_the_kv_heads_of_its_query_heads():
    """2 KV heads on 4 tensor ranks: the weights are sliced to the rank's head before the
    product."""
    config = tiny(num_attention_heads=16)
    model = llama(config, {"data": 2, "tensor": 4})
    batch = packed_batch(config)
    traced = jax.make_jaxpr(jax.grad(lambda params: mean_loss(model)(params, batch)[0]))(
        abstract(model)
    )
    width = (config.hidden_size, config.head_dim)
    heads = Counter(
        x.aval.shape[1]
        for equation, _ in operations(traced.jaxpr)
        if equation.primitive.name == "dot_general"
        for x in (*equation.invars, *equation.outvars)
        if len(x.aval.shape) == 3 and x.aval.shape[::2] == width
    )
    assert heads.keys() == {1, 4} and heads[1] == 2 * heads[4], "k and v, q"
