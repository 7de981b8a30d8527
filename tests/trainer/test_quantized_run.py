"""A run that trains adapters on an NF4 base: it resumes, is evaluated and exported, and unsupported
requests are refused."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import train
from data.tokenizer import Tokenizer
from eval import line_retrieval
from model.adapter import AdapterConfig
from model.config import TransformerConfig
from scripts import export_hf, import_hf, quantize_hf
from tests import small_run
from tests.model.build import llama, one_document
from trainer.checkpoint.readers import stored_arrays
from trainer.huggingface.assets import write_source_dtype
from trainer.huggingface.table import hf_layout
from trainer.huggingface.write import write_hf
from trainer.model_source import open_model

STEPS = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory, repository):
    """Returns a Hugging Face folder of a small LLaMA whose sizes are multiples of 64."""
    folder = tmp_path_factory.mktemp("base")
    config = TransformerConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=128,
    )
    tokenizer = Tokenizer.load(repository / "data/fixtures/tiny_tokenizer")
    (folder / "assets").mkdir()
    tokenizer.save(folder / "assets", None)
    write_source_dtype(folder / "assets", "float32")
    (folder / "assets" / "config.json").write_text(json.dumps(config.to_hf()), encoding="utf-8")
    generator = np.random.default_rng(0)
    params = {
        entry.name: (0.1 * generator.normal(size=entry.shape)).astype(np.float32)
        for entry in hf_layout(config)
    }
    write_hf(params, config, folder / "assets", folder / "hf")
    return folder / "hf"


@pytest.fixture(scope="module")
def command(small_recipe, base, tmp_path_factory):
    """Returns the command line of a short run on the model."""
    return small_run.adapter_run(
        small_recipe,
        tmp_path_factory.mktemp("quantized"),
        base,
        adapter={"rank": 2, "alpha": 4.0, "quantize": "nf4"},
        train={"steps": STEPS},
    )


@pytest.fixture(scope="module")
def run(command):
    """The folder of a run that was stopped after two steps, as if killed, and resumed."""
    arguments = command("run", "--checkpoint.every", "2")
    assert train.main(arguments) == 0
    folder = pathlib.Path(arguments[3])
    shutil.rmtree(folder / "checkpoints" / str(STEPS))
    before = small_run.losses(folder)
    assert train.main(arguments) == 0
    assert small_run.losses(folder) == before and before[-1] < before[0] - 0.05
    return folder


def test_checkpoints_hold_only_adapters(run):
    """They hold no NF4 codes."""
    names = stored_arrays(run / "checkpoints" / str(STEPS), "model")
    assert {name.rpartition(".")[2] for name in names} == {"lora_A", "lora_B"}


@pytest.mark.slow
def test_an_imported_base_gives_the_same_losses(run, command, base, tmp_path):
    """A base imported as a checkpoint is quantized to the same codes as the Hugging Face folder."""
    assert import_hf.main([str(base), str(tmp_path / "imported")]) == 0
    arguments = command("imported", "--train.steps", "1", model=tmp_path / "imported")
    assert train.main(arguments) == 0
    assert small_run.losses(pathlib.Path(arguments[3])) == small_run.losses(run)[:1]


def test_the_merged_model_has_the_dequantized_weights(run, tmp_path, capfd):
    """With --dequantize the merged model's logits are within 1e-5 of the run's; without it the
    merge is refused with a hint."""
    capfd.readouterr()
    assert export_hf.main([str(run), str(tmp_path / "refused"), "--merge"]) == 2
    error = capfd.readouterr().err
    assert "nf4" in error and "--dequantize" in error and error.count("\n") == 1
    assert export_hf.main([str(run), str(tmp_path / "refused"), "--dequantize"]) == 2
    assert "without --merge" in capfd.readouterr().err
    assert export_hf.main([str(run), str(tmp_path / "whole"), "--merge", "--dequantize"]) == 0
    whole, source = open_model(str(tmp_path / "whole")), open_model(str(run))
    assert source.adapter.config.quantize == "nf4"
    adapted = llama(dataclasses.replace(whole.config, adapter=source.adapter.config))
    tokens = np.random.default_rng(0).integers(0, 1024, (1, 32), np.int32)
    batch = one_document(tokens)
    plain = llama(whole.config)
    logits = [
        np.asarray(jax.jit(model.logits)(params, batch))
        for model, params in ((adapted, source.read(adapted)), (plain, whole.read(plain)))
    ]
    assert np.abs(logits[0] - logits[1]).max() <= 1e-5 * np.abs(logits[0]).max()


@pytest.mark.slow
def test_one_evaluation_compares_the_run_and_its_export(run, base, tmp_path, capfd):
    """The run's folder and its PEFT export (with --quantize) answer alike in one command, each with
    its own output. Without --quantize the export runs on unquantized weights, and a journal of the
    other kind is refused."""
    assert export_hf.main([str(run), str(tmp_path / "peft")]) == 0
    flags = "--sequence 8 --lines 2 --count 3 --max-new-tokens 4 --compute-dtype float32"
    flags += " --template vicuna_v1.1"

    def answer(checkpoint, output, *more):
        words = ("--checkpoint", checkpoint, "--output", tmp_path / output, *more)
        return line_retrieval.main([*map(str, words), *flags.split()])

    assert answer(run, "alone") == 0
    adapters = ("--adapter", run, tmp_path / "peft")
    assert answer(base, "both", *adapters, "--quantize", "nf4") == 0
    results = [
        json.loads((tmp_path / folder / "results.json").read_text())
        for folder in ("alone", "both/run", "both/peft")
    ]
    cases = [
        (tmp_path / folder / "cases.jsonl").read_text()
        for folder in ("alone", "both/run", "both/peft")
    ]
    assert cases[0] == cases[1] == cases[2]
    assert [result["about"]["quantize"] for result in results] == ["nf4"] * 3
    capfd.readouterr()
    assert answer(base, "both/peft", "--adapter", tmp_path / "peft") == 2
    assert "has answers with quantize = 'nf4', now it is 'none'" in capfd.readouterr().err
    assert answer(base, "x", "--quantize", "nf4") == 2
    assert "--quantize: found nf4" in capfd.readouterr().err


def test_stored_codes_are_read_unchanged(base, tmp_path):
    """An NF4 folder gives the same arrays as quantizing the model while reading it."""
    folder = tmp_path / "codes"
    assert quantize_hf.main([str(base), str(folder)]) == 0
    adapter = AdapterConfig(rank=2, quantize="nf4")
    model = llama(dataclasses.replace(open_model(str(base)).config, adapter=adapter))
    from_numbers, from_codes = (open_model(str(path)).read(model) for path in (base, folder))
    assert from_numbers.keys() == from_codes.keys() and len(model.quantized_names) == 7
    for name, x in from_numbers.items():
        assert np.array_equal(x, from_codes[name]), name


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({"quant_method": "gptq", "bits": 4}, ["quantization_config", "'gptq'", "unquantized"]),
        ({"quant_method": "awq", "bits": 4}, ["'awq'", "adapter.quantize"]),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, ["load_in_8bit", "True"]),
    ],
    ids=str,
)
def test_unsupported_quantization_is_named_and_refused(base, config, facts):
    """The one-line message says what would work."""
    content = {
        **json.loads((base / "config.json").read_text(encoding="utf-8")),
        "quantization_config": config,
    }
    with pytest.raises(ValueError) as error:
        TransformerConfig.from_hf_dict(content)
    assert all(fact in str(error.value) for fact in facts) and "\n" not in str(error.value), (
        error.value
    )


@pytest.fixture(scope="module")
def dynamic(base, tmp_path_factory):
    """The folder of the model in NF4 without the last layer's feed-forward."""
    folder = tmp_path_factory.mktemp("dynamic") / "nf4"
    assert quantize_hf.main([str(base), str(folder)]) == 0
    file = folder / "model.safetensors"
    plain, tensors = load_file(base / "model.safetensors"), load_file(file)
    for name in [name for name in plain if "layers.1.mlp" in name]:
        tensors = {key: x for key, x in tensors.items() if not key.startswith(name)}
        tensors[name] = plain[name]
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("quantize", "flags", "fact"),
    [
        ("nf4", ["--dry-run"], "is not in NF4, unlike others (llm_int8_skip_modules"),
        ("int8", [], "is in NF4, and adapter.quantize int8 would quantize its numbers again"),
    ],
)
def test_quantizing_a_folder_with_some_codes_is_refused(
    command, dynamic, capfd, quantize, flags, fact
):
    line = command("refused", "--adapter.quantize", quantize, *flags, model=dynamic)
    capfd.readouterr()
    assert train.main(line) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert fact in error and "adapter.quantize none" in error


