"""Mixtral: Mistral's layer with experts instead of every feed-forward."""

from __future__ import annotations

from .family import AS_LLAMA, AS_MISTRAL, MIXTURE, WITH_EXPERTS, Family

_SIZES = {
    "num_key_value_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope": {"theta": 1e6},
}

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    llama_cpp_rules=AS_LLAMA,
    without_rope_scaling=("SGLang", "mlx-lm"),
    without_window=AS_MISTRAL,
    computes={"norm_topk_prob": True},
    defaults={
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    configurable=("sliding_window", *MIXTURE),
    ignores=("attention_bias", "use_sliding_window"),
    theta=1e6,
    all_linear=WITH_EXPERTS,
    constants={"router_jitter_noise": 0.0},
    config_names={"num_experts": "num_local_experts"},
    tensors={
        "mlp.gate.weight": "block_sparse_moe.gate.weight",
        "mlp.experts.gate_proj.weight": "block_sparse_moe.experts.{j}.w1.weight",
        "mlp.experts.up_proj.weight": "block_sparse_moe.experts.{j}.w3.weight",
        "mlp.experts.down_proj.weight": "block_sparse_moe.experts.{j}.w2.weight",
    },
    presets={
        "mixtral-8x7b": {
            **_SIZES,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 32768,
            "router_aux_loss_coef": 0.02,
        },
        "mixtral-8x22b": {
            **_SIZES,
            "hidden_size": 6144,
            "intermediate_size": 16384,
            "num_hidden_layers": 56,
            "num_attention_heads": 48,
            "max_position_embeddings": 65536,
            "router_aux_loss_coef": 0.001,
        },
    },
)
