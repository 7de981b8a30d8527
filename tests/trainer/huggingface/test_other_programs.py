"""An export names what other programs compute otherwise, by formulas in their code."""

import dataclasses
import json
import math

import pytest
import transformers

from model.config import TransformerConfig
from model.rope_config import RopeConfig
from scripts import export_hf, import_hf
from tests import small_model
from trainer.huggingface import other_programs
from trainer.huggingface.assets import write_config

CONFIG = small_model.CONFIG
LLAMA3 = RopeConfig(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


def exported(folder, config, *flags):
    """Imports and exports a small model; returns the export."""
    folder.mkdir()
    source = small_model.write(folder, config)
    assert import_hf.main([str(source), str(folder / "checkpoint")]) == 0
    assert export_hf.main([str(folder / "checkpoint"), str(folder / "out"), *flags]) == 0
    return folder / "out"


def test_llama3_has_its_original_length_where_llama_cpp_reads_it(tmp_path):
    """Beside rope_scaling, which both versions of transformers accept."""
    out = exported(tmp_path / "model", dataclasses.replace(CONFIG, rope=LLAMA3))
    written = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert written["original_max_position_embeddings"] == 64
    assert written["rope_scaling"]["original_max_position_embeddings"] == 64
    assert TransformerConfig.from_hf_dict(written).rope == LLAMA3
    theirs = transformers.AutoConfig.from_pretrained(out)
    assert theirs.rope_parameters["original_max_position_embeddings"] == 64


@pytest.mark.parametrize("source", [{}, {"original_max_position_embeddings": 8192}])
def test_llama3_of_8192_tokens_has_it_there_only_if_its_source_has(tmp_path, source):
    """llama.cpp takes 8192 by default; transformers writes the field only if it was there."""
    rope = dataclasses.replace(LLAMA3, original_max_position_embeddings=8192)
    config = dataclasses.replace(CONFIG, rope=rope, max_position_embeddings=131072)
    (tmp_path / "config.json").write_text(json.dumps({**config.to_hf(), **source}))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    write_config(config, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    name = "original_max_position_embeddings"
    assert (name in written) == (name in theirs.to_dict()) == bool(source)
    assert TransformerConfig.from_hf_dict(written) == config


def test_an_import_that_is_exported_says_that_its_base_is_unknown(tmp_path, capfd):
    dynamic = dataclasses.replace(CONFIG, rope=RopeConfig("dynamic", factor=4.0))
    out = exported(tmp_path / "model", dynamic)
    error = capfd.readouterr().err
    assert "imported and not trained, and does not record from which model" in error
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "Converted with Longstripe, without training." in card
    assert "- Base model: not recorded" in card and "Step" not in card and "scratch" not in card
    assert "out: rope_type dynamic: vLLM and llama.cpp do not stretch RoPE by it" in error

    out = exported(tmp_path / "named", CONFIG, "--base", "org/base")
    assert "imported and not trained" not in capfd.readouterr().err
    assert "- Base model: org/base" in (out / "README.md").read_text(encoding="utf-8")


def yarn(**numbers):
    return RopeConfig("yarn", factor=4.0, original_max_position_embeddings=32, **numbers)


@pytest.mark.parametrize(
    ("rope", "scale"),
    [
        (yarn(), None),
        # vLLM: 0.1 ln(factor) + 1, and of these numbers only attn_factor.
        (yarn(attention_factor=1.5), 1.5),
        (yarn(attention_factor=0.1 * math.log(4) + 1), None),
        (yarn(mscale=1.0, mscale_all_dim=1.0), 1.0),
        (dataclasses.replace(small_model.LONGROPE.rope, attention_factor=1.25), 1.25),
        (small_model.LONGROPE.rope, None),
        (LLAMA3, None),
        (RopeConfig(), None),
    ],
    ids=str,
)
def test_a_scale_of_attention_that_others_do_not_compute_is_named(tmp_path, rope, scale):
    length = 4 * (rope.original_max_position_embeddings or 32)
    config = dataclasses.replace(CONFIG, rope=rope, max_position_embeddings=length)
    lines = other_programs.of_model(config, tmp_path, False)
    if scale is None:
        assert lines == []
        return
    theirs = (
        0.1 * math.log(4) + 1
        if rope.rule == "yarn"
        else math.sqrt(1 + math.log(4) / math.log(rope.original_max_position_embeddings))
    )
    (line,) = lines
    assert f"{theirs:.4f}" in line and line.endswith(f"instead of {scale:.4f}")


@pytest.mark.parametrize(
    ("family", "stacked", "named"),
    [("mixtral", True, True), ("mixtral", False, False), ("gpt_oss", True, False)],
)
def test_experts_in_one_tensor_are_named_unless_they_are_published_so(
    tmp_path, family, stacked, named
):
    preset = {"mixtral": "mixtral-8x7b", "gpt_oss": "gpt-oss-20b"}[family]
    lines = other_programs.of_model(TransformerConfig.preset(preset), tmp_path, stacked)
    assert any("transformers 4 draws the experts at random" in line for line in lines) == named


def test_a_tokenizer_of_transformers_5_is_named(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    (line,) = other_programs.of_model(CONFIG, tmp_path, False)
    assert "TokenizersBackend" in line


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"r": 16, "rank_pattern": {}}, None),
        ({"r": 16, "rank_pattern": {"qkv_proj": 48, "gate_up_proj": 32}}, "--max-lora-rank 64"),
        ({"r": 200, "rank_pattern": {"qkv_proj": 600}}, "has no such --max-lora-rank"),
        ({"r": 16, "rank_pattern": {}, "target_parameters": ["mlp.gate.weight"]}, "--merge"),
        ({"r": 16, "rank_pattern": {}, "target_parameters": None}, None),
    ],
)
def test_what_vllm_needs_for_an_adapter(config, words):
    lines = other_programs.of_adapter(config)
    assert len(lines) == (words is not None) and all(words in line for line in lines)
