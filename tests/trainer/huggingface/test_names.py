"""Folders whose tensors have other names than `...ForCausalLM`: models of images, models without a
head, wrapped models; checked with transformers."""

import json
import shutil

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from scripts import export_hf, import_hf
from tests.model.build import llama, one_document
from trainer.huggingface import peft
from trainer.model_source import open_model

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
# Fields of config.json beside `text_config`, and of `text_config`, as in published models.
WHOLE = {
    "gemma3": (
        {"eos_token_id": [1, 106], "mm_tokens_per_image": 4},
        {
            "model_type": "gemma3_text",
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 9,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 12,
        },
        {"model_type": "siglip_vision_model"},
    ),
    "mistral3": (
        {"tie_word_embeddings": False},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "pixtral", "head_dim": 8},
    ),
    "mistral3 of ministral3": (
        {},
        {
            "model_type": "ministral3",
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
        {"model_type": "pixtral", "head_dim": 8},
    ),
    "llava": (
        {},
        {"model_type": "llama", "tie_word_embeddings": True, "sliding_window": None},
        {"model_type": "clip_vision_model"},
    ),
    "qwen3_vl": (
        {"tie_word_embeddings": True},
        {
            "model_type": "qwen3_vl_text",
            "rope_theta": 5e6,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
            },
        },
        {"model_type": "qwen3_vl", "depth": 1, "num_heads": 2, "out_hidden_size": 32},
    ),
}
TOKENS = np.random.default_rng(0).integers(3, 900, (1, 24), np.int32)


def make(kind, folder, tokenizer):
    """Writes a random model of images and returns it."""
    whole, text, vision = WHOLE[kind]
    fields = {"text_config": {**SIZES, **text}, "vision_config": {**VISION, **vision}}
    config = transformers.AutoConfig.for_model(
        kind.split()[0], image_token_index=1000, **fields, **whole
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    model.save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **whole, **fields}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / name)
    return model


def rename(folder, new_name):
    weights = load_file(folder / "model.safetensors")
    weights = {new_name(name): value for name, value in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def theirs(model):
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(TOKENS).long()).logits.numpy()


def ours(folder):
    source = open_model(str(folder))
    model = llama(source.config)
    logits = jax.jit(model.logits)(source.read(model), one_document(TOKENS))
    return np.asarray(logits)[..., : source.config.vocab_size]


@pytest.mark.parametrize("names", ["published", "of transformers 5"])
@pytest.mark.parametrize("kind", WHOLE)
def test_logits_of_a_text_part_match_transformers(kind, names, hf_model, tmp_path):
    model = make(kind, tmp_path, hf_model)
    if names != "published":
        own = {"language_model.model.": "model.language_model.", "language_model.lm_": "lm_"}
        for old, new in own.items():
            rename(tmp_path, lambda name, old=old, new=new: name.replace(old, new))
        assert "model.language_model.norm.weight" in load_file(tmp_path / "model.safetensors")
    expected = theirs(model)
    with pytest.warns(UserWarning, match=r"only the text part is read, as \w+ForCausalLM; .*GB\)"):
        found = ours(tmp_path)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def test_a_text_part_is_imported_and_exported_alone(hf_model, tmp_path, capsys):
    model = make("gemma3", tmp_path / "whole", hf_model)
    others = [
        name
        for name in load_file(tmp_path / "whole/model.safetensors")
        if "language_model" not in name
    ]
    whole = str(tmp_path / "whole")
    assert import_hf.main([whole, str(tmp_path / "checkpoint")]) == 0
    assert f"vision tower and projector ({len(others)} tensors, 0.00 GB)" in capsys.readouterr().err
    assert export_hf.main([str(tmp_path / "checkpoint"), str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out/config.json").read_text())
    assert content["architectures"] == ["Gemma3ForCausalLM"] and content["eos_token_id"] == [1, 106]
    assert not {"text_config", "vision_config"} & content.keys()
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(text).__name__ == "Gemma3ForCausalLM"
    np.testing.assert_allclose(theirs(text), theirs(model), atol=1e-4)
    with pytest.warns(UserWarning, match="PEFT loads the base as Gemma3ForConditionalGeneration"):
        export_hf._warn_of_base(open_model(whole).config, whole, tmp_path / "adapter")


def test_a_model_saved_without_its_head_is_read(tmp_path):
    """As transformers reads it: a tied head is the embedding."""
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    torch.manual_seed(0)
    transformers.LlamaModel(config).save_pretrained(tmp_path)
    assert "norm.weight" in load_file(tmp_path / "model.safetensors")
    expected = theirs(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    np.testing.assert_allclose(ours(tmp_path), expected, atol=1e-4)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"tie_word_embeddings": False}))
    with pytest.raises(ValueError, match=r"tensor lm_head\.weight is missing"):
        ours(tmp_path)


@pytest.mark.parametrize(
    "new_name",
    [
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module.{name}",
        lambda name: f"base_model.model.{name}",
        lambda name: f"language_model.{name}",
        lambda name: name.replace("model.", "model.language_model."),
        lambda name: name.replace("layers.0.", "layers.0._fsdp_wrapped_module."),
    ],
)
def test_a_name_that_a_wrapper_made_is_given(new_name, hf_model, tmp_path):
    folder = shutil.copytree(hf_model, tmp_path / "model")
    before = load_file(folder / "model.safetensors")
    rename(folder, new_name)
    with pytest.raises(ValueError, match=r"is missing; .*; (\S+) is there, a name that") as error:
        ours(folder)
    assert any(f"; {new_name(name)} is there" in str(error.value) for name in before)


