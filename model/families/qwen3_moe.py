"""Qwen3 (mixtures of experts): Qwen3's attention, and experts instead of every feed-forward or of
most."""

from __future__ import annotations

from typing import Any

from .family import MIXTURE, WITH_EXPERTS
from .qwen2_moe import QwenMoeFamily


def _sizes(hidden: int, width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "moe_intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "rope": {"theta": 1e6},
        **more,
    }


class Qwen3Moe(QwenMoeFamily):
    """Reads the number of experts under both names: transformers 5 writes `num_local_experts`."""

    def normalise(self, config):
        """See `Family.normalise`."""
        config = super().normalise(config)
        if "num_local_experts" in config:
            config["num_experts"] = config.pop("num_local_experts")
        return config


QWEN3_MOE = Qwen3Moe(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    without_rope_scaling=("mlx-lm",),
    computes={"qk_norm": "head"},
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "router_aux_loss_coef": 0.001,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    configurable=(
        "attention_bias",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        *MIXTURE,
    ),
    all_linear=WITH_EXPERTS,
    constants={"use_sliding_window": False, "decoder_sparse_step": 1},
    trained_lengths={40960: 32768},  # the rest is for the answer
    presets={
        "qwen3-30b-a3b": _sizes(2048, 768, 48, 32, intermediate_size=6144),
        "qwen3-235b-a22b": _sizes(4096, 1536, 94, 64, intermediate_size=12288),
    },
)
