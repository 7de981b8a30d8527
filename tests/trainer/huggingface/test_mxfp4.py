"""How files store experts: gpt-oss in MXFP4, with the same numbers as transformers, and all experts
in one tensor."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from model.config import TransformerConfig
from scripts import export_hf, import_hf
from tests.model.build import llama
from trainer.huggingface.assets import copy_assets
from trainer.huggingface.mxfp4 import dequantize_mxfp4
from trainer.huggingface.read import read_hf
from trainer.huggingface.write import write_hf

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "pad_token_id": None,
}
EXPERTS = "model.layers.{}.mlp.experts.{}_proj"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A random model whose experts are random codes with scales."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**SIZES)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [EXPERTS.format(i, part) for i in range(2) for part in ("gate_up", "down")]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 126, shape, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def changed(published, folder, **tensors):
    """A copy of the folder with some tensors replaced; None removes one."""
    folder.mkdir()
    (folder / "config.json").write_bytes((published / "config.json").read_bytes())
    stored = {**load_file(published / "model.safetensors"), **tensors}
    stored = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_every_code_with_every_scale_decodes_as_in_transformers():
    """Bitwise, including negative zeros, subnormal numbers and infinities."""
    codes = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (1, 256, 16, 16))
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8)[None, :, None], (1, 256, 16))
    theirs = convert_moe_packed_tensors(torch.tensor(codes), torch.tensor(scales))
    ours = dequantize_mxfp4(codes, scales).swapaxes(1, 2)
    assert np.array_equal(ours.view(np.uint16), theirs.view(torch.uint16).numpy())


@pytest.mark.parametrize(
    "shape",
    [{"fsdp": 2, "expert": 2, "tensor": 2}, pytest.param({}, marks=pytest.mark.slow)],
    ids=str,
)
def test_an_mxfp4_folder_is_read_and_exported_as_by_transformers(published, tmp_path, shape):
    config = TransformerConfig.from_hf(published)
    model = llama(config, shape)
    params = read_hf(published, config, model.shardings, in_memory=model.in_memory)
    copy_assets(published, tmp_path / "assets")
    write_hf(params, config, tmp_path / "assets", tmp_path / "export")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        published, quantization_config=transformers.Mxfp4Config(dequantize=True)
    ).state_dict()
    exported = load_file(tmp_path / "export/model.safetensors")
    assert exported.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert exported[name].dtype == tensor.dtype == torch.bfloat16, name
        assert torch.equal(exported[name], tensor), name
    described = json.loads((tmp_path / "export/config.json").read_text())
    assert "quantization_config" not in described and described["dtype"] == "bfloat16"
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")


NAME = EXPERTS.format(1, "down")


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({f"{NAME}_scales": None}, [f"{NAME}_scales is missing, but {NAME}_blocks is there"]),
        ({f"{NAME}_blocks": None}, [f"{NAME} is missing"]),
        (
            {f"{NAME}_scales": torch.zeros(4, 64, 2, dtype=torch.uint8)},
            [f"{NAME}_scales is U8 [4, 64, 2]", "[4, 64, 3]"],
        ),
        (
            {f"{NAME}_blocks": torch.zeros(4, 64, 3, 16, dtype=torch.int8)},
            [f"{NAME}_blocks is I8", "needs U8"],
        ),
        (
            {
                f"{NAME}_blocks": torch.zeros(4, 64, 2, 16, dtype=torch.uint8),
                f"{NAME}_scales": torch.zeros(4, 64, 2, dtype=torch.uint8),
            },
            [f"{NAME} has shape [4, 64, 64]", "[4, 96, 64]"],
        ),
        (
            {f"{NAME}_scales": torch.full((4, 64, 3), 255, dtype=torch.uint8)},
            [f"{NAME}_scales holds NaN"],
        ),
    ],
)
def test_incomplete_codes_are_refused_by_name(published, tmp_path, tensors, words):
    folder = changed(published, tmp_path / "damaged", **tensors)
    config = TransformerConfig.from_hf(folder)
    with pytest.raises(ValueError) as caught:
        read_hf(folder, config, llama(config).shardings)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


def test_other_families_are_not_read_in_mxfp4():
    described = transformers.MixtralConfig(num_local_experts=4).to_dict()
    described["quantization_config"] = {"quant_method": "mxfp4"}
    described["architectures"] = ["MixtralForCausalLM"]
    with pytest.raises(ValueError, match="quant_method: found 'mxfp4'"):
        TransformerConfig.from_hf_dict(described)


def test_a_command_writes_experts_in_one_tensor(repository, tmp_path, capsys):
    """It refuses a model without experts; transformers reads the result as the same model."""
    torch.manual_seed(0)
    mixtures = ("num_local_experts", "num_experts_per_tok", "sliding_window")
    sizes = {name: SIZES[name] for name in SIZES if name not in mixtures} | {"pad_token_id": 0}
    kinds = {"mixtral": transformers.MixtralConfig, "llama": transformers.LlamaConfig}
    tokenizer = list((repository / "data/fixtures/tiny_tokenizer").iterdir())
    for kind, make in kinds.items():
        model = transformers.AutoModelForCausalLM.from_config(make(**sizes))
        model.save_pretrained(tmp_path / kind)
        for path in tokenizer:
            (tmp_path / kind / path.name).write_bytes(path.read_bytes())
        assert import_hf.main([str(tmp_path / kind), str(tmp_path / f"{kind} checkpoint")]) == 0
        capsys.readouterr()
        code = export_hf.main(
            [str(tmp_path / f"{kind} checkpoint"), str(tmp_path / f"{kind} out"), "--fuse-experts"]
        )
        assert code == (0 if kind == "mixtral" else 2), capsys.readouterr().err
    assert "--fuse-experts: " in capsys.readouterr().err
    names = load_file(tmp_path / "mixtral out/model.safetensors")
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    read_again, original = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict()
        for folder in ("mixtral out", "mixtral")
    )
    assert all(torch.equal(tensor, read_again[name]) for name, tensor in original.items())
