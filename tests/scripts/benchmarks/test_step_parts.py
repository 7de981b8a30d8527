"""The parts of a step: both sides measure the same ones, and their products are all that a step has."""

import json

import pytest

from model.config import TransformerConfig
from scripts.benchmarks import step_parts
from scripts.benchmarks.summaries import step_parts as summarize
from trainer.flops import flops_per_step

SMALL = TransformerConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)


def test_products_are_those_of_a_step():
    """Forward and, twice as many, backward; without attention, which has no pair of tokens here."""
    flops = 3 * sum(product.flops(16) for product in step_parts.products(SMALL))
    assert flops == pytest.approx(flops_per_step(SMALL, 16, 0), rel=1e-12)


def test_both_sides_measure_the_same_parts(monkeypatch, tmp_path):
    monkeypatch.setattr(step_parts, "REPEATS", 1)
    ours, torch = step_parts.parts_of_ours(SMALL, 16), step_parts.parts_of_torch(SMALL, 16)
    assert list(ours) == list(torch) and min(*ours.values(), *torch.values()) > 0
    rows = [
        {
            "part": part,
            **{
                side: {"median": seconds[part], "spread": 0.0}
                for side, seconds in (("ours", ours), ("torch", torch))
            },
        }
        for part in ours
    ]
    total = {
        side: {"median": sum(seconds.values()), "spread": 0.0}
        for side, seconds in (("ours", ours), ("torch", torch))
    }
    (tmp_path / "step_parts.json").write_text(json.dumps([*rows, {"part": "all parts", **total}]))
    summary, tables = summarize(tmp_path)
    assert {"products", "attention", "norms", "clipAdamW", "allparts"} <= set(summary)
    assert len(tables["parts"]["rows"]) == len(ours) + 1
