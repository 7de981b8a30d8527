"""Tests of trainer/flops.py: visible pairs against the mask itself, FLOPs against the size of a published model."""

import numpy as np
import pytest

from model.attention import Mask
from model.config import TransformerConfig
from tests.model.attention.dense import visible
from trainer.flops import flops_per_step, visible_pairs


def test_visible_pairs_against_the_mask():
    segment_ids = np.array([1] * 5 + [2] * 3 + [0] * 4 + [7] * 12)
    same = (segment_ids[:, None] == segment_ids[None, :]) & (segment_ids[:, None] > 0)
    assert (
        visible_pairs(np.array([5, 3, 12]))
        == (same & np.tril(np.ones((24, 24), bool))).sum()
        == 15 + 6 + 78
    )
    assert visible_pairs(np.array([])) == 0
    assert visible_pairs(np.array([200_000], np.int32)) == 200_000 * 200_001 // 2, "beyond int32"


@pytest.mark.parametrize(
    "mask",
    [Mask(window=1), Mask(window=4), Mask(window=4, global_tokens=2), Mask(window=20)],
    ids=str,
)
def test_visible_pairs_of_a_window_against_the_mask(mask):
    index = np.broadcast_to(np.arange(12), (2, 12))
    segment_ids = np.array([[1] * 5 + [2] * 3 + [0] * 4, [7] * 12])
    seen = visible(index, segment_ids, window=mask.window, global_tokens=mask.global_tokens)
    assert visible_pairs(np.array([5, 3, 12]), mask) == seen.sum()


def test_flops_of_llama_7b():
    config = TransformerConfig.preset("llama-7b")
    weights = 6_738_415_616 - 32000 * 4096 - 65 * 4096  # all but the embedding table and the norms
    tokens = 4096
    pairs = tokens * (tokens + 1) // 2
    assert flops_per_step(config, tokens, 0) == 6 * weights * tokens
    assert flops_per_step(config, 0, pairs) == 3 * 32 * 4 * 4096 * pairs
