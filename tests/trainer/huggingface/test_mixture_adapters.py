"""Adapters of mixtures of experts against PEFT: logits, gradients and files."""

import copy
import dataclasses
import functools

import jax
import numpy as np
import peft
import pytest
import safetensors.torch
import torch
import transformers

from model.adapter import ATTENTION, FEED_FORWARD, ROUTER, AdapterConfig
from model.config import TransformerConfig
from model.families import FAMILIES
from tests.data.test_templates import TINY
from tests.model.build import llama, mean_loss
from tests.trainer.huggingface.test_peft import batch_of
from trainer.huggingface import adapter_config
from trainer.huggingface import peft as ours
from trainer.huggingface.folder import folder_config
from trainer.huggingface.merge import merged
from trainer.huggingface.read import read_hf
from trainer.model_source import open_adapter

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.1,
    "pad_token_id": None,
}
LOCAL = {"num_local_experts": 4}  # some families spell num_experts this way
NAMED = ["experts.gate_up_proj", "experts.down_proj"]
ALL = {"target_modules": "all-linear"}
BY_NAME = {"target_modules": ["q_proj"], "target_parameters": NAMED}
# What PEFT adapts: all that all-linear covers, with an A for each of gate_proj and up_proj; or
# tensors by name, with one A for both.
KINDS = {
    "qwen3_moe": ({"moe_intermediate_size": 32, "intermediate_size": 96}, ALL),
    "gpt_oss": ({**LOCAL, "intermediate_size": 48, "sliding_window": 9}, BY_NAME),
    "gpt_oss's attention": ({**LOCAL, "intermediate_size": 48, "sliding_window": 9}, ALL),
    "mixtral": ({**LOCAL, "intermediate_size": 32}, ALL),
    "olmoe": ({"intermediate_size": 32}, ALL),
    "granitemoe": (
        {**LOCAL, "intermediate_size": 32},
        {"target_modules": ["v_proj"], "target_parameters": [*NAMED, "router.weight"]},
    ),
    "qwen2_moe": (
        {
            "moe_intermediate_size": 32,
            "intermediate_size": 96,
            "shared_expert_intermediate_size": 48,
        },
        BY_NAME,
    ),
    "solar_open": (
        {"n_routed_experts": 4, "moe_intermediate_size": 32, "n_shared_experts": 1},
        ALL,
    ),
    "glm4_moe": (
        {"n_routed_experts": 4, "moe_intermediate_size": 32, "intermediate_size": 96},
        ALL,
    ),
    "ernie4_5_moe": (
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "moe_layer_interval": 2,
        },
        ALL,
    ),
}


