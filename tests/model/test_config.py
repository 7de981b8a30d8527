"""TransformerConfig against transformers' LlamaConfig, its presets, and what it refuses."""

import copy
import dataclasses
import json

import pytest
import transformers

from model.adapter import AdapterConfig
from model.config import TransformerConfig
from model.rope_config import RopeConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
NAMES = [
    "llama-1b",
    "llama-3b",
    "llama-7b",
    "llama-13b",
    "llama-30b",
    "llama-65b",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "smollm2-135m",
    "tiny",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_round_trips_and_matches_transformers(name):
    config = TransformerConfig.preset(name)
    assert hash(config) == hash(TransformerConfig.preset(name))
    assert TransformerConfig.from_hf_dict(json.loads(json.dumps(config.to_hf()))) == config
    theirs = transformers.LlamaConfig(**config.to_hf())
    for field in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ):
        assert getattr(theirs, field) == getattr(config, field)
    assert theirs.rope_parameters["rope_theta"] == config.rope.theta
    assert theirs.rope_parameters["rope_type"] == config.rope.rule


def test_a_config_saved_by_transformers_is_read(tmp_path):
    theirs = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=32,
        rope_theta=5e5,
        rope_scaling=dict(LLAMA3),
        architectures=["LlamaForCausalLM"],
        eos_token_id=[1, 7],
    )
    theirs.save_pretrained(tmp_path)
    config = TransformerConfig.from_hf(tmp_path)
    assert config.rope == RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 8192)
    assert (config.head_dim, config.num_key_value_heads, config.eos_token_id) == (32, 4, (1, 7))


def test_the_architecture_name_of_llama_1_conversions_is_read():
    named = TransformerConfig.from_hf_dict(
        {"architectures": ["LLaMAForCausalLM"], "model_type": "llama", "hidden_size": 64}
    )
    assert named == TransformerConfig.from_hf_dict({"model_type": "llama", "hidden_size": 64})
    assert named.to_hf()["architectures"] == ["LlamaForCausalLM"]


def test_a_text_parts_own_fields_come_first():
    text = {"model_type": "mistral", "bos_token_id": 5}
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": text,
        "bos_token_id": 7,
        "eos_token_id": 9,
    }
    theirs = transformers.Mistral3Config(text_config=text, bos_token_id=7).text_config
    read = TransformerConfig.from_hf_dict(config)
    assert (read.bos_token_id, read.eos_token_id) == (theirs.bos_token_id, 9) == (5, 9)
    del text["bos_token_id"]
    assert TransformerConfig.from_hf_dict(config).bos_token_id == 7


def test_full_attention_in_each_layer_may_be_named():
    config = {"model_type": "llama", "num_hidden_layers": 2}
    named = {**config, "layer_types": ["full_attention"] * 2}
    assert TransformerConfig.from_hf_dict(named) == TransformerConfig.from_hf_dict(config)
    for changes in (
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"model_type": "mistral", "sliding_window": 9},
    ):
        with pytest.raises(ValueError, match=r"^layer_types: found"):
            TransformerConfig.from_hf_dict({**named, **changes})


def test_a_base_of_rope_in_one_spelling_is_not_the_others():
    """In transformers the scaling then has the default base."""
    linear = {"rope_type": "linear", "factor": 2.0}
    both = {"rope_scaling": linear, "rope_parameters": {**linear, "rope_theta": 2e4}}
    theirs = transformers.LlamaConfig(**copy.deepcopy(both))  # which changes its arguments
    assert theirs.rope_parameters["rope_theta"] == 1e4
    with pytest.raises(
        ValueError, match=r"theta 20000.0 and 10000.0 \(rope_scaling has no rope_th"
    ):
        TransformerConfig.from_hf_dict({"model_type": "llama", **both})