def test_experts_as_mlx_lm_stores_them_are_named(hf_model, tmp_path):
    """By its `convert` and `fuse`; the names of 0.32."""
    folder = shutil.copytree(hf_model, tmp_path / "model")
    rename(folder, lambda name: name.replace("mlp.gate_proj", "mlp.switch_mlp.gate_proj"))
    with pytest.raises(ValueError, match=r"is missing; .*; \S+switch_mlp\S+ is there, as mlx-lm"):
        ours(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model-00001-of-00002.safetensors", "a part of a model, whose index is missing"),
        ("consolidated.safetensors", "of another layout"),
        ("model-q4.gguf", "of llama.cpp"),
        ("pytorch_model_fsdp_0", "FSDP's, of which accelerate merge-weights makes"),
        ("global_step500", r"DeepSpeed's, of which zero_to_fp32\.py --safe_serialization"),
        ("tf_model.h5", "of TensorFlow"),
    ],
)
def test_other_weights_than_needed_are_named(name, words, hf_model, tmp_path):
    folder = shutil.copytree(hf_model, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ValueError, match=f"no weights here: {name} is {words}"):
        ours(folder)


# Modules of quantized folders as their programs write them: the tensors instead of a weight.
QUANTIZED = {
    "GPTQ or AWQ": {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16},
    "compressed-tensors": {"weight_packed": torch.int32, "weight_scale": torch.bfloat16},
    "FP8": {"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32},
    "bitsandbytes' int8": {"weight": torch.int8, "SCB": torch.float32},
    "MLX": {"weight": torch.uint32, "scales": torch.bfloat16, "biases": torch.bfloat16},
    "bitsandbytes' 4 bits, not as NF4": {
        "weight": torch.uint8,
        "weight.absmax": torch.float32,
        "weight.quant_state.bitsandbytes__fp4": torch.uint8,
    },
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_quantization_that_config_json_does_not_tell_is_named(kind, hf_model, tmp_path):
    """From the tensors, with what would work."""
    folder = shutil.copytree(hf_model, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        rows, columns = tensors.pop(name).shape
        for part, dtype in QUANTIZED[kind].items():
            # MLX's dtype is as good as another here: its shape is wrong.
            shape = (rows, columns // 8) if kind == "MLX" else (rows, columns)
            tensors[name.removesuffix("weight") + part] = torch.zeros(shape, dtype=dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError,
        match=rf"tensor model\.layers\.0\.\S+_proj\.weight .*is there, as in {kind}, which is not "
        "read; the unquantized model",
    ):
        ours(folder)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["consolidated.00.pth", "params.json"], "consolidated.00.pth is Meta's own format"),
        (["consolidated.safetensors", "params.json"], "is Mistral's own format"),
        (["model-Q4_K_M.gguf"], "model-Q4_K_M.gguf is llama.cpp's format"),
        (["model.safetensors", "tokenizer.json"], "model.safetensors needs the config.json"),
    ],
)
def test_other_formats_without_a_config_are_named(names, words, tmp_path):
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=rf"no config\.json .* is in this folder; .*{words}"):
        open_model(str(tmp_path))


def test_a_file_as_a_model_is_named(tmp_path):
    for name, words in (
        ("one.gguf", r"of llama\.cpp's format"),
        ("model.safetensors", "and a model"),
    ):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(ValueError, match=rf"{name}: a file, {words}.* needs a folder"):
            open_model(str(tmp_path / name))


def adapter_beside(folder, to):
    """Copies a model and adds an adapter of it, as peft's save_pretrained does in its folder."""
    lora = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    shutil.copytree(folder, to)
    lora.get_peft_model(base, lora.LoraConfig(target_modules=["q_proj"])).save_pretrained(to)
    return to


def test_an_adapter_beside_a_whole_model_is_refused(hf_model, tmp_path, capsys):
    both = adapter_beside(hf_model, tmp_path / "both")
    read = transformers.AutoModelForCausalLM.from_pretrained(both)
    assert any("lora" in name for name, _ in read.named_parameters())
    with pytest.raises(ValueError, match=f"an adapter of '{hf_model}', with which transformers"):
        open_model(str(both))
    assert import_hf.main([str(both), str(tmp_path / "checkpoint")]) == 2
    assert "config.json describes a whole model, and adapter_config.json" in capsys.readouterr().err
    (both / "model.safetensors").unlink()
    assert open_model(str(both)).adapter.folder == both  # as transformers reads it
    (both / "config.json").unlink()
    assert import_hf.main([str(both), str(tmp_path / "checkpoint")]) == 2
    assert (
        "an adapter (adapter_config.json), and a whole model is needed" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".weight", ".default.weight"),
        ("base_model.model.", ""),
        ("base_model.model.", "base_model.model._orig_mod."),
    ],
)
def test_a_name_in_an_adapter_that_peft_did_not_write_is_given(old, new, hf_model, tmp_path):
    folder = adapter_beside(hf_model, tmp_path / "both")
    (folder / "config.json").unlink()
    path = folder / peft.WEIGHTS
    weights = {name.replace(old, new): value for name, value in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    named = next(name for name in sorted(weights) if "layers.0.self_attn.q_proj.lora_A" in name)
    with pytest.raises(ValueError, match=f"is missing, and {named} is there; names as peft's"):
        ours_with(folder)
    path.rename(path.with_suffix(".bin"))
    with pytest.raises(ValueError, match=r"only pickled weights here \(adapter_model.bin\)"):
        ours_with(folder)


def ours_with(folder):
    source = open_model(str(folder))
    return source.read(llama(source.config.with_adapter(source.adapter.config)))
