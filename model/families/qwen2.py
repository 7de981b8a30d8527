"""Qwen2 and Qwen2.5 (dense): biases of q, k and v, but not of the output projection."""

from __future__ import annotations

from .family import WindowedFamily

QWEN2 = WindowedFamily(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    computes={"attention_bias": True, "output_bias": False},
    defaults={
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    constants={"use_sliding_window": False},
    presets={
        "qwen2.5-0.5b": {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
            "bos_token_id": 151643,
            "eos_token_id": 151643,
            "rope": {"theta": 1e6},
        },
        "qwen2.5-7b": {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "vocab_size": 152064,
            "bos_token_id": 151643,
            "eos_token_id": 151643,
            "rope": {"theta": 1e6},
        },
    },
)
