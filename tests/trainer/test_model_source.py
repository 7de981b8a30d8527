"""Tests of trainer/model_source.py: what a shape from scratch takes from its preset and what from the recipe."""

import dataclasses

import pytest

from model.config import LlamaConfig
from trainer.config import ModelConfig
from trainer.model_source import choose_model


@pytest.fixture
def chosen(repository):
    def choose(preset, **overrides):
        tokenizer = str(repository / "data/fixtures/tiny_tokenizer")
        return choose_model(ModelConfig(preset=preset, tokenizer=tokenizer, overrides=overrides)).config

    return choose


def test_rope_theta_leaves_the_rest_of_the_preset(chosen):
    preset = LlamaConfig.preset("llama-3.1-8b")
    found = chosen("llama-3.1-8b", rope_theta=100)
    assert found.to_hf()["rope_theta"] == 100 != preset.rope.theta
    assert dataclasses.replace(found.rope, theta=preset.rope.theta) == preset.rope
    assert (found.hidden_size, found.num_key_value_heads) == (preset.hidden_size, preset.num_key_value_heads)


def test_rope_theta_that_is_none(chosen):
    with pytest.raises(ValueError, match="rope_theta: -1"):
        chosen("tiny", rope_theta=-1)


@pytest.mark.parametrize(("preset", "overrides", "heads", "key_heads", "head_dim"), [
    ("llama-7b", {"hidden_size": 2048}, 32, 32, 64),
    ("llama-7b", {"num_attention_heads": 16}, 16, 16, 256),
    ("llama-3.1-8b", {"num_attention_heads": 16}, 16, 8, 256),
    ("llama-3.1-8b", {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}, 16, 4, 128),
    ("smollm2-135m", {"hidden_size": 1152}, 9, 3, 128),
    ("tiny", {"hidden_size": 128}, 4, 2, 32),  # names its head_dim
    (None, {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}, 4, 2, 8),
])  # fmt: skip
def test_what_a_preset_names_stays_and_what_it_leaves_out_follows(chosen, preset, overrides, heads, key_heads, head_dim):
    found = chosen(preset, **overrides)
    assert (found.num_attention_heads, found.num_key_value_heads, found.head_dim) == (heads, key_heads, head_dim)


def test_key_heads_that_do_not_divide_the_heads_are_refused(chosen):
    with pytest.raises(ValueError, match="num_key_value_heads: 8 does not divide num_attention_heads 12; these do: 1, 2, 3"):
        chosen("llama-3.1-8b", num_attention_heads=12, hidden_size=768)
