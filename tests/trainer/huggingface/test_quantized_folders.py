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
from safetensors.numpy import load_file, save_file

from model.adapter import AdapterConfig
from model.codecs import NESTED_BLOCK, dequantize_nf4, quantize_nf4
from scripts import import_hf, quantize_hf
from tests.model.build import llama, one_document
from trainer.huggingface.assets import copy_assets, source_dtype, write_source_dtype
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
    batch = one_document(tokens)
    logits = np.asarray(jax.jit(model.logits)(params, batch))

    judge = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in judge.named_parameters():
            if "_proj.weight" in name:
                weight.copy_(torch.tensor(dequantize_nf4(quantize_nf4(weight.numpy()))))
        expected = judge(torch.tensor(tokens)).logits.numpy()
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


def quantized_by_transformers(folder, repository, kind="llama", **options):
    """Returns the folder of a model in NF4 that transformers and bitsandbytes saved, and that
    model's weights, each as bitsandbytes decodes it."""
    plain = folder / "plain"
    if not plain.exists():
        save_model(plain, kind, repository)
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        **options,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=config, dtype=torch.bfloat16
    )
    saved = folder / "_".join(["nf4", *map(str, options)])
    model.save_pretrained(saved)
    for path in (repository / "data/fixtures/tiny_tokenizer").iterdir():
        (saved / path.name).write_bytes(path.read_bytes())
    weights = {
        name: dequantize_4bit(weight.data, weight.quant_state)
        if getattr(weight, "quant_state", None) is not None
        else weight.data
        for name, weight in model.named_parameters()
    }
    return saved, weights


@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
def test_codes_are_bytes_in_any_storage(tmp_path, repository, storage):
    """With `bnb_4bit_quant_storage`, as FSDP needs it, a tensor has fewer and wider numbers."""
    source = save_model(tmp_path / "plain", "llama", repository)
    assert quantize_hf.main([str(source), str(tmp_path / "nf4")]) == 0
    file = tmp_path / "nf4/model.safetensors"
    tensors, expected = load_file(file), {}
    with contextlib.ExitStack() as stack:
        for name, stored in open_model(str(tmp_path / "nf4")).stored(stack).items():
            if isinstance(stored, StoredCodes):
                expected[name] = stored.quantized(1)[0].codes.copy()
    coded = [name.removesuffix(".absmax") for name in tensors if name.endswith(".absmax")]
    for name in coded:
        tensors[name] = tensors[name].reshape(-1).view(np.dtype(storage)).reshape(-1, 1)
    save_file(tensors, file, {"format": "pt"})
    opened = open_model(str(tmp_path / "nf4"))
    with contextlib.ExitStack() as stack:
        stored = opened.stored(stack)
        for name, codes in expected.items():
            assert np.array_equal(stored[name].quantized(1)[0].codes, codes), name
    assert len(expected) == 7
    # An export has the weights' dtype, not that of scales or storage.
    copy_assets(tmp_path / "nf4", tmp_path / "assets")
    assert source_dtype(tmp_path / "assets") == ("bfloat16", {})

    tensors[coded[0]] = tensors[coded[0]][:-8]
    save_file(tensors, file, {"format": "pt"})
    source, adapter = open_model(str(tmp_path / "nf4")), AdapterConfig(rank=1, quantize="nf4")
    with pytest.raises(
        ValueError, match=rf"tensor {re.escape(coded[0])}: found \d+ bytes of codes"
    ):
        source.read(llama(dataclasses.replace(source.config, adapter=adapter)))


@pytest.mark.parametrize(
    ("quantize", "declared", "expected"),
    [
        ("nf4", "bfloat16", ("bfloat16", {})),
        ("nf4", "float32", ("float32", {"lm_head.weight": "bfloat16"})),
        ("none", "bfloat16", ("float32", {"lm_head.weight": "bfloat16"})),
    ],
)
def test_earlier_records_that_counted_scales_are_corrected(tmp_path, quantize, declared, expected):
    """They said float32, the dtype of the scales, for projections that were bfloat16."""
    config = {"model_type": "llama", "torch_dtype": declared}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "run.yaml").write_text(f"adapter: {{rank: 2, quantize: {quantize}}}")
    write_source_dtype(tmp_path, {"a": "float32", "b": "float32", "lm_head.weight": "bfloat16"})
    assert source_dtype(tmp_path) == expected


def test_bitsandbytes_storage_is_read(tmp_path, repository):
    """Of a folder that transformers wrote: the codes of both storages are equal."""
    first, _ = quantized_by_transformers(tmp_path, repository)
    second, _ = quantized_by_transformers(
        tmp_path, repository, bnb_4bit_quant_storage=torch.bfloat16
    )
    with contextlib.ExitStack() as stack:
        plain, wide = (open_model(str(folder)).stored(stack) for folder in (first, second))
        coded = [name for name in plain if isinstance(plain[name], StoredCodes)]
        assert len(coded) == 7
        for name in coded:
            assert np.array_equal(
                wide[name].quantized(0)[0].codes, plain[name].quantized(0)[0].codes
            )