def kinds(*fast):
    """All kinds; those not named here are slow tests."""
    return pytest.mark.parametrize(
        "adapter",
        [kind if kind in fast else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
        indirect=True,
    )


@pytest.fixture(scope="module")
def adapter(request, repository, tmp_path_factory):
    """A mixture with PEFT's adapter, and the folders of both."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    sizes, targets = KINDS[request.param]
    family = request.param.partition("'")[0]
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **sizes})
    base = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).float()
    base.save_pretrained(folder / "base")
    for path in (repository / "data/fixtures/tiny_tokenizer").iterdir():
        (folder / "base" / path.name).write_bytes(path.read_bytes())
    options = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **targets}
    model = peft.get_peft_model(base, peft.LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    if has_blocks(model):
        for name, parameter in model.named_parameters():
            if name.endswith("experts.base_layer.lora_B.default.weight"):
                blocks = parameter.data.view(2, len(parameter) // 2, 2, -1)
                blocks[0, :, 1] = blocks[1, :, 0] = 0
    model.save_pretrained(folder / "adapter")
    return model, folder / "base", folder / "adapter"


def has_blocks(model):
    """Whether the adapters of gate_proj and up_proj are diagonal blocks of one PEFT adapter."""
    return bool(model.peft_config["default"].rank_pattern)


@functools.cache
def tokens():
    return np.random.default_rng(0).integers(0, 1024, (4, 32), np.int32)


def torch_logits(model):
    """A torch model's logits for `tokens`."""
    with torch.no_grad():
        return model(torch.tensor(tokens(), dtype=torch.long)).logits.numpy()


def loaded(base, folder):
    """The base with the adapter of a folder, as PEFT loads it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base).float()
    return peft.PeftModel.from_pretrained(model, str(folder))


def folded(gradient, like):
    """The gradient of one A or its B, from those of gate_proj and up_proj, in blocks."""
    if gradient.shape == like.shape:
        return gradient
    if gradient.shape[0] == like.shape[0]:  # B: [outputs, 2 r X]; the other block is zero
        return gradient.reshape(like.shape[0], 2, -1).sum(1)
    return gradient.reshape(SIZES["num_experts"], 2, -1, like.shape[1]).sum(1).reshape(like.shape)


def open_source(adapter):
    """Our source for PEFT's adapter, and the config of the model with it."""
    _, base, folder = adapter
    source = open_adapter(str(folder), str(base))
    return source, dataclasses.replace(source.config, adapter=source.adapter.config)


@kinds("qwen3_moe")
def test_an_adapter_that_peft_trained_is_read(adapter, tmp_path):
    """gate_proj's and up_proj's B are blocks only before the first step."""
    model, base, _ = adapter
    theirs = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("experts.base_layer.lora_B.default.weight"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    source, config = open_source((theirs, base, tmp_path))
    reader, expected = llama(config), torch_logits(theirs)
    logits = np.asarray(jax.jit(reader.logits)(source.read(reader), batch_of(tokens())))
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


def test_an_adapter_of_some_layers_experts_is_read(tmp_path):
    """As in OpenAI's guide to gpt-oss."""
    torch.manual_seed(0)
    shape = transformers.AutoConfig.for_model("gpt_oss", **{**SIZES, **KINDS["gpt_oss"][0]})
    base = transformers.AutoModelForCausalLM.from_config(
        shape, attn_implementation="eager", experts_implementation="eager"
    ).float()
    base.save_pretrained(tmp_path / "base")
    (tmp_path / "base/tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    parameters = ["1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"]
    options = {"r": 4, "task_type": "CAUSAL_LM", **ALL, "target_parameters": parameters}
    theirs = peft.get_peft_model(base, peft.LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    theirs.save_pretrained(tmp_path / "adapter")
    source, config = open_source((theirs, tmp_path / "base", tmp_path / "adapter"))
    assert config.adapter.projections == (*ATTENTION, *FEED_FORWARD)
    reader, expected = llama(config), torch_logits(theirs)
    logits = np.asarray(jax.jit(reader.logits)(source.read(reader), batch_of(tokens())))
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


@kinds("qwen3_moe", "gpt_oss", "granitemoe")
def test_peft_reads_our_files(adapter, tmp_path):
    """PEFT reads what we write, with the same logits and merged weights."""
    theirs, base, folder = adapter
    source, config = open_source(adapter)
    model = llama(config)
    params = source.read(model)
    ours.write_adapter(params, config, str(base), tmp_path / "ours")
    again, expected = loaded(base, tmp_path / "ours"), torch_logits(theirs)
    assert np.abs(torch_logits(again) - expected).max() <= 1e-6 * np.abs(expected).max()
    if has_blocks(theirs) or not theirs.peft_config["default"].target_parameters:
        written = (tmp_path / "ours" / ours.WEIGHTS).read_bytes()
        assert written == (folder / ours.WEIGHTS).read_bytes()
    for name, x in open_adapter(str(tmp_path / "ours"), str(base)).adapter.read(model).items():
        np.testing.assert_array_equal(x, params[name], err_msg=name)

    again.merge_and_unload().save_pretrained(tmp_path / "merged")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    whole = read_hf(tmp_path / "merged", source.config, device)
    trained = {name: x for name, x in params.items() if not model.parameters[name].frozen}
    rest = {name: x for name, x in params.items() if name not in trained}
    for name, x in merged(rest, trained, config).items():
        is_stacked = name.startswith("layers.")
        layers = np.stack([x[i] for i in range(len(whole[name]))]) if is_stacked else x
        np.testing.assert_allclose(layers, whole[name], atol=1e-6, err_msg=name)


@kinds("qwen3_moe")
@pytest.mark.parametrize(
    "mesh",
    [
        {"expert": 2, "tensor": 2},
        pytest.param({"fsdp": 2, "tensor": 2, "sequence": 2}, marks=pytest.mark.slow),
    ],
)
def test_logits_and_gradients_match_peft(adapter, mesh, tmp_path):
    theirs, base, _ = adapter
    source, config = open_source(adapter)
    model = llama(config, mesh)
    params, batch = source.read(model), batch_of(tokens())
    trained = {name: x for name, x in params.items() if not model.parameters[name].frozen}
    rest = {name: x for name, x in params.items() if name not in trained}
    logits, expected = np.asarray(jax.jit(model.logits)(params, batch)), torch_logits(theirs)
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()

    @jax.jit
    @jax.grad
    def gradient(trained):
        return mean_loss(model)({**trained, **rest}, batch)[0]

    ids = torch.tensor(tokens(), dtype=torch.long)
    theirs.zero_grad()
    theirs(ids, labels=ids).loss.backward()
    ours.write_adapter(gradient(trained), config, str(base), tmp_path / "gradients")
    written = peft.utils.load_peft_weights(str(tmp_path / "gradients"), device="cpu")
    grads = {
        name.replace(".default.weight", ".weight"): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.grad is not None
    }
    assert set(written) == set(grads)
    for name, grad in grads.items():
        folded_grad = folded(written[name], grad)
        if has_blocks(theirs) and "base_layer.lora_B" in name:
            grad[folded_grad == 0] = 0  # PEFT also trains outside the blocks
        assert (folded_grad - grad).abs().max() <= 1e-4 * grad.abs().max(), name


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3_moe", {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}),
        ("mixtral", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}),
    ],
)
def test_a_file_with_a_tensor_per_expert_is_read_as_by_peft(family, names, tmp_path):
    torch.manual_seed(0)
    sizes = {**SIZES, **KINDS[family][0]}
    config = transformers.AutoConfig.for_model(family, **sizes)
    base = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    base.float().save_pretrained(tmp_path / "base")
    block = "mlp" if family == "qwen3_moe" else "block_sparse_moe"
    tensors = {}
    for layer in range(2):
        for expert in range(4):
            for name, file in names.items():
                inputs, outputs = (32, 64) if name == "down_proj" else (64, 32)
                module = f"base_model.model.model.layers.{layer}.{block}.experts.{expert}.{file}"
                tensors[f"{module}.lora_A.weight"] = torch.randn(4, inputs)
                tensors[f"{module}.lora_B.weight"] = 0.1 * torch.randn(outputs, 4)
    folder = tmp_path / "adapter"
    peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=list(names.values()), task_type="CAUSAL_LM"
    ).save_pretrained(folder)
    safetensors.torch.save_file(tensors, folder / ours.WEIGHTS)
    adapter, _ = adapter_config.read_config(folder)
    assert adapter.projections == FEED_FORWARD
    read = folder_config(tmp_path / "base").with_adapter(adapter)
    ours.write_adapter(ours.read_adapter(folder, llama(read)), read, None, tmp_path / "ours")
    expected = torch_logits(loaded(tmp_path / "base", folder))
    logits = torch_logits(loaded(tmp_path / "base", tmp_path / "ours"))
    assert np.abs(logits - expected).max() <= 1e-6 * np.abs(expected).max()
    assert np.abs(expected - torch_logits(base)).max() > 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("targets", [[*ATTENTION, *FEED_FORWARD], r".*\.[a-z]+_proj"])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "granitemoe"])
