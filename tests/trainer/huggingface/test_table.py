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
