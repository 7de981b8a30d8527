"""Adapters of families with layers of their own kind, against PEFT."""

import numpy as np
import peft
import pytest
import torch
import transformers

from tests.model.families.test_families import saved
from tests.trainer.huggingface.test_fused_adapters import logits_of, logits_of_peft


@pytest.mark.parametrize(
    "kind", ["olmo3", "seed_oss with other biases", "ministral3", "exaone4", "glm4"]
)
def test_logits_with_an_adapter_of_all_linear_match_peft(kind, tmp_path):
    """Beyond the window and RoPE's original length."""
    base = tmp_path / "base"
    saved(kind, base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(tmp_path / "adapter")
    tokens = np.random.default_rng(0).integers(0, 128, (2, 48), np.int32)
    expected = logits_of_peft(model, tokens)
    logits, adapted, _ = logits_of(tmp_path / "adapter", base, tokens)
    assert len(adapted.config.adapter.projections) == 7
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()
    assert np.abs(logits_of_peft(model.unload(), tokens) - expected).max() > 1e-2
