"""OLMoE: an RMS norm over all queries, and over all keys, before RoPE, and experts in every
layer."""

from __future__ import annotations

from .family import MIXTURE, WITH_EXPERTS, Family

_SIZES = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "router_aux_loss_coef": 0.01,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": 50279,
}

OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    computes={"qk_norm": "all"},
    defaults=_SIZES,
    configurable=("attention_bias", "norm_topk_prob", *MIXTURE),
    all_linear=WITH_EXPERTS,
    presets={"olmoe-1b-7b": {**_SIZES, "intermediate_size": 1024}},
)
