"""Adapters of some layers, of several ranks, and of vision-language models, against PEFT."""

import json
import operator
import warnings

import jax
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.model.build import llama, mean_loss
from tests.trainer.huggingface.test_names import make
from tests.trainer.huggingface.test_peft import batch_of, tokens_of
from trainer.huggingface import peft as ours
from trainer.model_source import open_adapter

CASES = {
    "layers": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    "one layer": {"target_modules": ["v_proj"], "layers_to_transform": 0},
    "full names": {"target_modules": ["layers.0.self_attn.q_proj", "v_proj"]},
    "pattern": {"target_modules": r".*layers\.1\..*(q|v)_proj"},
    "excluded": {
        "target_modules": "all-linear",
        "exclude_modules": ["o_proj", "layers.0.mlp.up_proj"],
    },
    "excluded by a pattern": {
        "target_modules": ["q_proj", "up_proj"],
        "exclude_modules": r".*\.0\.self_attn.*",
    },
    "ranks": {
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "rank_pattern": {"q_proj": 2, r"layers\.1\.self_attn\.v_proj": 6},
        "alpha_pattern": {"q_proj": 4, r"layers\.1\..*v_proj": 12},
    },
    "ranks by their roots": {
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"q_proj": 1, "v_proj": 2},
        "alpha_pattern": {"q_proj": 2, "v_proj": 8**0.5},  # the scale of both is 2
        "use_rslora": True,
    },
}
FAST = ("full names", "ranks")  # the others are slow tests
OTHER_SCALES = {"target_modules": ["q_proj", "v_proj"], "alpha_pattern": {"v_proj": 3}}


def saved(base, folder, **fields):
    """The base with an adapter of these fields, as PEFT saves it, with a nonzero B."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    options = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **fields}
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return model.eval()


def torch_logits(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.numpy()


def reader_of(folder, base):
    source = open_adapter(str(folder), str(base))
    return source, llama(source.config.with_adapter(source.adapter.config))


def relative(found, expected):
    return np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(fields, id=name, marks=() if name in FAST else pytest.mark.slow)
        for name, fields in CASES.items()
    ],
)
def test_what_is_filled_up_changes_neither_logits_nor_training(fields, hf_model, tmp_path):
    """Gradients of PEFT's numbers are PEFT's, others zero; PEFT computes the same from our file."""
    theirs = saved(hf_model, tmp_path / "theirs", **fields)
    source, model = reader_of(tmp_path / "theirs", hf_model)
    ours.check_trainable(tmp_path / "theirs", model.config)
    tokens, params = tokens_of(2, 0), source.read(model)
    expected = torch_logits(theirs, tokens)
    assert relative(jax.jit(model.logits)(params, batch_of(tokens)), expected) <= 1e-4
    ours.write_adapter(params, model.config, str(hf_model), tmp_path / "ours")
    base = transformers.AutoModelForCausalLM.from_pretrained(hf_model, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    assert relative(torch_logits(loaded, tokens), expected) <= 1e-4

    trained = {name: x for name, x in params.items() if not model.parameters[name].frozen}
    rest = {name: x for name, x in params.items() if name not in trained}
    gradient = jax.jit(
        jax.grad(lambda trained: mean_loss(model)({**trained, **rest}, batch_of(tokens))[0])
    )(trained)
    ours.write_adapter(gradient, model.config, str(hf_model), tmp_path / "gradient")
    found = load_file(tmp_path / "gradient" / ours.WEIGHTS)
    ids = torch.from_numpy(tokens).long()
    theirs(ids, labels=ids).loss.backward()
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            grad = found[name.replace(".default.", ".")]
            part = grad[tuple(map(slice, parameter.shape))]
            assert relative(part, parameter.grad.numpy()) <= 1e-3
            part.zero_()
    assert not any(grad.any() for grad in found.values())


def test_an_adapter_whose_modules_have_several_scales_is_not_continued(hf_model, tmp_path):
    """A step of the optimizer would be another; its logits are PEFT's."""
    theirs = saved(hf_model, tmp_path, **OTHER_SCALES)
    source, model = reader_of(tmp_path, hf_model)
    tokens = tokens_of(2, 0)
    logits = jax.jit(model.logits)(source.read(model), batch_of(tokens))
    assert relative(logits, torch_logits(theirs, tokens)) <= 1e-4
    with pytest.raises(ValueError, match=r"v_proj the scale 0.75, others 2, so the adapter can't"):
        ours.check_trainable(tmp_path, model.config)


def test_layers_are_missing_only_where_the_configuration_says_so(hf_model, tmp_path):
    """DoRA's lengths would be trained in all layers."""
    for number, use_dora in enumerate((True, False)):
        folder = tmp_path / f"{number}"
        fields = {"target_modules": ["q_proj"], "layers_to_transform": [1], "use_dora": use_dora}
        saved(hf_model, folder, **fields)
        message = "layers.0.self_attn.q_proj has no adapter, but others have; with use_dora only"
        if not use_dora:
            path = folder / ours.CONFIG
            path.write_text(json.dumps(json.loads(path.read_text()) | {"layers_to_transform": []}))
            message = "tensor .*layers.0.self_attn.q_proj.lora_A.weight is missing; the base and"
        source, model = reader_of(folder, hf_model)
        with pytest.raises(ValueError, match=message):
            source.read(model)


@pytest.mark.parametrize(
    ("targets", "left_out"),
    [
        ("all-linear", ["left out 18 tensors of adapters of the vision part, such as model.vi"]),
        (r"model\.language_model\..*\.(q|v)_proj", []),
    ],
)
def test_the_text_part_of_a_vision_language_models_adapter_is_read(
    targets, left_out, hf_model, tmp_path
):
    make("gemma3", tmp_path / "base", hf_model)
    theirs = saved(tmp_path / "base", tmp_path / "adapter", target_modules=targets)
    source, model = reader_of(tmp_path / "adapter", tmp_path / "base")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        params = source.read(model)
    found = [str(each.message) for each in warned if "adapter" in str(each.message)]
    assert len(found) == len(left_out) and all(map(operator.contains, found, left_out))
    tokens = tokens_of(2, 0) % 100
    logits = jax.jit(model.logits)(params, batch_of(tokens))
    assert relative(logits, torch_logits(theirs, tokens)) <= 1e-4
    assert relative(logits, torch_logits(theirs.unload(), tokens)) > 1e-3


def test_an_adapter_whose_base_is_gone_names_it_and_its_own_folder(hf_model, tmp_path):
    saved(hf_model, tmp_path, target_modules=["q_proj"])
    path = tmp_path / ours.CONFIG
    content = json.loads(path.read_text()) | {"base_model_name_or_path": "/root/models/llama"}
    path.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}: the base .*: /root/models/llama: no .* addition to --adap"
    ):
        open_adapter(str(tmp_path))
    assert open_adapter(str(tmp_path), str(hf_model)).adapter.config.rank == 4