def test_all_spellings_of_rope_are_read():
    base = {"model_type": "llama"}
    old = TransformerConfig.from_hf_dict({**base, "rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = TransformerConfig.from_hf_dict({**base, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}})
    older = {("type" if key == "rope_type" else key): value for key, value in LLAMA3.items()}
    assert (
        old
        == new
        == TransformerConfig.from_hf_dict({**base, "rope_theta": 5e5, "rope_scaling": older})
    )
    assert TransformerConfig.from_hf_dict({**base, "rope_scaling": None}).rope == RopeConfig()


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            ["architectures", "GPT2LMHeadModel", "LlamaForCausalLM"],
        ),
        (
            {"architectures": ["DeepseekV3ForCausalLM"]},
            ["DeepseekV3ForCausalLM", "mixtures of experts", "MistralForCausalLM"],
        ),
        (
            {"architectures": ["Qwen2VLForConditionalGeneration"]},
            ["images", "Gemma3ForConditionalGeneration", "Qwen2ForCausalLM"],
        ),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            ["text_config", "None", "Gemma3ForConditionalGeneration"],
        ),
        (
            {
                "architectures": ["Mistral3ForConditionalGeneration"],
                "text_config": {"model_type": "pixtral"},
            },
            ["text_config.model_type", "pixtral", "ministral3"],
        ),
        (
            {
                "architectures": ["Mistral3ForConditionalGeneration"],
                "text_config": {"model_type": ["mistral"]},
            },
            ["text_config.model_type", "['mistral']", "mistral"],
        ),
        (
            {
                "architectures": ["Mistral3ForConditionalGeneration"],
                "text_config": {"model_type": 0},
            },
            ["text_config.model_type", "0", "mistral"],
        ),
        (
            {"architectures": ["DeepseekV3ForCausalLM"]},
            ["DeepseekV3ForCausalLM", "mixtures of experts"],
        ),
        ({"architectures": ["Qwen3ForCausalLM"]}, ["model_type", "'llama'", "'qwen3'"]),
        ({"model_type": "gpt2"}, ["model_type", "gpt2", "llama"]),
        ({"sliding_window": 128}, ["sliding_window", "128"]),
        ({"residual_multiplier": 0.2}, ["residual_multiplier", "0.2", "LlamaForCausalLM"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"pretraining_tp": 2}, ["pretraining_tp", "2", "1"]),
        ({"attention_dropout": 0.1}, ["attention_dropout", "0.1", "set it to 0"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"quantization": {"group_size": 64, "bits": 4}}, ["quantization: quant_method", "None"]),
        (
            {"compression_config": {"quant_method": "compressed-tensors"}},
            ["compression_config: quant_method", "'compressed-tensors'", "unquantized"],
        ),
        (
            {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}},
            ["rope_scaling", "proportional", "yarn"],
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            ["rope_scaling", "short_factor", "longrope"],
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "factor": 2.0,
                    "short_factor": [1.0],
                    "long_factor": [1.0, 2.0],
                }
            },
            ["rope_scaling.short_factor", "1 numbers", "64"],
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor", "missing", "linear"]),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": "two"}},
            ["rope_scaling.factor", "two"],
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0}},
            ["beta_fast", "1.0", "beta_slow"],
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": 1}},
            ["truncate", "1", "true or false"],
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 2},
            ["head_dim", "2", "dynamic"],
        ),
        ({"rope_parameters": {"rope_type": "spiral"}}, ["rope_parameters", "spiral", "default"]),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, ["factor", "missing"]),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}},
            ["contradict", "rule 'default' and 'llama3'"],
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 2e4}},
            ["rope_theta", "10000.0", "20000.0"],
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 5, "head_dim": 8},
            ["num_key_value_heads", "5", "1, 2, 3, 4, 6, 12"],
        ),
        ({"hidden_size": 100, "num_attention_heads": 32}, ["head_dim", "100", "32"]),
        ({"head_dim": 33}, ["head_dim", "33", "even"]),
        ({"vocab_size": None}, ["vocab_size", "null"]),
        ({"num_hidden_layers": "many"}, ["num_hidden_layers", "many"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings", "no"]),
    ],
)
def test_an_unsupported_field_is_refused_by_name(change, words):
    with pytest.raises(ValueError) as caught:
        TransformerConfig.from_hf_dict({"model_type": "llama", **change})
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


