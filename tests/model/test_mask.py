"""A model with a sliding window and global tokens, training and decoding, against transformers with
an explicit mask of all pairs."""

import jax
import numpy as np
import pytest
import torch

from model.attention import Mask
from model.attention.schedules import Ring
from model.config import TransformerConfig
from model.decode import Generator
from tests.model.attention.dense import visible
from trainer.huggingface.read import read_hf

from .build import TILED, initial, llama, mean_loss, packed_batch, permuted, tiny
from .test_llama import saved_by_transformers

WINDOW, BOTH = Mask(window=9), Mask(window=9, global_tokens=3)
CHUNKS = {"query_chunks": 2, "remat": "nothing"}


def dense_logits(truth, mask, tokens, index, segment_ids, positions) -> np.ndarray:
    """Returns transformers' logits in float64 (softmax in float32) under an explicit mask for every
    pair of tokens: [B, L, V]."""
    seen = visible(index, segment_ids, window=mask.window, global_tokens=mask.global_tokens)
    hidden = torch.tensor(np.where(seen, 0.0, -1e30))[
        :, None
    ]  # finite in the softmax's float32 too
    with torch.no_grad():
        return truth(
            torch.tensor(tokens), attention_mask=hidden, position_ids=torch.tensor(positions)
        ).logits.numpy()


@pytest.fixture
def model_of(tmp_path):
    """Returns a function that gives the transformers model, ours under a mask on a mesh, and its
    parameters."""
    truth = saved_by_transformers(tmp_path, tiny()).double().eval()
    truth.set_attn_implementation("eager")
    config = TransformerConfig.from_hf(tmp_path)

    def make(mask, shape, **options):
        model = llama(config, shape, mask=mask, kernel=TILED, **options)
        return truth, model, read_hf(tmp_path, config, model.shardings)

    return make


@pytest.mark.parametrize(
    ("mask", "schedule", "layout", "options"),
    [
        (WINDOW, "ring", "striped", {}),
        pytest.param(WINDOW, Ring(ordered=True), "contiguous", {}, marks=pytest.mark.slow),
        pytest.param(BOTH, "ring", "striped", {}, marks=pytest.mark.slow),
        (BOTH, "all_gather", "zigzag", {}),
        (WINDOW, Ring(ordered=True), "contiguous", CHUNKS),
        (BOTH, "ring", "striped", CHUNKS),
    ],
    ids=str,
)
def test_logits_of_packed_documents_match_the_dense_mask(model_of, mask, schedule, layout, options):
    truth, model, params = model_of(
        mask, {"tensor": 2, "sequence": 4}, schedule=schedule, **options
    )
    batch = packed_batch(model.config, rows=2, length=64)
    arrays = [batch[name] for name in ("tokens", "index", "segment_ids", "positions")]
    expected = dense_logits(truth, mask, *arrays)
    real = batch["segment_ids"] > 0
    unmasked = dense_logits(truth, Mask(), *arrays)
    assert np.abs(unmasked - expected)[real].max() > 0.1 * np.abs(expected).max()
    placed, order = permuted(batch, model, layout)
    got = np.asarray(jax.jit(model.logits)(params, placed))
    assert np.abs(got - expected[:, order])[real[:, order]].max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("mask", [WINDOW, pytest.param(BOTH, marks=pytest.mark.slow)], ids=str)
def test_prefetched_weights_visit_all_ranks_despite_a_window(mask):
    """With 16 contiguous tokens per rank, a window of 9 reaches only the previous rank, but the
    next layer's weights come from all four."""

    def loss_and_gradient(**options):
        model = llama(
            tiny(), {"tensor": 2, "sequence": 4}, mask=mask, schedule=Ring(ordered=True), **options
        )
        batch, _ = permuted(packed_batch(model.config, rows=2, length=64), model, "contiguous")
        return jax.jit(jax.value_and_grad(lambda params: mean_loss(model)(params, batch)[0]))(
            initial(model)
        )

    loss, gradient = loss_and_gradient(prefetch=True)
    expected_loss, expected = loss_and_gradient()
    assert abs(loss - expected_loss) <= 1e-5 * abs(expected_loss)
    for name, g in expected.items():
        assert np.abs(gradient[name] - g).max() <= 1e-5 * np.abs(g).max(), name


@pytest.mark.parametrize("mask", [WINDOW, BOTH], ids=str)
def test_decoding_uses_the_mask_of_training(model_of, mask):
    """Each token is the likeliest after those before it, by the forward pass and by the dense mask;
    with 12 new tokens the window leaves the prompts."""
    truth, model, params = model_of(mask, {"sequence": 4})
    prompts = [
        np.random.default_rng(length).integers(3, 128, length).tolist() for length in (2, 31, 52)
    ]
    answers = Generator(model, rows=3, capacity=64, new_tokens=12, stop_ids=(), chunk=16)(
        params, prompts
    )
    rows = np.zeros((3, 64), np.int32)
    index = np.broadcast_to(np.arange(64, dtype=np.int32), (3, 64))
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        rows[row, : len(prompt) + 12] = prompt + answer
    batch = {"tokens": rows, "index": index, "positions": index, "segment_ids": np.ones_like(rows)}
    placed, order = permuted(batch, model)
    forward = np.empty((3, 64, 128))
    forward[:, order] = jax.jit(model.logits)(params, placed)
    dense, unmasked = (
        dense_logits(truth, applied, rows, index, np.ones_like(rows), index)
        for applied in (mask, Mask())
    )

    def chosen(logits):
        return [
            logits[row, len(prompt) - 1 : len(prompt) + 11].argmax(-1).tolist()
            for row, prompt in enumerate(prompts)
        ]

    assert chosen(forward) == chosen(dense) == answers
    assert chosen(unmasked) != answers
