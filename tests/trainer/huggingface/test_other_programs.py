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


def test_a_mixtral_with_yarn_gives_its_head_size(tmp_path):
    """transformers 5.24 fails on null there, as it writes, except under the plain rule."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_hidden_layers": 1}
    source = transformers.MixtralConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2
    ).to_dict()
    source |= {"architectures": ["MixtralForCausalLM"]}
    assert source["head_dim"] is None
    (tmp_path / "config.json").write_text(json.dumps(source))
    longer = TransformerConfig.from_hf(tmp_path).with_positions(
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    )
    write_config(longer, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["head_dim"] == 8
    transformers.MixtralForCausalLM(transformers.AutoConfig.from_pretrained(tmp_path))


def test_solar_open_says_that_whole_heads_are_rotated(tmp_path):
    """llama.cpp rotates half of each otherwise: logits differ by 4.6 then, and by 5e-6 with it."""
    config = TransformerConfig.preset("solar-open-100b")
    for rope in (config.rope, yarn()):
        written = dataclasses.replace(config, rope=rope).to_hf()
        assert written["partial_rotary_factor"] == 1.0
        assert TransformerConfig.from_hf_dict(written).rope == rope
        (tmp_path / "config.json").write_text(json.dumps(written))
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        assert theirs.rope_parameters["partial_rotary_factor"] == 1.0


def test_ministral_says_how_queries_grow_where_vllm_reads_it(tmp_path):
    """Outside of rope_parameters, where transformers keeps it and does not read it."""
    config = TransformerConfig.preset("ministral-3-8b")
    written = config.to_hf()
    scaling = {"beta": 0.1, "original_max_position_embeddings": 16384}
    assert written["llama_4_scaling"] == scaling
    (tmp_path / "config.json").write_text(json.dumps(written))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.llama_4_scaling == scaling
    assert TransformerConfig.from_hf_dict(written) == config
    constant = dataclasses.replace(config, llama_4_scaling_beta=0.0)
    assert "llama_4_scaling" not in constant.to_hf()


def test_ministral_extended_by_training_names_its_new_length(tmp_path):
    """Also if the source's config.json has the older one."""
    config = TransformerConfig.preset("ministral-3-8b")
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    longer = config.with_positions(
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 65536,
            "llama_4_scaling_beta": 0.1,
        }
    )
    write_config(longer, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert written["llama_4_scaling"]["original_max_position_embeddings"] == 65536


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


def longrope(pairs, length):
    """Changes of a model to a rule under which it attends to four times its own length."""
    factors = {"short_factor": (1.0,) * pairs, "long_factor": (2.0,) * pairs}
    rope = RopeConfig("longrope", factor=4.0, original_max_position_embeddings=length, **factors)
    return {"rope": rope, "max_position_embeddings": 4 * length}


PLAIN = 0.1 * math.log(4) + 1


@pytest.mark.parametrize(
    ("rope", "ours", "theirs"),
    [
        (yarn(), None, {}),
        (yarn(attention_factor=1.5), 1.5, dict.fromkeys(("llama.cpp", "SGLang", "mlx-lm"), PLAIN)),
        (yarn(attention_factor=PLAIN), None, {}),
        (yarn(mscale=1.0, mscale_all_dim=1.0), 1.0, {"llama.cpp": PLAIN}),
        (
            yarn(mscale=1.0, mscale_all_dim=1.0, attention_factor=1.5),
            1.5,
            {"llama.cpp": PLAIN, "SGLang": 1.0, "mlx-lm": 1.0},
        ),
        (LLAMA3, None, {}),
        (RopeConfig(), None, {}),
    ],
    ids=str,
)
def test_a_scale_of_yarn_that_others_do_not_compute_is_named(tmp_path, rope, ours, theirs):
    """llama.cpp's logits differ so: by 1.07 for an attention_factor of 1, by 4e-6 without one."""
    lines = other_programs.of_model(dataclasses.replace(CONFIG, rope=rope), tmp_path, False)
    assert len(lines) == bool(theirs)
    for line in lines:
        assert f"instead of {ours:.4f}" in line
        assert all(f"{scale:.4f} in {program}" in line for program, scale in theirs.items())


@pytest.mark.parametrize("factor", [None, 1.25])
@pytest.mark.parametrize(
    ("family", "programs"), [("phi3", "vLLM and llama.cpp"), ("llama", "vLLM")]
)
def test_a_scale_of_longrope_that_others_do_not_compute_is_named(
    tmp_path, family, programs, factor
):
    """llama.cpp reads the rule itself only in Phi-3."""
    rope = dataclasses.replace(small_model.LONGROPE.rope, attention_factor=factor)
    config = dataclasses.replace(small_model.LONGROPE, family=family, rope=rope)
    lines = [
        line for line in other_programs.of_model(config, tmp_path, False) if "the scale of" in line
    ]
    theirs = math.sqrt(1 + math.log(4) / math.log(128))
    assert len(lines) == (factor is not None)
    assert all(f"{theirs:.4f} in {programs}, by" in line for line in lines)
    assert all(line.endswith("instead of 1.2500") for line in lines)


MLX_WINDOW = "Gemma2ForCausalLM: sliding_window is not read by mlx-lm"
NO_RULE = "not read in {}ForCausalLM by {}, where it is another"
NO_CORRECTION = "e_score_correction_bias is not read by SGLang, mlx-lm, where other"


@pytest.mark.parametrize(
    ("preset", "changes", "words"),
    [
        # Logits in llama.cpp and mlx-lm are those of the model without these fields.
        ("mistral-7b-v0.1", {}, ["sliding_window is not read by llama.cpp, SGLang, mlx-lm"]),
        ("mistral-7b-v0.3", {}, []),
        ("phi-3-mini-4k", {}, ["tokens attend to more than 2047"]),
        ("phi-3-mini-4k", {"max_position_embeddings": 2047}, []),
        ("gemma-3-1b", {}, []),
        ("gemma-2-2b", {}, [MLX_WINDOW]),
        (
            "gemma-2-2b",
            {"rope": RopeConfig(theta=1e6)},
            ["rope_theta nor rope_scaling of Gemma2", MLX_WINDOW],
        ),
        (
            "gemma-2-2b",
            {"rope": yarn()},
            [
                "rope_theta nor rope_scaling of Gemma2",
                NO_RULE.format("Gemma2", "SGLang, mlx-lm"),
                MLX_WINDOW,
            ],
        ),
        ("qwen3-0.6b", {"rope": LLAMA3}, [NO_RULE.format("Qwen3", "llama.cpp")]),
        ("qwen3-0.6b", {"rope": yarn()}, []),
        ("qwen3-30b-a3b", {}, []),
        ("qwen3-30b-a3b", {"rope": yarn()}, [NO_RULE.format("Qwen3Moe", "mlx-lm")]),
        ("qwen3-30b-a3b", {"rope": LLAMA3}, [NO_RULE.format("Qwen3Moe", "llama.cpp, mlx-lm")]),
        (
            "qwen3-30b-a3b",
            {"rope": RopeConfig("dynamic", factor=4.0)},
            [NO_RULE.format("Qwen3Moe", "mlx-lm"), "vLLM and llama.cpp do not stretch"],
        ),
        (
            "qwen3-30b-a3b",
            {"rope": yarn(attention_factor=1.5)},
            [
                NO_RULE.format("Qwen3Moe", "mlx-lm"),
                f"{PLAIN:.4f} in llama.cpp, {PLAIN:.4f} in SGLang, instead of",
            ],
        ),
        (
            "mixtral-8x7b",
            {"rope": yarn(truncate=False)},
            [
                NO_RULE.format("Mixtral", "SGLang, mlx-lm"),
                "truncate: false is not read by llama.cpp, whose",
            ],
        ),
        ("glm-4-9b", {"rope": yarn()}, [NO_RULE.format("Glm4", "mlx-lm")]),
        ("ernie-4.5-0.3b", {"rope": yarn()}, [NO_RULE.format("Ernie4_5", "mlx-lm")]),
        ("solar-open-100b", {"rope": yarn()}, [NO_RULE.format("SolarOpen", "mlx-lm")]),
        ("glm-4.5-air", {}, []),
        ("glm-4.5-air", {"rope": yarn()}, [NO_RULE.format("Glm4Moe", "mlx-lm")]),
        ("ernie-4.5-21b-a3b", {}, [NO_CORRECTION]),
        (
            "ernie-4.5-21b-a3b",
            {"rope": yarn()},
            [NO_RULE.format("Ernie4_5_Moe", "mlx-lm"), NO_CORRECTION],
        ),
        ("granite-3.1-3b-a800m", {"rope": yarn()}, [NO_RULE.format("GraniteMoe", "SGLang")]),
        ("granite-3.3-8b", {"rope": yarn()}, []),
        ("llama-7b", longrope(64, 2048), [NO_RULE.format("Llama", "llama.cpp")]),
        ("gpt-oss-20b", {}, ["truncate: false is not read by llama.cpp, mlx-lm, whose"]),
        ("ministral-3-8b", {}, []),  # llama.cpp reads its mscale_all_dim
    ],
)
def test_a_window_and_rope_that_others_do_not_read_are_named(tmp_path, preset, changes, words):
    config = dataclasses.replace(TransformerConfig.preset(preset), **changes)
    lines = other_programs.of_model(config, tmp_path, False)
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True)), lines


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
        ({}, []),
        ({"rank_pattern": {"qkv_proj": 48, "gate_up_proj": 32}}, ["--max-lora-rank 64; llama.cpp"]),
        ({"r": 200, "rank_pattern": {"qkv_proj": 600}}, ["has no such --max-lora-rank"]),
        # With transformers 4.57 and peft 0.17 logits are those without it, but for gpt-oss.
        (
            {"target_parameters": ["mlp.experts.down_proj"]},
            [
                "vLLM does not load adapters of experts or routers, nor does peft with transformers 4"
            ],
        ),
        ({"target_parameters": None, "modules_to_save": None}, []),
        # In llama.cpp logits differ from peft's by 3.9, 4.0 and, with a rank_pattern, 2.2.
        ({"use_rslora": True}, ["scale the adapter by alpha / rank"]),
        ({"modules_to_save": ["norm"]}, ["vLLM does not load modules_to_save (norm)"]),
        ({"use_rslora": True, "target_parameters": ["mlp.gate.weight"]}, ["alpha / rank", "vLLM"]),
    ],
)
def test_what_others_need_for_an_adapter_or_leave_out(config, words):
    lines = other_programs.of_adapter({"r": 16, "rank_pattern": {}, **config})
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True))
