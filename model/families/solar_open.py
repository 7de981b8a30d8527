"""Solar Open: experts in every layer, chosen by sigmoids with constant corrections, and a shared
expert."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..number_checks import require_int
from .family import STACKED, WITH_EXPERTS, Family

SHARED = {
    f"mlp.shared_expert.{name}.weight": f"mlp.shared_experts.{name}.weight"
    for name in ("gate_proj", "up_proj", "down_proj")
}
_SIZES = {
    "vocab_size": 196608,
    "hidden_size": 4096,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280,
    "norm_topk_prob": True,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedExpertsFamily(Family):
    """A family whose configs count shared experts, which form a single one of their total width.

    Attributes:
      shared_name: the field with their number; shared_count: the number if config.json omits it.
    """

    shared_name: str = "n_shared_experts"
    shared_count: int = 1

    def normalise(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.normalise`."""
        config = dict(config)
        shared = config.pop(self.shared_name, self.shared_count)
        require_int(self.shared_name, shared, at_least=0)
        width = config.get("moe_intermediate_size", self.defaults["moe_intermediate_size"])
        require_int("moe_intermediate_size", width, at_least=1)
        return {**config, "shared_expert_intermediate_size": shared * width}

    def write(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.write`."""
        written = super().write(fields)
        width = written.pop("shared_expert_intermediate_size")
        return {**written, self.shared_name: width // written["moe_intermediate_size"]}


SOLAR_OPEN = SharedExpertsFamily(
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    without_rope_scaling=("mlx-lm",),
    computes={"router_scores": "sigmoid", "router_correction": True, "output_bias": False},
    defaults=_SIZES,
    configurable=(
        "attention_bias",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts",
        "num_experts_per_tok",
        "routed_scaling_factor",
        "shared_expert_intermediate_size",
    ),
    theta=1e6,
    all_linear=WITH_EXPERTS,
    # llama.cpp rotates half of each head unless the fraction is there.
    constants={"n_group": 1, "topk_group": 1, "partial_rotary_factor": 1.0},
    config_names={"num_experts": "n_routed_experts"},
    tensors=SHARED,
    stacked={**STACKED, **SHARED},
    presets={
        "solar-open-100b": {
            **_SIZES,
            "shared_expert_intermediate_size": 1280,
            "rope": {"theta": 1e6},
        },
    },
)