def test_modules_that_a_mixture_lacks_are_ignored_as_by_peft(family, targets, tmp_path):
    """Lists for dense models name gate_proj, which these have no modules of: attention is adapted."""
    sizes = {**SIZES, **KINDS[family][0]}
    base = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **sizes)
    )
    base.float().save_pretrained(tmp_path / "base")
    (tmp_path / "base/tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    options = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": targets}
    theirs = peft.get_peft_model(base, peft.LoraConfig(**options))
    theirs.save_pretrained(tmp_path / "adapter")
    source, config = open_source((theirs, tmp_path / "base", tmp_path / "adapter"))
    assert config.adapter.projections == ATTENTION
    model = llama(config)
    read = {name for name in source.read(model) if "lora_" in name}
    assert len(read) == 2 * len(ATTENTION)
    ours.write_adapter(source.read(model), config, None, tmp_path / "ours")
    written, found = (
        safetensors.torch.load_file(tmp_path / folder / ours.WEIGHTS)
        for folder in ("ours", "adapter")
    )
    assert written.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in written.items())


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2}
MIXTRAL = {**MIXTURE, "family": "mixtral", **FAMILIES["mixtral"].computes}


@pytest.mark.parametrize(
    ("model", "adapter", "words"),
    [
        (MIXTRAL, {"use_dora": True}, "adapter.use_dora: found True; adapters of experts and "),
        (MIXTRAL, {"dropout": 0.1}, "adapter.dropout: found 0.1; adapters of experts and routers"),
        (MIXTRAL, {"targets": ("gate_proj",)}, "adapter.targets: up_proj is missing; models of "),
        ({}, {"targets": ("gate",)}, "adapter.targets: found 'gate', a router, which models "),
    ],
)
def test_modules_without_adapters_in_peft_are_refused(model, adapter, words):
    with pytest.raises(ValueError, match=words):
        TransformerConfig(**model, adapter=AdapterConfig(rank=4, **adapter))


