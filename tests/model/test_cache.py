"""The cache: however appended tokens are split, results match a forward pass over the whole row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.agentic import AgenticTransformer
from model.cache import CachedModel
from tests.model.build import llama, tiny
from tests.model.test_agentic import batch_of, model_on


def pieces(length, sizes):
    """Yields the first token of each piece and its size; the sizes repeat."""
    first, number = 0, 0
    while first < length:
        size = min(sizes[number % len(sizes)], length - first)
        yield first, size
        first, number = first + size, number + 1


@pytest.mark.parametrize("at_once", [3, None])
@pytest.mark.parametrize("axes", [{}, {"fsdp": 2, "sequence": 4}])
def test_cached_actions_match_the_whole_row(axes, at_once, monkeypatch):
    """Also if the number of slots that are read at once does not divide all slots."""
    if at_once:
        monkeypatch.setattr(CachedModel, "_slots_at_once", at_once)
    batch, one_device = batch_of(), model_on()
    params = one_device.init(0)
    expected = np.asarray(jax.jit(one_device.actions)(params, batch))
    model = model_on(axes)
    cached = CachedModel(model, AgenticTransformer.local_actions, rows=2, capacity=64)
    cache, results = cached.empty(), []
    params = jax.device_put(params, model.shardings)
    for first, size in pieces(64, (2, 4)):
        cache, actions = cached.extend(
            params,
            cache,
            {
                name: array[:, first : first + size]
                for name, array in batch.items()
                if name in ("values", "kinds", "index", "segment_ids")
            },
        )
        results.append(np.asarray(actions))
    actual, kept = np.concatenate(results, 1), batch["segment_ids"] > 0
    np.testing.assert_allclose(actual[kept], expected[kept], atol=1e-5)
    assert int(jnp.sum(cache.segment_ids)) == kept.sum()


@pytest.mark.parametrize(
    "axes",
    [
        {"tensor": 2, "sequence": 4},
        pytest.param({"fsdp": 2, "tensor": 2, "sequence": 2}, marks=pytest.mark.slow),
    ],
)
def test_cached_logits_of_rows_of_different_lengths_match_each_row_alone(axes, monkeypatch):
    """All rows are read as far as the longest, here the second."""
    monkeypatch.setattr(CachedModel, "_slots_at_once", 2)
    config = tiny()
    model, one_device = llama(config, axes), llama(config)
    expected_params = one_device.init(0)
    params = jax.device_put(model.init(0), model.shardings)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 24)).astype(np.int32)
    lengths = (13, 24)
    cached = CachedModel(model, type(model).local_logits, rows=2, capacity=24)
    cache, results = cached.empty(), []
    for first, size in pieces(24, (8,)):
        index = np.broadcast_to(np.arange(first, first + size, dtype=np.int32), (2, size))
        segment_ids = np.stack([index[row] < lengths[row] for row in range(2)]).astype(np.int32)
        cache, logits = cached.extend(
            params,
            cache,
            {"tokens": tokens[:, first : first + size], "index": index, "segment_ids": segment_ids},
        )
        results.append(np.asarray(logits))
    actual = np.concatenate(results, 1)
    for row, length in enumerate(lengths):
        index = np.arange(length, dtype=np.int32)[None]
        batch = {
            "tokens": tokens[row : row + 1, :length],
            "positions": index,
            "index": index,
            "segment_ids": np.ones_like(index),
        }
        expected = np.asarray(jax.jit(one_device.logits)(expected_params, batch))[0]
        np.testing.assert_allclose(actual[row, :length], expected, atol=2e-5)


def test_slots_after_the_last_token_are_not_read(monkeypatch):
    """A dense product with them would be NaN, even with weights of 0."""
    monkeypatch.setattr(CachedModel, "_slots_at_once", 8)
    model = model_on()
    batch, params = batch_of(), model.init(0)
    cached = CachedModel(model, AgenticTransformer.local_actions, rows=2, capacity=64, dense=4)
    cache = cached.empty()
    unread = jnp.where(jnp.arange(64)[:, None] < 16, 0.0, jnp.nan)
    cache = cache._replace(k=cache.k + unread, v=cache.v + unread)
    for first, size in pieces(12, (4,)):
        inputs = {name: array[:, first : first + size] for name, array in batch.items()}
        cache, actions = cached.extend(params, cache, inputs)
        assert np.isfinite(actions).all()


def test_one_mebibyte_is_read_at_once_on_a_cpu():
    model = model_on({"sequence": 2})
    config, cached = model.config, functools.partial(CachedModel, model, None, 2)
    of_slot = 2 * config.num_key_value_heads * config.head_dim * 4
    assert 0.9 < cached(1 << 20)._slots_at_once * of_slot / 2**20 <= 1
    assert cached(100)._slots_at_once == 50


def test_each_device_keeps_an_equal_share_of_the_tokens():
    model = model_on({"sequence": 8})
    cached = CachedModel(model, AgenticTransformer.local_actions, rows=1, capacity=60)
    cache = cached.empty()
    assert cache.k.shape[3] == 64
    assert {shard.data.shape[3] for shard in cache.k.addressable_shards} == {8}
