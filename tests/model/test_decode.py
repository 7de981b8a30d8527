"""Greedy decoding on a mesh gives transformers' tokens."""
import jax
import numpy as np
import pytest
import torch

from model.attention.kernels.counted import counted_kernel
from model.config import LlamaConfig
from model.decode import Generator
from trainer.huggingface.read import read_hf

from .build import llama, tiny
from .test_llama import RULES, saved_by_transformers, transformers_logits

PROMPTS = [5, 31, 64]


@pytest.mark.parametrize("shape", [{}, {"fsdp": 2, "tensor": 2, "sequence": 2}, {"sequence": 8}], ids=str)
def test_tokens_equal_transformers_until_each_prompt_has_met_a_stop(tmp_path, shape):
    truth = saved_by_transformers(tmp_path, tiny(), None).eval()
    config = LlamaConfig.from_hf(tmp_path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 128, length).tolist() for length in PROMPTS]
    answers = []
    for prompt in prompts:
        with torch.no_grad():
            ids = truth.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
        answers.append(ids[0, len(prompt):].tolist())
    stops = tuple({answer[place] for answer, place in zip(answers, (3, 6, 8), strict=True)})
    ends = [min(answer.index(stop) for stop in stops if stop in answer) for answer in answers]
    model = llama(config, shape)
    generator = Generator(model, "striped", rows=4, length=64, new_tokens=12, stop_ids=stops)
    compiled, computed = generator._compiled, []
    vars(generator)["_compiled"] = lambda *given: computed.append(np.asarray(compiled(*given))) or computed[0]
    found = generator(read_hf(tmp_path, config, model.shardings), prompts)
    assert found == [answer[:end] for answer, end in zip(answers, ends, strict=True)] and len(set(ends)) > 1
    # With the last of them all decoding has ended: the fourth row, which no prompt fills, does not hold it up.
    last, steps = np.argmax(ends), max(ends) + 1
    assert computed[0][last].tolist() == answers[last][:steps] + [0] * (12 - steps) and steps < 12


@pytest.mark.parametrize("rule", ["dynamic", "yarn"])
def test_tokens_are_those_of_one_forward_over_the_whole_row(tmp_path, rule):
    """Under the rule `dynamic` the row's length, prompt and new tokens, is part of the model: cached keys agree with it."""
    truth = saved_by_transformers(tmp_path, tiny(), RULES[rule]).eval()
    config = LlamaConfig.from_hf(tmp_path)
    prompts = [np.random.default_rng(length).integers(3, 128, length).tolist() for length in PROMPTS]
    model = llama(config, {"sequence": 2, "tensor": 2})
    answers = Generator(model, "striped", rows=4, length=64, new_tokens=12, stop_ids=())(
        read_hf(tmp_path, config, model.shardings), prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        row = np.zeros((1, 64 + 12), np.int64)
        row[0, :len(prompt) + 12] = prompt + answer
        assert transformers_logits(truth, row)[0, len(prompt) - 1:len(prompt) + 11].argmax(-1).tolist() == answer


def test_no_token_is_computed_that_is_not_asked_for():
    """Of 3 new tokens the prompt's last one gives the first, and the third is never run through the layers."""
    seen = set()
    model = llama(tiny(), kernel=counted_kernel(lambda rank, query, key: seen.add(int(query)), 16, 16))
    Generator(model, "striped", rows=1, length=32, new_tokens=3, stop_ids=())(model.init(0), [[5] * 32])
    jax.effects_barrier()
    assert seen == {0, 16, 32, 33}


def test_prompts_that_do_not_fit_are_refused():
    generator = Generator(llama(tiny()), "striped", rows=1, length=64, new_tokens=4, stop_ids=(2,))
    with pytest.raises(ValueError, match="found 65 tokens; needs 1 to 64"):
        generator({}, [[1] * 65])
    with pytest.raises(ValueError, match="found 2, compiled for 1 rows"):
        generator({}, [[1], [1]])


def test_devices_are_eight():
    """What every test here takes for granted."""
    assert len(jax.devices()) == 8
