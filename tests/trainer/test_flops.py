"""Tests of trainer/flops.py: visible pairs against the mask itself, FLOPs against a published
model's size."""

import dataclasses
import math

import numpy as np
import pytest

from model.adapter import AdapterConfig
from model.attention import Mask
from model.config import TransformerConfig
from model.parameter_declarations import declare
from planning.costs.step import Sizes
from tests.model.attention.dense import visible
from trainer.flops import (
    all_layers,
    flops_per_step,
    frozen_weights,
    head_weights,
    stored_layer_weights,
    visible_pairs,
)


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
    weights = 6_738_415_616 - 32000 * 4096 - 65 * 4096  # all but the embedding and the norms
    tokens = 4096
    pairs = tokens * (tokens + 1) // 2
    assert flops_per_step(config, tokens, 0) == 6 * weights * tokens
    assert flops_per_step(config, 0, pairs) == 3 * 32 * 4 * 4096 * pairs


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [
        ("mixtral-8x7b", 46_702_792_704, 12.9e9),
        ("qwen3-30b-a3b", 30_532_122_624, 3.3e9),
        ("olmoe-1b-7b", 6_919_161_856, 1.3e9),
        ("olmo3-7b", 7_298_011_136, 7.3e9),
    ],
)
def test_flops_count_active_parameters(preset, total, active):
    """Totals as the hub counts them, and active parameters as published."""
    config = TransformerConfig.preset(preset)
    assert sum(math.prod(parameter.shape) for parameter in declare(config).values()) == total
    layers, hidden = config.num_hidden_layers, config.hidden_size
    norms = hidden + sum(
        math.prod(parameter.shape)
        for name, parameter in declare(config).items()
        if name.startswith("layers.") and "norm" in name
    )
    table = config.vocab_size * hidden
    matrices = layers * stored_layer_weights(config) + head_weights(config)
    assert matrices == total - norms - table
    assert flops_per_step(config, 1, 0) == pytest.approx(6 * (active - norms - table), rel=0.03)


@pytest.mark.parametrize(
    ("preset", "billions", "active"),
    [
        ("glm-4.5-air", 106, 12),
        ("glm-4.5", 355, 32),
        ("ernie-4.5-21b-a3b", 21, 3),
        ("ernie-4.5-300b-a47b", 300, 47),
    ],
)
def test_layers_with_and_without_experts_both_count(preset, billions, active):
    """Totals and active parameters as in the models' names, up to a billion or 2%."""
    config = TransformerConfig.preset(preset)
    declared = declare(config)
    matrices = {name: x for name, x in declared.items() if x.is_matrix}
    total = sum(math.prod(parameter.shape) for parameter in matrices.values())
    assert total / 1e9 == pytest.approx(billions, rel=0.02, abs=1)
    if not config.tie_word_embeddings:
        total -= config.vocab_size * config.hidden_size  # the embedding, whose rows are looked up
    assert all_layers(config, stored_layer_weights) + head_weights(config) == total
    experts = sum(math.prod(x.shape) for x in matrices.values() if "experts" in x.axes)
    idle = experts * (1 - config.num_experts_per_tok / config.num_experts)
    assert flops_per_step(config, 1, 0) == pytest.approx(6 * (total - idle))
    sizes = Sizes.of(config)
    assert sizes.layers * sizes.experts == pytest.approx(experts)
    assert sizes.needed_flops(1, 0) == pytest.approx(6 * (total - idle))
    assert (total - idle) / 1e9 == pytest.approx(active, rel=0.02, abs=1)


@pytest.mark.parametrize(
    "preset", ["smollm2-135m", "llama-7b", "qwen3-30b-a3b", "qwen1.5-moe-a2.7b", "glm-4.5-air"]
)
def test_matrices_without_a_gradient_save_two_flops_per_token(preset):
    """With every matrix frozen, as below adapters; without the head's; and with norms alone."""
    config = TransformerConfig.preset(preset)
    names, trained = set(declare(config)), flops_per_step(config, 1, 0)

    def without(frozen):
        return flops_per_step(config, 1, 0, frozen_weights(config, frozen))

    assert without(()) == trained
    assert without(names) == trained * 4 / 6
    head = "embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    saved = without(names - {head}) - trained * 4 / 6
    assert saved == 2 * config.vocab_size * config.hidden_size
    assert without({name for name in names if "norm" in name}) == trained


def test_training_a_head_beside_adapters_counts():
    config = TransformerConfig.preset("smollm2-135m").with_adapter(AdapterConfig(rank=8))
    names = {name for name, parameter in declare(config).items() if parameter.frozen}
    alone = flops_per_step(config, 1, 0)
    assert flops_per_step(config, 1, 0, frozen_weights(config, names)) == alone
    others = frozen_weights(config, names - {"embed_tokens.weight"})
    assert flops_per_step(config, 1, 0, others) - alone == 2 * 49152 * 576


def test_adapters_of_experts_count_where_there_are_experts():
    adapter = AdapterConfig(rank=4, targets=("q_proj", "gate_proj", "up_proj", "down_proj"))
    config = dataclasses.replace(TransformerConfig.preset("glm-4.5"), adapter=adapter)
    assert config.num_experts_per_tok
    used = sum(
        math.prod(x.shape)
        * (config.num_experts_per_tok / config.num_experts if "experts" in x.axes else 1)
        for name, x in declare(config).items()
        if name.endswith(("lora_A", "lora_B"))
    )
    without = dataclasses.replace(config, adapter=None)
    added = flops_per_step(config, 1, 0, frozen=0) - flops_per_step(without, 1, 0, frozen=0)
    assert added == pytest.approx(6 * used)
