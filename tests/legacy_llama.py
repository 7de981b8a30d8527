"""A small tokenizer of the form of LLaMA 1 and 2 and Vicuna: a space is put before every text."""

import json

WORDS = "USER: Which letter? ASSISTANT: The answer is A The B"


def legacy_llama(folder, template, headings=()):
    """Writes the tokenizer with a chat template into a folder; returns transformers' of it.

    Args:
      headings: control tokens that remove the white space after them, like Phi-3's.
    """
    import transformers
    from tokenizers import (
        AddedToken,
        Tokenizer,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    library = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    # For training alone: pieces are words, as in the originals.
    library.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    library.train_from_iterator([WORDS, "user assistant"] * 9, trainer)
    library.pre_tokenizer = None
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    library.add_special_tokens(
        [AddedToken(text, rstrip=True, normalized=False) for text in headings]
    )
    library.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return transformers.AutoTokenizer.from_pretrained(folder)
