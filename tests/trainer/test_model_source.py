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
