"""Heads that `tensor` does not divide: padded, and nothing else changes."""
import jax
import numpy as np
import pytest

from model.llama import Chunks
from model.modules import declare

from .build import llama, packed_batch, permuted, tiny


@pytest.mark.parametrize(("query", "key", "shape"), [
    (9, 3, {"tensor": 2, "sequence": 2}), pytest.param(33, 33, {"tensor": 8}, marks=pytest.mark.slow)])
def test_padded_heads_change_no_number(query, key, shape):
    """Loss and gradients as on one device, biases and all; padding is zero, gets a gradient of exactly zero, and is split."""
    config = tiny(num_attention_heads=query, num_key_value_heads=key, attention_bias=True, vocab_size=64)
    own = {name: parameter.shape for name, parameter in declare(config).items()}
    found = []
    for mesh in ({}, shape):
        model = llama(config, mesh, chunks=Chunks(None, None, None))
        batch, _ = permuted(packed_batch(config, rows=2, length=32), model)
        params = model.init(0)
        for name in params:  # biases begin at zero, and would hide what padding does to them
            if name.endswith(".bias"):
                bias = np.random.default_rng(0).normal(size=own[name]).astype(np.float32)
                room = [(0, n - m) for n, m in zip(params[name].shape, own[name], strict=True)]
                params[name] = jax.device_put(np.pad(bias, room), model.shardings[name])
        (loss, _), gradient = jax.jit(jax.value_and_grad(model.loss, has_aux=True))(params, batch)
        found.append((float(loss), jax.tree.map(np.array, gradient), jax.tree.map(np.array, params)))
    (loss, gradient, params), (got, got_gradient, got_params) = found
    assert abs(got - loss) <= 1e-5 * abs(loss)
    padded = {name for name, shape in own.items() if got_params[name].shape != shape}
    assert padded == {f"layers.self_attn.{part}" for part in (
        "q_proj.weight", "k_proj.weight", "v_proj.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.weight")}
    for name, size in own.items():
        part = tuple(map(slice, size))
        np.testing.assert_array_equal(got_params[name][part], params[name])
        assert np.abs(got_gradient[name][part] - gradient[name]).max() <= 1e-5 * np.abs(gradient[name]).max(), name
        if name in padded:
            assert "tensor" in jax.tree.leaves(tuple(model.specs[name])), "each rank has its own heads"
            for array in (got_params[name], got_gradient[name]):
                array[part] = 0
                assert not array.any(), name
