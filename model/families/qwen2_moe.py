"""Qwen1.5 and Qwen2 (mixtures of experts): Qwen2's attention, experts instead of every
feed-forward or of most, and a gated shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..number_checks import require_int
from .family import MIXTURE, WindowedFamily


def _sizes(hidden: int, width: int, shared: int, layers: int, heads: int, **more: Any) -> dict:
    return {
        "hidden_size": hidden,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": shared,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "attention_bias": True,
        "router_aux_loss_coef": 0.001,
        "vocab_size": 151936,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "rope": {"theta": 1e6},
        **more,
    }


class QwenMoeFamily(WindowedFamily):
    """A family whose configs list the layers without experts, and may have an interval of those
    with experts."""

    def normalise(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.normalise`."""
        config = super().normalise(config)
        dense, step = config.get("mlp_only_layers") or (), config.pop("decoder_sparse_step", 1)
        require_int("decoder_sparse_step", step, at_least=1)
        layers = config.get("num_hidden_layers", self.defaults["num_hidden_layers"])
        # Transformers too reads numbers that no layer has.
        without = [i for i in range(layers) if i in dense or (i + 1) % step]
        return {**config, "mlp_only_layers": without}


QWEN2_MOE = QwenMoeFamily(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    computes={"output_bias": False, "shared_expert_gate": True},
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "attention_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "router_aux_loss_coef": 0.001,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    configurable=(
        "attention_bias",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "shared_expert_intermediate_size",
        *MIXTURE,
    ),
    config_names={"attention_bias": "qkv_bias"},
    ignores=("attention_bias",),
    constants={"use_sliding_window": False, "decoder_sparse_step": 1},
    presets={
        "qwen1.5-moe-a2.7b": _sizes(
            2048,
            1408,
            5632,
            24,
            16,
            intermediate_size=5632,
            num_experts=60,
            num_experts_per_tok=4,
            max_position_embeddings=8192,
        ),
        "qwen2-57b-a14b": _sizes(
            3584,
            2560,
            20480,
            28,
            28,
            intermediate_size=18944,
            num_key_value_heads=4,
            num_experts=64,
            num_experts_per_tok=8,
            max_position_embeddings=32768,
        ),
    },
)