@pytest.mark.slow
def test_a_folder_with_some_codes_trains_decoded(command, base, dynamic, tmp_path, capfd):
    """With `quantize: none`, to the same losses and merged weights as the decoded model; a run
    resumes."""
    plain = load_file(base / "model.safetensors")
    # The decoded model, as a folder of its own.
    assert import_hf.main([str(dynamic), str(tmp_path / "checkpoint")]) == 0
    assert export_hf.main([str(tmp_path / "checkpoint"), str(tmp_path / "decoded")]) == 0
    decoded = load_file(tmp_path / "decoded/model.safetensors")
    assert decoded.keys() == plain.keys()
    same = [name for name in plain if np.array_equal(decoded[name], plain[name])]
    assert {name for name in plain if "_proj" not in name or "layers.1.mlp" in name} == set(same)

    flags = ["--adapter.quantize", "none", "--train.steps", "2", "--checkpoint.every", "1"]
    runs = {}
    for name, folder in (("nf4", dynamic), ("decoded", tmp_path / "decoded")):
        line = command(f"dynamic_{name}", *flags, model=folder)
        capfd.readouterr()
        assert train.main(line) == 0
        assert ("matrices in NF4 are decoded" in capfd.readouterr().err) == (name == "nf4")
        runs[name] = pathlib.Path(line[3])
        if name == "nf4":  # continues from the first step
            shutil.rmtree(runs[name] / "checkpoints/2")
            assert train.main(line) == 0
    assert small_run.losses(runs["nf4"]) == small_run.losses(runs["decoded"])
    for name, run in runs.items():
        assert export_hf.main([str(run), str(tmp_path / f"{name} merged"), "--merge"]) == 0
    first, second = (load_file(tmp_path / f"{name} merged/model.safetensors") for name in runs)
    assert first.keys() == plain.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)
