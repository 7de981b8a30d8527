"""The rotary embedding against transformers' own, at short and long positions."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from model.config import LlamaConfig, RopeConfig
from model.rope import apply_rope, inverse_frequencies

POSITIONS = np.array([[0, 1, 2, 1000, 8191, 8192, 32767, 65536, 131071], [0, 0, 1, 1, 2, 2, 0, 1, 8192]], np.int32)


def theirs(config: LlamaConfig) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(transformers.LlamaConfig(**config.to_hf()))


@pytest.mark.parametrize("name", ["llama-7b", "llama-3.1-8b", "llama-3.2-1b", "smollm2-135m", "tiny"])
def test_equal_to_transformers(name):
    config = LlamaConfig.preset(name)
    reference = theirs(config)
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    assert frequencies.dtype == np.float32
    np.testing.assert_array_equal(frequencies, reference.inv_freq.numpy())
    x = np.random.default_rng(0).standard_normal((*POSITIONS.shape, 3, config.head_dim)).astype(np.float32)
    cos, sin = reference(torch.tensor(x), torch.tensor(POSITIONS))
    wanted, _ = apply_rotary_pos_emb(torch.tensor(x), torch.tensor(x), cos, sin, unsqueeze_dim=2)
    np.testing.assert_allclose(apply_rope(jnp.asarray(x), jnp.asarray(POSITIONS), frequencies), wanted, atol=1e-6)


def test_bfloat16_is_rounded_once():
    config = LlamaConfig.preset("tiny")
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((*POSITIONS.shape, 2, config.head_dim)), jnp.bfloat16)
    exact = apply_rope(x.astype(jnp.float32), jnp.asarray(POSITIONS), frequencies)
    turned = apply_rope(x, jnp.asarray(POSITIONS), frequencies)
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_array_equal(turned.astype(jnp.float32), exact.astype(jnp.bfloat16).astype(jnp.float32))


def test_odd_head_dim_is_refused():
    with pytest.raises(ValueError, match="head_dim"):
        inverse_frequencies(RopeConfig(), 9)
