"""Adapters of projections that are stored as rows of one fused tensor, against PEFT."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from model.adapter import AdapterConfig
from tests.model.build import llama, one_document, tiny
from trainer.huggingface import adapter_config
from trainer.huggingface import peft as ours
from trainer.huggingface.merge import merged
from trainer.model_source import open_adapter, open_model

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

RANK, ALPHA = 4, 8.0
KINDS = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a random Phi-3, which fuses q, k and v into one tensor, and gate and up into
    another."""
    torch.manual_seed(0)
    sizes = {
        name: getattr(tiny(), name)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
        )
    }
    config = transformers.AutoConfig.for_model("phi3", **sizes, pad_token_id=None)
    folder = tmp_path_factory.mktemp("phi3")
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def logits_of(folder, base, tokens, shape=None):
    """Our logits with an adapter in PEFT's format, the model and its parameters."""
    source = open_adapter(str(folder), str(base))
    model = llama(dataclasses.replace(source.config, adapter=source.adapter.config), shape or {})
    params = source.read(model)
    return np.asarray(jax.jit(model.logits)(params, one_document(tokens))), model, params


def logits_of_peft(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_with_one_a_is_read_and_one_with_several_is_written(kind, base, tmp_path):
    """PEFT's adapter is read, given a separate A per projection, written, and loaded by PEFT: its
    logits and the merged weights' are within 1e-4."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            **KINDS[kind],
        ),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "peft")
    tokens = np.random.default_rng(0).integers(0, 128, (2, 16), np.int32)
    expected = logits_of_peft(model, tokens)
    logits, adapted, params = logits_of(tmp_path / "peft", base, tokens)
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()

    noise = np.random.default_rng(1)
    params |= {
        name: x + noise.normal(0, 0.1, x.shape).astype(np.float32)
        for name, x in params.items()
        if "lora_A" in name
    }
    ours.write_adapter(params, adapted.config, str(base), tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = logits_of_peft(
        peft.PeftModel.from_pretrained(again, tmp_path / "ours").eval(), tokens
    )
    logits, adapted, read_again = logits_of(
        tmp_path / "ours", base, tokens, {"fsdp": 2, "tensor": 2}
    )
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()
    trained = [name for name in params if "lora_" in name]
    assert all(np.array_equal(params[name], read_again[name]) for name in trained)

    plain = llama(open_model(str(base)).config)
    whole = merged(
        open_model(str(base)).read(plain), {name: params[name] for name in trained}, adapted.config
    )
    whole = {
        name: np.stack([x[layer] for layer in range(x.shape[0])])
        if name.startswith("layers.")
        else x
        for name, x in whole.items()
    }
    logits = np.asarray(jax.jit(plain.logits)(whole, one_document(tokens)))
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({}, {}),
        ({"use_rslora": True}, {}),
        ({}, {"alpha_pattern": {}}),
        ({}, {"alpha_pattern": {"gate_up_proj": 24.0, "qkv_proj": 24.0}}),
    ],
)
def test_an_adapter_that_peft_trained_further_is_read(fields, change, base, tmp_path):
    """Its B is no longer block-diagonal; a tensor without its alpha has another scale."""
    adapter = AdapterConfig(rank=RANK, alpha=ALPHA, **fields)
    config = open_model(str(base)).config.with_adapter(adapter)
    noise = np.random.default_rng(0)
    params = {
        entry.name: noise.normal(0, 0.1, entry.shape).astype(np.float32)
        for entry in ours.adapter_layout(config)
    }
    ours.write_adapter(params, config, str(base), tmp_path / "ours")
    path = tmp_path / "ours" / ours.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "ours").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "qkv_proj.lora_B" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "further")
    tokens = noise.integers(0, 128, (2, 16), np.int32)
    logits, adapted, _ = logits_of(tmp_path / "further", base, tokens)
    assert adapted.config.adapter.rank == 3 * RANK
    expected = logits_of_peft(model, tokens)
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


def test_adapting_only_some_projections_of_a_fused_tensor_is_refused(base):
    config = open_model(str(base)).config
    with pytest.raises(ValueError, match="k_proj is missing; models of the family phi3 store "):
        dataclasses.replace(config, adapter=AdapterConfig(rank=RANK, targets=("q_proj", "v_proj")))


def test_another_rank_than_that_of_the_configuration_is_named(base, tmp_path):
    adapter = AdapterConfig(rank=RANK, alpha=ALPHA)
    config = open_model(str(base)).config.with_adapter(adapter)
    params = {
        entry.name: np.zeros(entry.shape, np.float32) for entry in ours.adapter_layout(config)
    }
    ours.write_adapter(params, config, str(base), tmp_path / "ours")
    path = tmp_path / "ours" / ours.CONFIG
    written = path.read_text()
    for rank in (16, 8):  # above and below that of another tensor
        path.write_text(written.replace('"qkv_proj": 12', f'"qkv_proj": {rank}'))
        message = rf"qkv_proj.lora_A.weight has shape \[12, .* needs \[{rank}, "
        with pytest.raises(ValueError, match=message):
            logits_of(tmp_path / "ours", base, np.zeros((1, 4), np.int32))


def test_modules_in_one_tensor_are_trained_in_full_under_its_name(base, tmp_path):
    """PEFT replaces the tensor by our projections' weights, one above the other."""
    names = ("q_proj", "k_proj", "v_proj")
    adapter = AdapterConfig(rank=RANK, alpha=ALPHA, targets=("down_proj",), train=names)
    config = open_model(str(base)).config.with_adapter(adapter)
    noise = np.random.default_rng(0)
    params = {
        entry.name: noise.normal(size=entry.shape).astype(np.float32)
        for entry in ours.adapter_layout(config)
    }
    ours.write_adapter(params, config, str(base), tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / adapter_config.CONFIG).read_text())
    assert written["modules_to_save"] == ["qkv_proj"]
    assert adapter_config.read_config(tmp_path / "ours")[0].train == names
    model = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "ours"
    )
    stacked = [params[f"layers.self_attn.{name}.weight"][1] for name in names]
    np.testing.assert_array_equal(
        model.base_model.model.model.layers[1].self_attn.qkv_proj.weight.detach().numpy(),
        np.concatenate([x.reshape(len(x), -1).T for x in stacked]),
    )


def test_a_regular_expression_matches_the_names_of_the_base(base, tmp_path):
    """In Phi-3, qkv_proj; and `.*(q|v)_proj` too, as in peft."""
    for number, pattern in enumerate((r".*\.(qkv_proj|o_proj)", r".*(q|v)_proj|.*\.o_proj")):
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=pattern)
        folder = tmp_path / str(number)
        peft.get_peft_model(model, config).save_pretrained(folder)
        source = open_adapter(str(folder), str(base))
        assert source.adapter.config.projections == ("q_proj", "k_proj", "v_proj", "o_proj")
        read = ours.read_adapter(folder, llama(source.config.with_adapter(source.adapter.config)))
        assert len(read) == 8
