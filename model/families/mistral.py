"""Mistral 7B and Nemo: Llama's layer, in some versions with a sliding window in every layer."""

from __future__ import annotations

from .family import AS_LLAMA, AS_MISTRAL, Family

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    llama_cpp_rules=AS_LLAMA,
    without_window=AS_MISTRAL,
    defaults={
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    configurable=("sliding_window",),
    ignores=("attention_bias", "use_sliding_window"),
    presets={
        "mistral-7b-v0.1": {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
        },
        "mistral-7b-v0.3": {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "vocab_size": 32768,
            "rope": {"theta": 1e6},
        },
    },
)
