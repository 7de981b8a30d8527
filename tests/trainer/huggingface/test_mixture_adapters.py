"""Adapters of mixtures beside peft's own: logits, gradients and files."""

import dataclasses

import jax
import numpy as np
import peft
import pytest
import torch
import transformers

from model.adapter import ATTENTION
from tests.model.build import llama, mean_loss
from tests.trainer.huggingface.test_peft import batch_of
from trainer.huggingface import peft as ours
from trainer.model_source import open_adapter

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.1,
    "pad_token_id": None,
}
KINDS = {
    "qwen3_moe": {"moe_intermediate_size": 32, "norm_topk_prob": True, "intermediate_size": 96},
    "gpt_oss": {"intermediate_size": 32, "sliding_window": 9},
}


@pytest.fixture(
    scope="module", params=["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)]
)
def adapter(request, repository, tmp_path_factory):
    """A mixture with peft's adapter beside attention's projections, and the folders of both."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(request.param, **SIZES, **KINDS[request.param])
    base = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).float()
    base.save_pretrained(folder / "base")
    for path in (repository / "data/fixtures/tiny_tokenizer").iterdir():
        (folder / "base" / path.name).write_bytes(path.read_bytes())
    # Of gpt-oss these are all linear modules; of Qwen3 peft counts the experts among them.
    targets = "all-linear" if request.param == "gpt_oss" else list(ATTENTION)
    options = {"r": 4, "lora_alpha": 8, "target_modules": targets, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(base, peft.LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / "adapter")
    return model, folder / "base", folder / "adapter"


def test_logits_gradients_and_files_are_those_of_peft(adapter, tmp_path):
    theirs, base, folder = adapter
    source = open_adapter(str(folder), str(base))
    model = llama(
        dataclasses.replace(source.config, adapter=source.adapter.config), {"fsdp": 2, "expert": 2}
    )
    params = source.read(model)
    tokens = np.random.default_rng(0).integers(0, 1024, (4, 32), np.int32)
    ids = torch.tensor(tokens, dtype=torch.long)
    output = theirs(ids, labels=ids)
    logits = np.asarray(jax.jit(model.logits)(params, batch_of(tokens)))
    expected = output.logits.detach().numpy()
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()
    output.loss.backward()
    trained = {name: x for name, x in params.items() if not model.parameters[name].frozen}
    rest = {name: x for name, x in params.items() if name not in trained}

    @jax.jit
    @jax.grad
    def gradient(trained):
        return mean_loss(model)({**trained, **rest}, batch_of(tokens))[0]

    found = gradient(trained)
    ours.write_adapter(found, model.config, str(base), tmp_path / "gradients")
    written = peft.utils.load_peft_weights(str(tmp_path / "gradients"), device="cpu")
    names = dict(theirs.named_parameters())
    assert len(written) == 2 * 4 * 2
    for name, value in written.items():
        grad = names[name.replace(".weight", ".default.weight")].grad
        assert (value - grad).abs().max() <= 1e-4 * grad.abs().max(), name
    ours.write_adapter(params, model.config, str(base), tmp_path / "ours")
    again = (tmp_path / "ours" / ours.WEIGHTS).read_bytes()
    assert again == (folder / ours.WEIGHTS).read_bytes()
