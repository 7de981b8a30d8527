"""Folders in bitsandbytes' NF4: written by scripts.quantize_hf, opened by transformers and
bitsandbytes, and read back."""

import contextlib
import dataclasses
import json
import re

import jax
import numpy as np
import pytest
import torch
import transformers
from bitsandbytes.functional import QuantState, dequantize_4bit
from safetensors.numpy import load_file

from model.adapter import AdapterConfig
from model.codecs import NESTED_BLOCK, dequantize_nf4, quantize_nf4
from scripts import import_hf, quantize_hf
from tests.model.build import llama
from trainer.huggingface.bitsandbytes import nf4_layout, write_nf4
from trainer.huggingface.read import StoredCodes
from trainer.huggingface.write import write_hf
from trainer.model_source import open_model

SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
# One with a separate head, one with a tied head and biases, one with fused projections.
MODELS = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "phi3": (transformers.Phi3Config, {}),
}


def save_model(folder, kind, repository, dtype=torch.bfloat16, **fields):
    """Saves a random transformers model with a tokenizer."""
    make, defaults = MODELS[kind]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make(**{**SIZES, **defaults, **fields}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.to(dtype).save_pretrained(folder)
    for path in (repository / "data/fixtures/tiny_tokenizer").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(
    scope="module",
    params=[
        kind if kind == "phi3" else pytest.param(kind, marks=pytest.mark.slow) for kind in MODELS
    ],
)
def folders(request, tmp_path_factory, repository):
    """A model's folder, and the folder with its NF4 codes."""
    folder = tmp_path_factory.mktemp(request.param)
    save_model(folder / "hf", request.param, repository)
    assert quantize_hf.main([str(folder / "hf"), str(folder / "nf4")]) == 0
    return folder / "hf", folder / "nf4"


def test_bitsandbytes_opens_the_folder(folders):
    """Through transformers: every projection is quantized there and dequantizes to our numbers, bit
    for bit; every other tensor equals the source's."""
    plain, quantized = folders
    model = transformers.AutoModelForCausalLM.from_pretrained(quantized)
    theirs = {
        name.removesuffix(".weight"): module
        for name, module in model.named_modules()
        if hasattr(module, "weight")
    }
    numbers = transformers.AutoModelForCausalLM.from_pretrained(plain).state_dict()
    projections = 0
    for name, module in theirs.items():
        weight, source = module.weight, numbers[f"{name}.weight"]
        if "_proj" in name:
            projections += 1
            opened = dequantize_4bit(weight.data, weight.quant_state)
            expected = dequantize_nf4(quantize_nf4(source.float().numpy()))
            assert torch.equal(opened, torch.tensor(expected).to(source.dtype)), name
        else:
            assert torch.equal(weight, source), name
    assert (
        projections == 2 * len({name.rpartition(".")[2] for name in theirs if "_proj" in name}) >= 8
    )
    with torch.no_grad():
        logits = model(torch.arange(1, 33)[None]).logits
    assert torch.isfinite(logits).all()


def test_bitsandbytes_opens_a_matrix():
    """Bitwise, with its own reader of stored tensors, for a matrix whose dimensions are not powers
    of 2."""
    codes = quantize_nf4(np.random.RandomState(0).standard_normal((96, 320)))
    tensors = {
        name: torch.tensor(np.array(x)) for name, x in write_nf4("w", codes, "float32").items()
    }
    stored = tensors.pop("w")
    state = QuantState.from_dict(
        {name.removeprefix("w."): x for name, x in tensors.items()}, torch.device("cpu")
    )
    assert np.array_equal(dequantize_4bit(stored, state).numpy(), dequantize_nf4(codes))


def test_codes_are_read_as_they_are_stored(folders):
    """Logits match transformers with the dequantized weights, including rows of fused matrices."""
    plain, quantized = folders
    source = open_model(str(quantized))
    with contextlib.ExitStack() as stack:
        assert (
            sum(isinstance(parameter, StoredCodes) for parameter in source.stored(stack).values())
            == 7
        )
    model = llama(dataclasses.replace(source.config, adapter=AdapterConfig(rank=1, quantize="nf4")))
    params = source.read(model)
    assert len(model.quantized_names) == 7
    tokens = np.random.default_rng(0).integers(0, 128, (1, 32), np.int32)
    batch = {
        "tokens": tokens,
        "segment_ids": np.ones_like(tokens),
        **dict.fromkeys(("index", "positions"), np.arange(32, dtype=np.int32)[None]),
    }
    logits = np.asarray(jax.jit(model.logits)(params, batch))

    judge = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in judge.named_parameters():
            if "_proj.weight" in name:
                weight.copy_(torch.tensor(dequantize_nf4(quantize_nf4(weight.numpy()))))
        expected = judge(torch.tensor(tokens)).logits.numpy()
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("skipped", "words"),
    [
        (["lm_head"], None),
        (["lm_head", "down_proj"], "layers.0.mlp.down_proj.weight is not in NF4, unlike others"),
        (
            ["lm_head", "model.layers.1.mlp.down_proj"],
            "layers.1.mlp.down_proj.weight is not in NF4, unlike others (llm_int8_skip_modules",
        ),
        (["nothing"], "lm_head.weight is in NF4, which is read for the layers' projections only"),
    ],
)
def test_folders_in_which_other_matrices_are_in_nf4_are_refused(
    tmp_path, repository, skipped, words
):
    """As transformers writes them with `llm_int8_skip_modules`; by `open_model`, so that dry runs
    refuse them too."""
    save_model(tmp_path / "hf", "llama", repository)
    options = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=skipped,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", quantization_config=options
    )
    model.save_pretrained(tmp_path / "nf4")
    if words is None:
        open_model(str(tmp_path / "nf4"))
        return
    with pytest.raises(ValueError, match=rf"nf4: tensor [\w.]*{re.escape(words)}"):
        open_model(str(tmp_path / "nf4"))


