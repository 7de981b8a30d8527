"""Granite 3 (mixtures of experts): Granite's layer with experts instead of every feed-forward."""

from __future__ import annotations

from .family import AS_LLAMA, MIXTURE, Family

_EXPERTS = "block_sparse_moe.experts"

GRANITEMOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    llama_cpp_rules=AS_LLAMA,
    without_rope_scaling=("SGLang",),
    computes={"norm_topk_prob": True},
    defaults={
        "attention_multiplier": 1.0,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    configurable=(
        "attention_bias",
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
        *MIXTURE,
    ),
    config_names={"num_experts": "num_local_experts"},
    tensors={
        "mlp.gate.weight": "block_sparse_moe.router.layer.weight",
        "mlp.experts.gate_proj.weight": "block_sparse_moe.input_linear.weight",
        "mlp.experts.up_proj.weight": "block_sparse_moe.input_linear.weight",
        "mlp.experts.down_proj.weight": "block_sparse_moe.output_linear.weight",
    },
    stacked={
        "mlp.gate.weight": "block_sparse_moe.router.weight",
        "mlp.experts.gate_proj.weight": f"{_EXPERTS}.gate_up_proj",
        "mlp.experts.up_proj.weight": f"{_EXPERTS}.gate_up_proj",
        "mlp.experts.down_proj.weight": f"{_EXPERTS}.down_proj",
    },
    presets={
        "granite-3.1-3b-a800m": {
            "hidden_size": 1536,
            "intermediate_size": 512,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "vocab_size": 49155,
            "tie_word_embeddings": True,
            "num_experts": 40,
            "num_experts_per_tok": 8,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.015625,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
            "rope": {"theta": 1e7},
        },
    },
)