@pytest.mark.parametrize(
    ("kind", "skipped", "words"),
    [
        ("llama", ["lm_head"], None),
        ("phi3", ["lm_head"], None),
        ("llama", ["lm_head", "down_proj"], "layers.0.mlp.down_proj.weight is not in NF4, unlike"),
        ("llama", ["lm_head", "model.layers.1.mlp"], "layers.1.mlp.gate_proj.weight is not in NF4"),
        ("llama", ["nothing"], None),
    ],
)
def test_nf4_is_decoded_without_quantize(tmp_path, repository, kind, skipped, words):
    """The weights are bitsandbytes', bit for bit, whichever modules `llm_int8_skip_modules` left
    out; for `adapter.quantize: nf4` the layers' projections must all be in NF4."""
    folder, weights = quantized_by_transformers(
        tmp_path, repository, kind, llm_int8_skip_modules=skipped
    )
    source = open_model(str(folder))
    with pytest.warns(UserWarning, match=r"skip_modules: \d+ matrices in NF4 are decoded"):
        params = source.read(llama(source.config, {"fsdp": 2, "tensor": 2}))
    copy_assets(folder, tmp_path / "assets")
    write_hf(params, source.config, tmp_path / "assets", tmp_path / "read")
    with contextlib.ExitStack() as stack:
        stored = source.stored(stack)
        write_hf(stored, source.config, tmp_path / "assets", tmp_path / "stored")
    for out in ("read", "stored"):
        written = load_file(tmp_path / out / "model.safetensors")
        assert written.keys() == weights.keys()
        for name, weight in weights.items():
            assert weight.dtype == torch.bfloat16
            assert np.array_equal(written[name].astype(np.float32), weight.float().numpy()), name
    exported = json.loads((tmp_path / "read/config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in exported
    if words is None:
        source.check_weights("nf4")
    else:
        with pytest.raises(ValueError, match=rf"{re.escape(words)}.*adapter.quantize none"):
            source.check_weights("nf4")
    with pytest.raises(ValueError, match=r"q(kv)?_proj.weight is in NF4, .* int8 would quantize"):
        source.check_weights("int8")
    source.check_weights("none")


@pytest.mark.parametrize(
    ("kind", "skipped"), [("llama", "model.layers.1.mlp"), ("phi3", "model.layers.0.self_attn")]
)
def test_what_was_left_out_of_nf4_is_quantized_beside_the_stored_codes(
    tmp_path, repository, kind, skipped, capfd
):
    """Of a folder with `llm_int8_skip_modules` the stored codes are kept, though quantizing their
    numbers again gives others; the rest are the unquantized model's. bitsandbytes decodes all."""
    folder, weights = quantized_by_transformers(
        tmp_path, repository, kind, llm_int8_skip_modules=["lm_head", skipped]
    )
    out = tmp_path / "all"
    with pytest.raises(ValueError, match=f"quantize_hf {re.escape(str(folder))} NEW_FOLDER"):
        open_model(str(folder)).check_weights("nf4")
    capfd.readouterr()
    assert quantize_hf.main([str(folder), str(out)]) == 0
    stored, written = (load_file(path / "model.safetensors") for path in (folder, out))
    left = [name for name in weights if "_proj" in name and name not in coded_in(stored)]
    kept = len(coded_in(stored))
    assert left and all(skipped in name for name in left)
    assert f"({kept} matrices in NF4 are kept, {len(left)} are quantized)" in capfd.readouterr().out
    assert coded_in(written) == {*coded_in(stored), *left}
    for name in coded_in(stored):
        for part in ("", ".absmax", ".nested_absmax"):
            assert np.array_equal(written[name + part], stored[name + part]), name + part
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    for name, weight in model.named_parameters():
        numbers, expected = weight.data, weights[name]
        if name in coded_in(written):
            numbers = dequantize_4bit(weight.data, weight.quant_state)
        if name in left:
            codes = quantize_nf4(weights[name].float().numpy())
            expected = torch.tensor(dequantize_nf4(codes)).to(torch.bfloat16)
        assert torch.equal(numbers, expected), name
    open_model(str(out)).check_weights("nf4")


def coded_in(tensors):
    """Returns the names of the matrices in NF4."""
    end = ".quant_state.bitsandbytes__nf4"
    return {name.removesuffix(end) for name in tensors if name.endswith(end)}


def test_a_dynamic_folder_of_the_hub_names_its_siblings(tmp_path, repository):
    folder, _ = quantized_by_transformers(
        tmp_path, repository, llm_int8_skip_modules=["lm_head", "model.layers.1.mlp"]
    )
    cached = tmp_path / "models--unsloth--Tiny-unsloth-bnb-4bit/snapshots/0123"
    cached.parent.mkdir(parents=True)
    folder.rename(cached)
    with pytest.raises(
        ValueError, match=r"unsloth/Tiny \(16 bits\) or unsloth/Tiny-bnb-4bit \(all in NF4\)"
    ):
        open_model(str(cached)).check_weights("nf4")


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