def test_a_checkpoint_and_the_folder_it_was_imported_from_quantize_to_the_same_bytes(
    tmp_path, repository
):
    """In one file or in several."""
    save_model(tmp_path / "hf", "llama", repository)
    assert import_hf.main([str(tmp_path / "hf"), str(tmp_path / "checkpoint")]) == 0
    for source in ("hf", "checkpoint"):
        assert quantize_hf.main([str(tmp_path / source), str(tmp_path / f"{source}_nf4")]) == 0
    first, second = (
        (tmp_path / f"{source}_nf4" / "model.safetensors").read_bytes()
        for source in ("hf", "checkpoint")
    )
    assert first == second
    source = open_model(str(tmp_path / "hf"))
    with contextlib.ExitStack() as stack:
        write_hf(
            source.stored(stack),
            source.config,
            tmp_path / "checkpoint/assets",
            tmp_path / "parts",
            nf4=True,
            max_shard_bytes=60_000,
        )
    parts = sorted((tmp_path / "parts").glob("*.safetensors"))
    tensors = {name: x for path in parts for name, x in load_file(path).items()}
    whole = load_file(tmp_path / "hf_nf4" / "model.safetensors")
    assert len(parts) > 2 and tensors.keys() == whole.keys()
    assert all(np.array_equal(x, whole[name]) for name, x in tensors.items())
    index = json.loads(
        (tmp_path / "parts" / "model.safetensors.index.json").read_text(encoding="utf-8")
    )
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in whole.values())


@pytest.mark.parametrize("shape", [(3, 64), (96, 320), (1000, 192)], ids=str)
def test_the_layout_is_known_before_the_data(shape):
    """Dtypes, shapes and order; each tensor's offset is a multiple of its item size."""
    codes = quantize_nf4(np.random.default_rng(0).standard_normal(shape))
    written = write_nf4("w", codes, "bfloat16")
    assert [(name, (x.dtype.name, x.shape)) for name, x in written.items()] == list(
        nf4_layout("w", shape).items()
    )
    starts = np.cumsum([0, *(x.nbytes for x in written.values())])
    assert starts[-1] % 8 == 0
    assert all(start % x.itemsize == 0 for start, x in zip(starts, written.values(), strict=False))


def test_unsupported_models_are_named(tmp_path, repository, capfd):
    save_model(tmp_path / "hf", "llama", repository)
    assert quantize_hf.main([str(tmp_path / "hf"), str(tmp_path / "nf4")]) == 0
    narrow = save_model(tmp_path / "narrow", "llama", repository, intermediate_size=96)
    uneven = save_model(tmp_path / "uneven", "phi3", repository, num_key_value_heads=1)
    assert quantize_hf.main([str(uneven), str(tmp_path / "uneven_nf4")]) == 0
    for model, fact in (
        (tmp_path / "nf4", "is already in NF4"),
        (narrow, "intermediate_size is 96"),
        (tmp_path / "absent", "absent"),
    ):
        capfd.readouterr()
        assert quantize_hf.main([str(model), str(tmp_path / "out")]) == 2
        error = capfd.readouterr().err
        assert fact in error and error.count("\n") == 1, error
        assert not (tmp_path / "out").exists()
    source = open_model(str(tmp_path / "uneven_nf4"))
    model = llama(dataclasses.replace(source.config, adapter=AdapterConfig(rank=1, quantize="nf4")))
    assert 64 * (128 // 64) % NESTED_BLOCK  # the rows of one head
    with pytest.raises(ValueError, match=r"qkv_proj.*rows 128 to 192 share a scale"):
        source.read(model)
