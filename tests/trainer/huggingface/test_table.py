"""Which tensors of a Hugging Face folder are which parameters."""

import pytest

from model.config import TransformerConfig
from trainer.huggingface import table


def tensors(layout):
    """Returns the names of all tensors of a layout."""
    return [name for entry in layout for name in entry.file_tensors()]


@pytest.mark.parametrize("is_stacked", [False, True])
def test_stacked_and_separate_experts_are_told_apart(is_stacked):
    config = TransformerConfig.preset("mixtral-8x7b")
    expected = table.hf_layout(config, stacked=is_stacked)
    assert table.layout_of(tensors(expected), config) == expected
    other = table.hf_layout(config, stacked=not is_stacked)
    assert table.layout_of(tensors(other), config) != expected


def test_a_folder_of_many_tensors_is_laid_out_at_once(monkeypatch):
    """A layout takes tenths of a second, which a mixture's thousands of tensors once multiplied."""
    config = TransformerConfig.preset("mixtral-8x7b")
    names = tensors(table.hf_layout(config))
    calls, layout = [], table.hf_layout
    monkeypatch.setattr(
        table, "hf_layout", lambda *args, **options: calls.append(args) or layout(*args, **options)
    )
    table.layout_of(names, config)
    assert len(names) > 900
    assert len(calls) <= 2


def test_parameters_are_in_order_of_use():
    layer = [
        "input_layernorm",
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        "post_attention_layernorm",
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    ]
    names = [
        "model.embed_tokens",
        *(f"model.layers.{{i}}.{name}" for name in layer),
        "model.norm",
        "lm_head",
    ]
    layout = table.hf_layout(TransformerConfig.preset("llama-3.1-8b"))
    assert [entry.hf_name for entry in layout] == [f"{name}.weight" for name in names]