def test_invalid_folders_and_presets_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        TransformerConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match="not valid JSON"):
        TransformerConfig.from_hf(tmp_path)
    with pytest.raises(ValueError, match=r"llama-1b.*tiny"):
        TransformerConfig.preset("llama-8b")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": 3}, "architectures: found 3; needs a list"),
        ({"architectures": True}, "architectures: found True; needs a list"),
        (
            {
                "rope_theta": [1e4],
                "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            },
            "rope_theta",
        ),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": [1]},
            },
            "rope_theta",
        ),
        ({"rope_parameters": [1]}, r"rope_parameters: found \[1\]; needs an object or null"),
        ({"rope_scaling": 1.5}, "rope_scaling: found 1.5; needs an object or null"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps: 10+ is not a number above 0"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_theta": 1e39}, "rope_theta: 1e[+]39 is not a number that float32 holds"),
        ({"rms_norm_eps": 1e-45}, "rms_norm_eps: 1e-45 is not a number that float32 holds"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: found 1000000000; up to 10,000 would"),
        ({"max_position_embeddings": 2**70}, "[0-9]+ is not a whole number of at most 2,147,483,6"),
        ({"eos_token_id": 2**70}, "eos_token_id: [0-9]+ is not a token id"),
    ],
)
def test_a_value_of_a_wrong_type_names_the_field(fields, words):
    with pytest.raises(ValueError, match=words):
        TransformerConfig.from_hf_dict({"model_type": "llama", **fields})


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        (
            "gemma2",
            {"num_hidden_layers": "26"},
            "num_hidden_layers: '26' is not a whole number of at least 1",
        ),
        (
            "gemma3_text",
            {"num_hidden_layers": None},
            "num_hidden_layers: None is not a whole number",
        ),
        (
            "gemma3_text",
            {"sliding_window_pattern": "6"},
            "sliding_window_pattern: '6' is not a whole number",
        ),
        (
            "smollm3",
            {"no_rope_layer_interval": 0},
            "no_rope_layer_interval: 0 is not a whole number of at least 1",
        ),
        (
            "llama",
            {"quantization_config": "nf4"},
            "quantization_config: found 'nf4'; needs an object or null",
        ),
        (
            "gemma3_text",
            {"rope_scaling": [1]},
            r"rope_scaling: found \[1\]; needs an object or null",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": 5}},
            "rope_parameters.full_attention: found 5; needs an object",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_parameters: found 'rope_type'; objects full_attention and sliding_attention",
        ),
        ("mixtral", {"num_local_experts": 2.5}, "num_local_experts: 2.5 is not"),
        ("qwen2_moe", {"qkv_bias": None}, "qkv_bias: found null"),
        ("solar_open", {"n_routed_experts": None}, "n_routed_experts: found null"),
        ("qwen3", {"layer_types": 5}, "layer_types: found 5; a list of names or null would work"),
        ("qwen3", {"layer_types": [[1]]}, "layer_types: found .*; a list of names"),
        ("smollm3", {"no_rope_layers": "1110"}, "no_rope_layers: found '1110'; a list of numbers"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": "8k"}},
            "rope_scaling.original_max_position_embeddings: '8k' is not a number",
        ),
    ],
)
def test_a_familys_value_of_a_wrong_type_names_the_field(family, fields, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        TransformerConfig.from_hf_dict({"model_type": family, **fields})


def test_changing_positions_keeps_the_adapter():
    config = TransformerConfig(adapter=AdapterConfig(rank=4))
    assert config.with_positions(rope_theta=5e5) == dataclasses.replace(
        config, rope=RopeConfig(theta=5e5)
    )


def test_changing_positions_keeps_the_rope_of_windowed_layers():
    local = RopeConfig("linear", 2e4, 8.0)
    config = TransformerConfig.preset("gemma-3-1b", local_rope=local)
    assert config.with_positions(
        rope_theta=5e5, rope_scaling={"rope_type": "linear", "factor": 2.0}
    ) == dataclasses.replace(config, rope=RopeConfig("linear", 5e5, 2.0))


def test_windowed_layers_share_rope_unless_they_have_their_own():
    config = TransformerConfig.preset("gemma-3-1b", local_rope=None)
    assert TransformerConfig.from_hf_dict(config.to_hf()).layer_kinds == config.layer_kinds


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"local_rope": {"theta": 1e4}}, "local_rope: {'theta': 10000.0} is not a RopeConfig"),
        (
            {
                "local_rope": RopeConfig(
                    "longrope",
                    factor=2.0,
                    short_factor=(1.0,),
                    long_factor=(1.0,),
                    original_max_position_embeddings=8,
                )
            },
            "local_rope.short_factor: found 1 numbers; 256 rotated",
        ),
    ],
)
def test_the_rope_of_windowed_layers_is_validated(changes, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        TransformerConfig.preset("gemma-3-1b", **changes)


def test_the_rope_of_windowed_layers_is_scaled_from_the_models_length():
    config = TransformerConfig.preset("gemma-3-1b", local_rope=RopeConfig("dynamic", factor=2.0))
    assert config.local_rope.original_max_position_embeddings == config.max_position_embeddings
    longer = config.with_positions(max_position_embeddings=65536)
    assert longer.local_rope.original_max_position_embeddings == 65536


def test_a_config_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"model_type": "ll\xffama"}')
    with pytest.raises(ValueError, match=rf"^{tmp_path}/config\.json: not UTF-8"):
        TransformerConfig.from_hf(tmp_path)


@pytest.mark.parametrize("depth", [1000, 100_000])
def test_a_deeply_nested_config_is_named(tmp_path, depth):
    (tmp_path / "config.json").write_text('{"a": ' * depth + "1" + "}" * depth)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/config\.json: "):
        TransformerConfig.from_hf(tmp_path)
