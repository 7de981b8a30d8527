"""Llama 1 to 3.2 and models of the same form: SmolLM2, the papers' sizes."""

from __future__ import annotations

from typing import Any

from .family import AS_LLAMA, Family


def _sizes(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


def _llama3(
    factor: float, hidden: int, ffn: int, layers: int, heads: int, **more: Any
) -> dict[str, Any]:
    rope = {
        "rule": "llama3",
        "theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _sizes(
        hidden,
        ffn,
        layers,
        heads,
        8,
        vocab_size=128256,
        rms_norm_eps=1e-5,
        rope=rope,
        max_position_embeddings=131072,
        bos_token_id=128000,
        eos_token_id=128001,
        **more,
    )


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    llama_cpp_rules=AS_LLAMA,
    configurable=("attention_bias", "mlp_bias"),
    constants={"pretraining_tp": 1},
    presets={
        # Ring Attention's and Striped Attention's sizes (vocabulary 32000).
        "llama-1b": _sizes(2048, 5504, 22, 16),
        "llama-3b": _sizes(3200, 8640, 26, 32),
        "llama-7b": _sizes(4096, 11008, 32, 32),
        "llama-13b": _sizes(5120, 13824, 40, 40),
        "llama-30b": _sizes(6656, 17920, 60, 52),
        "llama-65b": _sizes(8192, 22016, 80, 64),
        "llama-3.1-8b": _llama3(8.0, 4096, 14336, 32, 32),
        "llama-3.1-70b": _llama3(8.0, 8192, 28672, 80, 64),
        "llama-3.2-1b": _llama3(32.0, 2048, 8192, 16, 32, tie_word_embeddings=True),
        "llama-3.2-3b": _llama3(32.0, 3072, 8192, 28, 24, tie_word_embeddings=True),
        "smollm2-135m": _sizes(
            576,
            1536,
            30,
            9,
            3,
            vocab_size=49152,
            rms_norm_eps=1e-5,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            pad_token_id=2,
            rope={"theta": 100000.0},
        ),
        # Small enough for tests, with the hard cases: grouped heads, head_dim different from hidden
        # / heads.
        "tiny": _sizes(64, 128, 2, 4, 2, head_dim=32, vocab_size=512),
    },
)