def test_all_linear_means_the_same_as_in_peft():
    adapter = AdapterConfig(rank=4)
    adapted = {
        name: TransformerConfig(family=name, **MIXTURE, **family.computes, adapter=adapter)
        for name, family in FAMILIES.items()
        if name in KINDS
    }
    candidates = (*ATTENTION, *FEED_FORWARD, ROUTER)
    assert {name: config.adapter.projections for name, config in adapted.items()} == {
        "qwen3_moe": candidates,
        "mixtral": candidates,
        "olmoe": candidates,
        "solar_open": candidates,
        "glm4_moe": candidates,
        "ernie4_5_moe": candidates,
        "granitemoe": ATTENTION,
        "gpt_oss": ATTENTION,
        "qwen2_moe": ATTENTION,  # and the experts shared by all tokens, which have no adapters here
    }


@pytest.mark.parametrize(
    ("family", "module"), [("mixtral", "gate"), ("gpt_oss", "router"), ("granitemoe", "router")]
)
def test_a_router_trained_in_full_is_exchanged_with_peft(family, module, tmp_path):
    """We read PEFT's file, and PEFT ours, with the same logits; and files of earlier versions,
    whose tensor has the published name."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **KINDS[family][0]})
    base = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    base.float().save_pretrained(tmp_path / "base")
    theirs = peft.get_peft_model(
        base,
        peft.LoraConfig(
            r=4, target_modules=["q_proj"], modules_to_save=[module], task_type="CAUSAL_LM"
        ),
    )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad and "lora_A" not in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "theirs")
    source = open_adapter(str(tmp_path / "theirs"), str(tmp_path / "base"))
    assert source.adapter.config.train == ("gate",)
    adapted = source.config.with_adapter(source.adapter.config)
    params = ours.read_adapter(tmp_path / "theirs", llama(adapted))
    ours.write_adapter(params, adapted, None, tmp_path / "ours")
    written = (tmp_path / "ours" / ours.WEIGHTS).read_bytes()
    assert written == (tmp_path / "theirs" / ours.WEIGHTS).read_bytes()
    expected = torch_logits(theirs)
    logits = torch_logits(loaded(tmp_path / "base", tmp_path / "ours"))
    assert np.abs(logits - expected).max() <= 1e-6 * np.abs(expected).max()

    tensors = safetensors.torch.load_file(tmp_path / "ours" / ours.WEIGHTS)
    published = {"mixtral": "block_sparse_moe.gate.", "granitemoe": f".{module}.layer."}
    own = {"mixtral": "mlp.gate.", "granitemoe": f".{module}."}
    renamed = {
        name.replace(own[family], published[family]) if family in own else name: x
        for name, x in tensors.items()
    }
    safetensors.torch.save_file(renamed, tmp_path / "ours" / ours.WEIGHTS)
    for name, x in ours.read_adapter(tmp_path / "ours", llama(adapted)).items():
        np.testing.assert_array_equal(x, params[name], err_msg=name)
