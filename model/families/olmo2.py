"""OLMo 2: norms after attention and feed-forward, and an RMS norm over all queries, and over all
keys, before RoPE."""

from __future__ import annotations

from .family import Family

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    computes={"qk_norm": "all", "norms": "after"},
    defaults={
        "vocab_size": 50304,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 1,
        "bos_token_id": None,
        "eos_token_id": 50279,
    },
    configurable=("attention_bias",),
    presets={
        "olmo2-7b": {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "vocab_size": 100352,
            "rms_norm_eps": 1e-6,
            "bos_token_id": None,
            "eos_token_id": 100257,
            "pad_token_id": 100277,
            "rope": {"theta": 5e5},
        },
    },
)
