"""Prompts as token ids: transformers' of the whole text; templates that a tokenizer cannot write."""

import pytest

from data.errors import UserError
from data.tokenizer import Tokenizer
from eval import prompts
from tests import small_model
from tests.legacy_llama import legacy_llama

VICUNA = "USER: {{ messages[0].content }}{% if add_generation_prompt %} ASSISTANT:{% endif %}"


@pytest.mark.parametrize("template", [None, "tokenizer"])
@pytest.mark.parametrize("prefix", ["", " The answer is", "A"])
def test_a_prompt_and_its_answers_beginning_are_encoded_together(tmp_path, template, prefix):
    """As transformers encodes the whole text: the tokenizer of LLaMA 1 and 2 puts a space before
    every text."""
    theirs = legacy_llama(tmp_path, "{{ bos_token }}" + VICUNA)
    turns = [{"role": "user", "content": "Which letter?"}]
    text = theirs.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    text = "<s>" * (template is None) + ("Which letter?" if template is None else text) + prefix
    prompt = prompts.Prompt("Which letter?", 4, prefix)
    ids = prompts.prompt_ids(prompt, Tokenizer.load(tmp_path), template)
    assert ids == theirs(text, add_special_tokens=False)["input_ids"]


def test_a_template_that_the_tokenizer_cannot_write_is_refused():
    """The message names the flag, what is missing, and only templates that work."""
    tokenizer = Tokenizer.load(small_model.TOKENIZER)
    tokenizer.chat_template = None
    prompts.check_template("vicuna_v1.1", tokenizer)
    for template, lacking in (("chatml", "<|im_start|>, <|im_end|>"), ("tokenizer", "chat templ")):
        with pytest.raises(UserError) as refused:
            prompts.check_template(template, tokenizer)
        error, usable = str(refused.value).removesuffix(" would work").split("; ")
        assert error.startswith(
            f"--template: found {template}, and the model's tokenizer has no {lacking}"
        )
        for name in usable.split(", "):
            prompts.check_template(name, tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(
        UserError, match=r"vicuna_v1\.1, and the model's tokenizer has no EOS token"
    ):
        prompts.check_template("vicuna_v1.1", tokenizer)
