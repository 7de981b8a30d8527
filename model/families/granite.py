"""Granite 3 (dense): Llama's layer with four multipliers: of embeddings, scores, residual branches
and logits."""

from __future__ import annotations

from .family import AS_LLAMA, Family

GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    llama_cpp_rules=AS_LLAMA,
    defaults={"attention_multiplier": 1.0},
    configurable=(
        "attention_bias",
        "mlp_bias",
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    ),
    presets={
        "granite-3.3-8b": {
            "hidden_size": 4096,
            "intermediate_size": 12800,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "vocab_size": 49159,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0078125,
            "residual_multiplier": 0.22,
            "logits_scaling": 16.0,
            "rope": {"theta": 1e7},
        },
    },
)
