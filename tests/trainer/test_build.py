"""Tests of trainer/build.py: which attention window a run has."""

import pytest

from model.attention import Mask
from model.attention.options import AttentionConfig
from model.families import FAMILIES
from model.rope_config import RopeConfig
from tests.model.build import mesh_of, tiny
from trainer.build import build_language_model, run_notes
from trainer.config.data import DataConfig
from trainer.config.schema import MeshConfig, RunConfig

GLOBAL = RunConfig(attention=AttentionConfig(global_tokens=4))
LAYERS = {
    "num_hidden_layers": 2,
    "layer_types": ("sliding_attention", "full_attention"),
    "sliding_window": 9,
}


def test_global_tokens_work_with_the_models_own_window():
    built = build_language_model(GLOBAL, tiny(family="mistral", sliding_window=9), mesh_of({}))
    assert built.mask == Mask(window=9, global_tokens=4)


def test_global_tokens_work_when_only_some_layers_have_a_window():
    gemma = tiny(
        family="gemma3_text", **FAMILIES["gemma3_text"].computes, **LAYERS, local_rope=RopeConfig()
    )
    built = build_language_model(GLOBAL, gemma, mesh_of({}))
    assert [built.attention(kind.window).mask for kind in gemma.layer_kinds] == [
        Mask(window=9, global_tokens=4),
        Mask(),
    ]


def test_global_tokens_without_any_window_are_refused():
    with pytest.raises(
        ValueError, match=r"^attention\.global_tokens is 4; .* set attention\.window, or use 0$"
    ):
        build_language_model(GLOBAL, tiny(), mesh_of({}))


@pytest.mark.parametrize(("key_heads", "advised"), [(2, True), (8, False)])
def test_advice_that_saves_more_than_a_window_depends_on_the_models_heads(key_heads, advised):
    config = RunConfig(
        attention=AttentionConfig(schedule="ulysses", window=100),
        mesh=MeshConfig(sequence=8),
        data=DataConfig(context_length=512),
    )
    (line,) = run_notes(config, tiny(num_key_value_heads=key_heads, head_dim=64))
    assert ("2 other devices" in line) == advised
