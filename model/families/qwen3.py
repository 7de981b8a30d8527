"""Qwen3 (dense): an RMS norm per query and key head before RoPE, and no biases."""

from __future__ import annotations

from typing import Any

from .qwen2 import QwenFamily


def _sizes(hidden: int, ffn: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "rope": {"theta": 1e6},
        **more,
    }


QWEN3 = QwenFamily(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    computes={"qk_norm": "head"},
    defaults={
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
        "head_dim": 128,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    configurable=("attention_bias",),
    constants={"use_sliding_window": False},
    trained_lengths={40960: 32768},  # the rest is for the answer
    presets={
        "qwen3-0.6b": _sizes(1024, 3072, 28, 16, tie_word_embeddings=True),
        "qwen3-1.7b": _sizes(2048, 6144, 28, 16, tie_word_embeddings=True),
        "qwen3-4b": _sizes(2560, 9728, 36, 32, tie_word_embeddings=True),
        "qwen3-8b": _sizes(4096, 12288, 36, 32),
        "qwen3-14b": _sizes(5120, 17408, 40, 40),
        "qwen3-32b": _sizes(5120, 25600, 64, 64),
    },
)
