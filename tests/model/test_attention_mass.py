"""The shares of attention by group of tokens, against transformers' attention probabilities."""

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from model.attention_mass import attention_mass
from model.config import TransformerConfig
from tests.errors import within
from trainer.huggingface.read import read_hf

from .build import llama, one_document, permuted, tiny
from .test_llama import saved_by_transformers

GROUPS = 11  # more than the head's 8 numbers, so a layer attends twice
FIELDS = {"num_hidden_layers": 3, "initializer_range": 0.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    saved_by_transformers(folder, tiny(**FIELDS))
    return folder


@pytest.mark.parametrize("shape", [{}, {"fsdp": 2, "sequence": 4}], ids=["one", "fsdp 2, ring 4"])
def test_shares_match_transformers(folder, shape):
    config, random = TransformerConfig.from_hf(folder), np.random.default_rng(0)
    tokens = random.integers(0, config.vocab_size, (2, 64), np.int32)
    group, query_mask = random.integers(-1, GROUPS, (2, 64)), random.random((2, 64)) < 0.3
    truth = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        attentions = truth(torch.tensor(tokens), output_attentions=True).attentions
    probabilities = np.stack([layer.mean(1).numpy() for layer in attentions])  # [N, B, L, L]
    members = group[..., None] == np.arange(GROUPS)
    expected = np.einsum("nbqk,bkg,bq->ng", probabilities, members, query_mask) / query_mask.sum()

    model = llama(config, shape)
    params = read_hf(folder, config, model.shardings, in_memory=model.in_memory)
    batch = {**one_document(tokens), "group": group.astype(np.int32), "query_mask": query_mask}
    batch, _ = permuted(batch, model)
    group, query_mask = batch.pop("group"), batch.pop("query_mask")
    shares = np.asarray(attention_mass(model, params, batch, group, GROUPS, query_mask))
    assert shares.shape == (3, GROUPS) and (shares.sum(1) < 1).all(), "some are in no group"
    within(np.abs(shares - expected).max(), 1e-5, "shares of attention")


def test_the_tensor_axis_is_refused():
    model = llama(tiny(), {"tensor": 2})
    with pytest.raises(ValueError, match="needs a mesh without the axis tensor"):
        attention_mass(model, {}, {}, np.zeros((1, 8)), 1, np.ones((1, 8), bool))
